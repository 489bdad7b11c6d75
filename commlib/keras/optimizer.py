"""An optimizer for ``model.compile`` that is given the mean gradients of all ranks."""

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops import control_flow_util  # nothing public tells whether XLA will compile a graph

from commlib.errors import InvalidArgument
from commlib.exchange import check_config
from commlib.keras.ranks import TIMEOUT_SECONDS, Ranks, path_of
from commlib.tensorflow import DistributedGradients
from commlib.topology import Topology
from commlib.transport.base import Closing
from commlib.transport.watchdog import check_seconds


class DistributedOptimizer(Closing):
    """Wraps ``optimizer`` and gives it the mean gradients of all ranks, which construct the wrapper together.

    ``optimizer``: one of Keras 3, or the name of one. ``topology`` and ``config`` as for
    :class:`commlib.tensorflow.DistributedGradients`, which ``gradients`` is once the model is built.
    ``timeout``: the seconds that a rank waits for the others in a step before it ends the job and names them;
    ``None``: for ever. The first step includes compiling. ``bucket_bytes`` and ``overlap``: also as
    there; ``fit`` then exchanges a bucket of the gradient while it computes others.

    Keras sees the class, attributes and methods of ``optimizer``, except ``build`` and ``apply``. So a model
    is saved with the optimizer inside, and can be loaded where commlib is missing; :func:`load_model` makes
    it distributed again.

    A step that is skipped on any rank changes no weight on all of them. Under the global dtype policy
    ``mixed_float16`` the optimizer gets a loss scale (``keras.optimizers.LossScaleOptimizer``), equal on all
    ranks: gradients are divided by it before they are reduced, and it is halved on all ranks when one of them
    overflows. The ranks begin with equal variables (:class:`commlib.keras.BroadcastVariables`), which is
    checked in the first step unless ``compared``. XLA compiles no such step:
    ``model.compile(jit_compile=False)``. ``uneven``: the ranks say in each step that they have a batch, and
    one that has no more calls ``join`` (:class:`commlib.keras.SynchronizeEpochs`).
    """

    # Own attributes; all others are set on the optimizer inside.
    __slots__ = (
        "_buckets",
        "_config",
        "_numbers",
        "_optimizer",
        "_topology",
        "_variables_built",
        "compared",
        "gradients",
        "ranks",
        "uneven",
    )

    def __init__(
        self,
        optimizer: Any,
        topology: Topology,
        config: Mapping[str, Any],
        *,
        timeout: float | None = TIMEOUT_SECONDS,
        bucket_bytes: int | None = None,
        overlap: bool = False,
    ) -> None:
        if keras.config.backend() != "tensorflow":
            raise InvalidArgument(
                f"KERAS_BACKEND: expected tensorflow, got {keras.config.backend()}: "
                "commlib.torch and commlib.jax serve loops of your own in PyTorch and JAX"
            )
        inner = _optimizer_of(optimizer)
        if keras.config.dtype_policy().name == "mixed_float16" and not _has_loss_scale(inner):
            inner = keras.optimizers.LossScaleOptimizer(inner)
        seconds = None if timeout is None else check_seconds(timeout)
        buckets = {"bucket_bytes": bucket_bytes, "overlap": overlap}
        self._initialize(inner, topology, check_config(config), Ranks(topology.world, seconds), buckets)

    def _initialize(
        self, inner: Any, topology: Topology, config: dict[str, Any], ranks: Ranks, buckets: dict[str, Any]
    ) -> None:
        self._optimizer = inner
        self._topology, self._config, self.ranks, self._buckets = topology, config, ranks, buckets
        self.gradients: DistributedGradients | None = None
        self._variables_built: list[Any] = []
        self._numbers: dict[int, int] = {}
        self.compared = self.uneven = False

    @property  # type: ignore[misc]  # object's can be set
    def __class__(self) -> Any:
        """The class of the optimizer inside, which Keras saves."""
        return type(self._optimizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in DistributedOptimizer.__slots__:
            object.__setattr__(self, name, value)
        elif name == "loss_scale_factor" and value is None:  # by Keras' LossScaleOptimizer around this one
            raise InvalidArgument(
                "optimizer: a loss scale around it would be each rank's own: expected "
                "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer), …)"
            )
        else:
            setattr(self._optimizer, name, value)

    def __dir__(self) -> list[str]:
        return dir(self._optimizer)  # Keras saves what it finds here

    def __deepcopy__(self, memo: dict[int, Any]) -> "DistributedOptimizer":
        made = object.__new__(DistributedOptimizer)
        inner = copy.deepcopy(self._optimizer, memo)
        made._initialize(inner, self._topology, self._config, self.ranks, self._buckets)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._optimizer.__reduce_ex__(protocol)

    def close(self) -> None:
        """Free the communicators that it has made; all ranks call it together, after training.

        Copies that Keras has made of it use the same ones. The topology stays open.
        """
        if self.gradients is not None:
            self.gradients.close()
        self.ranks.close()

    @property
    def inner_optimizer(self) -> Any:
        """The optimizer inside, without its loss scale."""
        return getattr(self._optimizer, "inner_optimizer", self._optimizer)

    def build(self, variables: Sequence[Any]) -> None:
        """Make the state of ``variables``; all ranks call it together."""
        if self.gradients is not None:
            return
        if not self._optimizer.built:
            self._optimizer.build(variables)
        self._variables_built = list(variables)
        self._numbers = {id(variable): number for number, variable in enumerate(variables)}
        with self.ranks.waiting("the making of the optimizer's state"):
            gradients = DistributedGradients(
                self._topology, self._variables_built, self._config, **self._buckets
            )
        gradients.guard = self._exchange
        self.gradients = gradients

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """Reduce the gradients and update the variables with their means; return the number of steps."""
        gradients, variables = zip(*grads_and_vars, strict=True)
        self.apply(gradients, variables)
        return self._optimizer.iterations

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduce the gradients and update the variables with their means.

        A variable whose gradient is ``None`` here is updated with the mean, to which this rank adds zero.
        """
        if self.gradients is None:
            if trainable_variables is None:
                raise InvalidArgument("trainable_variables: expected those of the gradients, got none")
            self.build(list(trainable_variables))
        assert self.gradients is not None
        if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise InvalidArgument(
                "jit_compile: XLA compiles no step that exchanges gradients: expected False, got True"
            )
        variables = self._variables_built if trainable_variables is None else list(trainable_variables)
        means, finite = self.gradients.reduce(self._in_order(list(grads), variables))
        numbers = [self._numbers[id(variable)] for variable in variables]
        self._update([means[number] for number in numbers], variables, finite)

    def join(self, trainable_variables: Sequence[Any]) -> None:
        """Take part in the steps of the other ranks, with gradients of zero, until all ranks have joined.

        The mean of such a step is the sum divided by all ranks: every batch has the same weight.
        """
        self.uneven = False  # below, this rank says that it has no batch
        zeros = [tf.zeros(variable.shape) for variable in trainable_variables]
        while self._agree_on_step(None):
            self.apply(zeros, trainable_variables)

    def load_own_variables(self, store: Any) -> None:
        """Load the optimizer inside, as Keras does with the weights of a model."""
        self._optimizer.load_own_variables(store)
        if self.gradients is not None and self.gradients.exchange.sparse:
            warnings.warn(
                "optimizer: its state was loaded, and the file holds no residual of the reducer: "
                "commlib.keras.BackupAndRestore keeps it",
                stacklevel=2,
            )

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        assert self.gradients is not None
        with self.ranks.waiting(f"step {self.gradients.exchange.steps}"):
            if self.uneven:
                self._agree_on_step(self._learning_rate())
            if not self.compared:
                self.ranks.expect_equal([*self._variables_built, *self._optimizer.variables])
                self.compared = True
            yield

    def _agree_on_step(self, rate: float | None) -> bool:
        """Set the learning rate of the first rank that has a batch, and so a rate; return whether one has.

        Callbacks set the rate by a rank's own steps.
        """
        rates = [each for each in self.ranks.gather("a step", rate) if each is not None]
        if rates and rates[0] != self._learning_rate():
            self.inner_optimizer.learning_rate = rates[0]
        return bool(rates)

    def _learning_rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.inner_optimizer.learning_rate))

    def _in_order(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Return the gradients in the order in which the variables were built, divided by the loss scale."""
        unknown = [path_of(each) for each in variables if id(each) not in self._numbers]
        if unknown:
            raise InvalidArgument(
                f"trainable_variables: {', '.join(unknown)} had no part in it when the optimizer was built: "
                "after a change of what is trainable, compile with a new DistributedOptimizer"
            )
        ordered = [tf.zeros(variable.shape) for variable in self._variables_built]
        for gradient, variable in zip(gradients, variables, strict=True):
            ordered[self._numbers[id(variable)]] = self._unscaled(gradient)
        return ordered

    def _unscaled(self, gradient: Any) -> Any:
        if gradient is None or not _has_loss_scale(self._optimizer):
            return gradient
        return tf.cast(tf.convert_to_tensor(gradient), tf.float32) / self._optimizer.dynamic_scale.value

    def _update(self, means: list[Any], variables: list[Any], finite: Any) -> None:
        if not _has_loss_scale(self._optimizer):
            tf.cond(finite, lambda: self._apply_means(means, variables), lambda: tf.constant(False))
            return
        # The loss scale optimizer divides by the scale again, a power of two, and takes NaN for an overflow.
        factor = tf.where(finite, self._optimizer.dynamic_scale.value, float("nan"))
        self._optimizer.apply([mean * factor for mean in means], variables)

    def _apply_means(self, means: Sequence[Any], variables: Sequence[Any]) -> Any:
        self._optimizer.apply(means, variables)
        return tf.constant(True)


def load_model(
    path: Any,
    topology: Topology,
    config: Mapping[str, Any],
    *,
    timeout: float | None = TIMEOUT_SECONDS,
    bucket_bytes: int | None = None,
    overlap: bool = False,
    **options: Any,
) -> Any:
    """Return the model that ``model.save`` wrote at ``path``, with its optimizer distributed again.

    The optimizer's state comes from the file, the residual is zero. ``timeout``, ``bucket_bytes`` and
    ``overlap``: as for :class:`DistributedOptimizer`. ``options``: those of ``keras.models.load_model``.
    All ranks call it together.
    """
    model = keras.models.load_model(path, **options)
    if getattr(model, "optimizer", None) is None:
        raise InvalidArgument(f"path: expected a model that was saved with its optimizer, got {str(path)!r}")
    model.optimizer = DistributedOptimizer(
        model.optimizer, topology, config, timeout=timeout, bucket_bytes=bucket_bytes, overlap=overlap
    )
    return model


def _optimizer_of(optimizer: Any) -> Any:
    """Return an optimizer of Keras 3 from itself, its name or its configuration."""
    if type(optimizer) is DistributedOptimizer:
        raise InvalidArgument(
            "optimizer: expected one that is not distributed yet, got a DistributedOptimizer"
        )
    try:
        return keras.optimizers.get(optimizer)
    except ValueError as error:
        raise InvalidArgument(f"optimizer: {str(error).splitlines()[0]}") from None


def _has_loss_scale(optimizer: Any) -> bool:
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
