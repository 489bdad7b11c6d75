"""Reducers in JAX: the exchange between a jitted gradient and a jitted update. Only this module imports jax.

    topology = commlib.Topology(commlib.transport.mpi.world())
    parameters = broadcast(parameters, topology)
    gradients = DistributedGradients(parameters, topology, {"name": "hitopk", "density": 0.01})
    for batch in batches:
        mean = gradients.reduce(jax.jit(jax.grad(loss))(parameters, batch))
        if gradients.finite:  # no NaN and no infinity on any rank
            parameters, state = update(parameters, state, mean)  # jitted; of optax, say

Each rank is a process; what a process does on several devices (``pmap``, ``shard_map``) stays with JAX.
"""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from commlib.arrays import ALIGNMENT_BYTES
from commlib.errors import InvalidArgument
from commlib.exchange import BucketExchange, check_config, check_variables
from commlib.reducers import Report
from commlib.topology import Topology
from commlib.trace import Recorder
from commlib.transport.base import Closing
from commlib.vectors import VALUE_BYTES

__all__ = ["DistributedGradients", "broadcast"]

DTYPES = ("float32", "float16", "bfloat16")


class DistributedGradients(Closing):
    """Averages trees of gradients over all ranks by a reducer.

    ``tree``: parameters or gradients, a pytree of arrays of float32, float16 or bfloat16, whose structure,
    shapes and types all gradients have; they are added up in float32. ``config``: the name of a reducer and
    its options, as for ``commlib.make_reducer``. ``report``: of the latest step, ``None`` before the first.

    All ranks construct it together, with equal trees. ``InvalidArgument`` names an unusable argument,
    ``RanksDisagree`` what differs. ``close`` frees the reducer's resources; the topology stays open.
    """

    def __init__(self, tree: Any, topology: Topology, config: Mapping[str, Any]) -> None:
        self.topology, self.config = topology, check_config(config)
        if topology.world.arrays is not np:
            raise InvalidArgument("topology: expected a transport of arrays in host memory, got one of GPUs")
        names, leaves, self._structure = _flattened(tree)
        self._kinds = _kinds_of(leaves)
        for name, (_, dtype) in zip(names, self._kinds, strict=True):
            if dtype.name not in DTYPES:
                raise InvalidArgument(f"tree{name}: expected float32, float16 or bfloat16, got {dtype.name}")
        check_variables(topology.world, names, [shape for shape, _ in self._kinds])
        sizes = [int(np.prod(shape)) for shape, _ in self._kinds]
        # JAX takes a mean at an aligned address without a copy: leaves that would misalign others come last.
        self._order = sorted(
            range(len(sizes)),
            key=lambda leaf: (sizes[leaf] * VALUE_BYTES % ALIGNMENT_BYTES > 0, -sizes[leaf]),
        )
        ends = list(accumulate(sizes[leaf] for leaf in self._order))
        places = {leaf: slice(end - sizes[leaf], end) for leaf, end in zip(self._order, ends, strict=True)}
        self._places = [places[leaf] for leaf in range(len(sizes))]
        shapes = [self._kinds[leaf][0] for leaf in self._order]
        self.exchange = BucketExchange(topology, ends[-1:], self.config, shapes=[shapes])
        self.report: Report | None = None
        self._gradient = np.empty(self.exchange.size, np.float32)

    @property
    def finite(self) -> bool:
        """Whether the latest step counts; else its means are NaN, and no parameter must take them."""
        return self.report is None or self.report.finite

    @property
    def residual(self) -> Any:
        """What this rank has not sent: a tree of float32 arrays in host memory, copies."""
        residual, kinds = self.exchange.residual, self._kinds
        leaves = [residual[own].reshape(shape) for own, (shape, _) in zip(self._places, kinds, strict=True)]
        return jax.tree_util.tree_unflatten(self._structure, leaves)

    def reduce(self, gradients: Any) -> Any:
        """Return the mean of a tree of gradients over all ranks, on the gradients' devices, in their dtypes.

        Collective. Call it between jitted functions: inside ``jit``, where it would run only at tracing, it
        raises ``InvalidArgument``. The means are all NaN where the step is skipped.
        """
        leaves, structure = jax.tree_util.tree_flatten(gradients)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise InvalidArgument(
                "gradients: expected arrays, got tracers: call reduce between two jitted functions, "
                "not inside of jit, grad or vmap"
            )
        kinds = _kinds_of(leaves)
        if structure != self._structure or kinds != self._kinds:
            raise InvalidArgument(
                f"gradients: expected a tree like {self._structure} of {_text(self._kinds)}, "
                f"got {structure} of {_text(kinds)}"
            )
        parts = [np.asarray(leaves[leaf]).reshape(-1) for leaf in self._order]
        if len(parts) == 1 and parts[0].dtype == np.float32:
            gradient = parts[0]  # the memory of JAX
        else:
            gradient = np.concatenate(parts, out=self._gradient, casting="unsafe")
        self.exchange.submit(0, gradient)
        mean, self.report = self.exchange.wait()
        means = [
            jax.device_put(mean[place].reshape(shape).astype(dtype, copy=False), _place_of(leaf))
            for place, (shape, dtype), leaf in zip(self._places, kinds, leaves, strict=True)
        ]
        return jax.tree_util.tree_unflatten(structure, means)

    def switch(self, config: Mapping[str, Any]) -> None:
        """Replace the reducer, on all ranks together; its first step applies the old one's residual."""
        self.config = check_config(config)
        self.exchange.switch(self.config)

    def record(self, recorder: Recorder | None) -> None:
        """Record a span of each stage in ``recorder`` from the next step on, or stop recording."""
        self.exchange.record(recorder)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's reducer: copies, of NumPy arrays and plain Python.

        Each rank keeps its own, beside parameters and optimizer, between two steps.
        """
        return self.exchange.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned on this rank; the next steps are those that would follow.

        ``InvalidArgument`` for another size, another reducer or other nodes.
        """
        self.exchange.load_state_dict(state)

    def close(self) -> None:
        self.exchange.close()


def broadcast(tree: Any, topology: Topology) -> Any:
    """Return the arrays of rank 0, on this rank's devices; all ranks call it together.

    ``RanksDisagree`` where names or shapes differ.
    """
    names, leaves, structure = _flattened(tree)
    check_variables(topology.world, names, [np.shape(leaf) for leaf in leaves])
    own = [np.asarray(leaf) for leaf in leaves] if topology.world.rank == 0 else None
    first = topology.world.allgather_objects(own)[0]
    placed = [jax.device_put(value, _place_of(leaf)) for value, leaf in zip(first, leaves, strict=True)]
    return jax.tree_util.tree_unflatten(structure, placed)


def _flattened(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Return the names of a tree's leaves, the leaves, and its structure."""
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(path) for path, _ in paths], [leaf for _, leaf in paths], structure


def _kinds_of(leaves: list[Any]) -> list[tuple[tuple[int, ...], Any]]:
    return [(np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]  # Python's numbers are leaves, too


def _place_of(leaf: Any) -> Any:
    """Return where an array is; ``None``, JAX's default, for one of NumPy."""
    return getattr(leaf, "sharding", None)


def _text(kinds: list[tuple[tuple[int, ...], Any]]) -> str:
    return ", ".join(f"{dtype.name}{list(shape)}" for shape, dtype in kinds)
