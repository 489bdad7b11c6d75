"""Reducers inside ``tf.function``: the only file of commlib that imports TensorFlow.

Where the topology's transport moves arrays of GPUs, gradients and means stay on the GPU: TensorFlow and CuPy
hand each other their memory by DLPack. TensorFlow tells nobody which streams it computes on, so the host
waits in between, twice a step: until the gradient is there, and until the mean is.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import numpy as np

from commlib.arrays import Array, is_on_gpu, module_of
from commlib.errors import InvalidArgument
from commlib.quiet import without_noise
from commlib.reducers import Passenger, Reducer, Report, make_reducer
from commlib.topology import Topology
from commlib.vectors import ALIGNMENT_BYTES, Float32

with without_noise():
    import keras
    import tensorflow as tf


def array_of(tensor: Any, arrays: ModuleType = np) -> Array:
    """Return the values of an eager tensor as an array of NumPy or CuPy, without a copy; for reading only.

    With CuPy the tensor is on CuPy's current GPU, and all that TensorFlow does there ends first.
    """
    if arrays is np:
        return np.asarray(tensor)
    return arrays.from_dlpack(tf.experimental.dlpack.to_dlpack(tf.convert_to_tensor(tensor)))  # type: ignore[no-any-return]


def tensor_of(array: Any) -> Any:
    """Return an eager tensor of the values of an array, which is given away and not copied.

    All that was done on CuPy's current stream ends first. TensorFlow copies an array of NumPy that it cannot
    take as it is: one that is not aligned to 64 bytes, or may not be written to.
    """
    if not is_on_gpu(array):
        if array.ctypes.data % ALIGNMENT_BYTES or not array.flags.writeable:
            return tf.convert_to_tensor(array)
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    module_of(array).cuda.get_current_stream().synchronize()
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__(stream=-1))


def cut_up(flat: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Return tensors of these shapes with the entries of ``flat`` in their order.

    In ``tf.function`` those that begin at a multiple of 64 bytes are views of its memory; others are copies.
    """
    parts, low = [], 0
    for shape in shapes:
        high = low + int(np.prod(shape, dtype=np.int64))
        parts.append(tf.reshape(flat[low:high], shape))
        low = high
    return parts


def tensorflow_device(gpu: int) -> str:
    """Return TensorFlow's name of the GPU that CUDA numbers so in this process.

    DLPack takes TensorFlow's number of a GPU for CUDA's: ``InvalidArgument`` where they differ.
    """
    numbers = [int(each.name.rsplit(":", 1)[1]) for each in tf.config.get_visible_devices("GPU")]
    if not numbers:
        raise InvalidArgument(
            "topology: its transport moves arrays of GPUs, and TensorFlow sees none: expected one that was "
            "installed with CUDA (tensorflow[and-cuda]), or a transport of host memory (mpi)"
        )
    if gpu >= len(numbers) or numbers[gpu] != gpu:
        raise InvalidArgument(
            f"topology: its transport uses GPU {gpu}, and TensorFlow numbers the GPUs it sees another way "
            f"({numbers}): expected each rank to see its own alone, by CUDA_VISIBLE_DEVICES"
        )
    return f"GPU:{gpu}"


class DistributedGradients:
    """Averages the gradients of ``variables`` over all ranks of ``topology``.

    ``variables``: tf.Variables or Keras variables of static shape. ``config``: the name of a reducer and its
    options, ``{"name": "hitopk", "density": 0.01}``. All gradients travel as one float32 vector of ``size``
    entries, ``sizes`` of each variable. ``reducer`` is there, and ``config`` is that of it.

    With a transport of GPUs the vector is on this rank's GPU throughout: gradients elsewhere are brought
    there by TensorFlow. Steps then run as ``tf.py_function`` on it, else as ``tf.numpy_function`` on the CPU.
    """

    def __init__(self, topology: Topology, variables: Sequence[Any], config: Mapping[str, Any]) -> None:
        self.topology = topology
        self._names = [variable.name for variable in variables]
        self._shapes = [tuple(variable.shape) for variable in variables]
        self.sizes = [int(np.prod(shape, dtype=np.int64)) for shape in self._shapes]
        self.size = sum(self.sizes)
        self._passenger: Passenger | None = None
        self._gpu: Any = None  # CuPy's device
        if topology.world.arrays is not np:
            self._gpu = topology.world.arrays.cuda.Device()  # for threads of TensorFlow it is not current
            self._device = tensorflow_device(self._gpu.id)
        self.reducer = self._make(config)

    @property
    def passenger(self) -> Passenger | None:
        """Whose numbers travel with the mean, wherever the reducer carries any (see ``carried``).

        All ranks set theirs together.
        """
        return self._passenger

    @passenger.setter
    def passenger(self, passenger: Passenger | None) -> None:
        self._passenger = passenger
        self._board()

    @property
    def carried(self) -> bool:
        """Whether the passenger's numbers arrive with each step; if not, they are the caller's to compute.

        It may change with ``switch``, and is then another in a function that has been traced before.
        """
        return self.reducer.passenger is not None

    def _board(self) -> None:
        if self.reducer.carries and self.reducer.passenger is not self._passenger:
            self.reducer.passenger = self._passenger

    def _make(self, config: Mapping[str, Any]) -> Reducer:
        self.config = dict(config)
        options = dict(config)
        return make_reducer(options.pop("name"), self.topology, self.size, **options)

    def switch(self, config: Mapping[str, Any]) -> None:
        """Replace the reducer; what the old one held back goes into the first step of the new one.

        Takes effect in functions that are already traced, too. All ranks call it together. The passenger
        changes over to a reducer that carries one, and is left aside by one that does not.
        """
        if self._gpu is not None:
            self._gpu.synchronize()  # TensorFlow may still read a mean whose memory is free by now
        residual = self.reducer.residual
        self.reducer = self._make(config)
        self.reducer.absorb(residual)
        self._board()

    def reduce(self, gradients: Sequence[Any], weights: Sequence[Any] = ()) -> tuple[list[Any], Any]:
        """Return the mean gradients, in the dtypes and shapes given, and whether the step counts.

        ``gradients`` come in the order of the variables; IndexedSlices are made dense. The second result is a
        scalar bool tensor: false where a NaN or an infinity on any rank voided the step on all of them.
        ``weights``: what the passenger is to look at before, tensors or variables; they are not copied inside
        ``tf.function``.
        """
        for name, gradient in zip(self._names, gradients, strict=True):
            if gradient is None:
                raise InvalidArgument(
                    f"gradients: {name} has none; every variable must take part in the loss"
                )
        tensors = [tf.convert_to_tensor(gradient) for gradient in gradients]
        flat = tf.concat([tf.cast(tf.reshape(tensor, [-1]), tf.float32) for tensor in tensors], axis=0)
        inputs = [flat, *map(tf.convert_to_tensor, weights)]
        results = [tf.float32, tf.bool]
        if self._gpu is None:
            mean, finite = tf.numpy_function(self._reduce, inputs, results, stateful=True)
        else:
            with tf.device(self._device):
                mean, finite = tf.py_function(self._reduce_on_gpu, inputs, results)
        mean.set_shape([self.size])
        finite.set_shape([])
        parts = cut_up(mean, self._shapes)
        means = [tf.cast(part, tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]
        return means, finite

    def reduce_flat(self, flat: Any, weights: Sequence[Any] = ()) -> tuple[Any, Report]:
        """Return the mean of all gradients as one tensor, and what the reducer did; outside ``tf.function``.

        ``flat``: a float32 tensor of shape ``(size,)``, on the GPU where the transport moves arrays of GPUs;
        ``weights`` as for ``reduce``. The mean is where ``flat`` is, and belongs to the caller.
        """
        arrays = self.topology.world.arrays
        with nullcontext() if self._gpu is None else self._gpu:
            mean = self._reduce(array_of(flat, arrays), *(array_of(weight, arrays) for weight in weights))[0]
            assert self.reducer.last is not None
            return tensor_of(mean), self.reducer.last

    def _reduce_on_gpu(self, flat: Any, *weights: Any) -> tuple[Any, Any]:
        mean, report = self.reduce_flat(flat, weights)
        return mean, tf.constant(report.finite)

    def _reduce(self, flat: Float32, *weights: Any) -> tuple[Float32, np.bool_]:
        passenger = self.reducer.passenger
        if passenger is not None:
            passenger.look([weight if is_on_gpu(weight) else np.asarray(weight) for weight in weights])
        mean = self.reducer.reduce(flat)
        if passenger is not None:
            passenger.look([])  # TensorFlow copies a variable that it updates while somebody holds its memory
        assert self.reducer.last is not None
        return mean, np.bool_(self.reducer.last.finite)


class DistributedOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]  # Keras has no types
    """Gives ``optimizer`` the mean gradients of all ranks, for ``model.compile`` and ``model.fit``.

    ``topology`` and ``config`` as for :class:`DistributedGradients`, which ``gradients`` is once the model is
    built. A step that is void on any rank changes no weight on all of them. The ranks begin with the same
    weights, and make equally many steps; XLA compiles no such step: ``model.compile(jit_compile=False)``.
    """

    def __init__(
        self, optimizer: Any, topology: Topology, config: Mapping[str, Any], name: str = "distributed"
    ) -> None:
        if keras.config.dtype_policy().name == "mixed_float16":
            raise InvalidArgument(
                "dtype policy: expected one without a loss scale, which each rank would change alone, "
                "got mixed_float16: take mixed_bfloat16, or a loop of your own with pto.keras.LossScale"
            )
        super().__init__(learning_rate=0.0, name=name)  # not used: that of the optimizer inside is
        self.inner_optimizer = optimizer
        self.gradients: DistributedGradients | None = None
        self._made_with = (topology, config)

    def build(self, variables: Sequence[Any]) -> None:
        """Make the state of ``variables``; all ranks call it together."""
        if self.gradients is not None:
            return
        self.inner_optimizer.build(variables)
        self.gradients = DistributedGradients(self._made_with[0], variables, self._made_with[1])
        self._trainable_variables = list(variables)
        self.built = True

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduce the gradients and update the variables with their means."""
        if self.gradients is None:
            if trainable_variables is None:
                raise InvalidArgument("trainable_variables: expected those of the gradients, got none")
            with tf.init_scope():
                self.build(list(trainable_variables))
        assert self.gradients is not None
        means, finite = self.gradients.reduce(list(grads))
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        tf.cond(finite, lambda: self._apply_means(means, variables), lambda: tf.constant(False))

    def _apply_means(self, means: Sequence[Any], variables: Sequence[Any]) -> Any:
        self.inner_optimizer.apply(means, variables)
        return tf.constant(True)

    @property
    def variables(self) -> list[Any]:
        """Those of the optimizer inside."""
        return list(self.inner_optimizer.variables)

    @property
    def learning_rate(self) -> Any:
        """That of the optimizer inside."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def iterations(self) -> Any:
        """The steps that counted."""
        return self.inner_optimizer.iterations

    def get_config(self) -> dict[str, Any]:
        """Refuse: ranks are of one job, and are not saved."""
        raise NotImplementedError("save the model with include_optimizer=False, or the inner optimizer alone")
