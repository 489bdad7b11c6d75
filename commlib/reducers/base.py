"""The base class of reducers: an all-reduce algorithm for gradients together with its state.

:class:`Reducer` has the options, checks of arguments and settings, the report, the residual of a predecessor,
and the decision whether a step counts on all ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any, ClassVar, overload

import ml_dtypes
import numpy as np
import numpy.typing as npt

from commlib.agreement import (
    CROSSED,
    check_settings,
    differences,
    differing,
    digest,
    flags_of,
    with_flags,
    without_flags,
)
from commlib.arrays import Workspace, expect_module, memory_errors, to_host
from commlib.cost import Cost
from commlib.errors import InvalidArgument, RanksDisagree
from commlib.reducers.mean import AnyMeanBuffer, MeanBuffer, MeanBuffers, SparseMeanBuffer
from commlib.reducers.report import Forgotten, Outcome, Report, StageSeconds, Stopwatch
from commlib.topology import Topology
from commlib.trace import Recorder
from commlib.vectors import Float32, Index, SparseVector, is_finite


@dataclass(frozen=True)
class Options:
    """Options that must be equal on all ranks; a reducer with options derives a frozen dataclass."""


def check_is_bool(name: str, value: object) -> None:
    """Raise ``InvalidArgument`` about the option ``name`` unless its value is true or false."""
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name}: expected true or false, got {value!r}")


class Reducer(ABC):
    """Averages a gradient of ``size`` entries over all ranks of ``topology``.

    A subclass defines ``sparse`` and ``_reduce``, and with state of its own ``_commit`` and ``_discard``; see
    docs/own_parts.md for an example. Its options are keyword-only parameters of its constructor, which
    passes its base class's options on as ``**options``: ``make_reducer`` and configurations check options by
    this signature. It stores them as a frozen dataclass, ``options``, which is compared between ranks. The
    constructor sends nothing: ``synchronize`` does, once.

    ``approximates``: it sends rows or factors in place of the entries of largest magnitude. Training then
    converges differently (docs/convergence.md), so ``auto``, which compares only seconds, does not pick it.

    ``last`` is the :class:`Report` of the latest call, ``None`` before the first. ``arrays``: the module
    whose arrays gradient, mean and residual are, NumPy, or CuPy if the topology's transport sends those.
    """

    sparse: ClassVar[bool]
    cost: ClassVar[Cost | None] = None
    approximates: ClassVar[bool] = False
    options: Any = Options()

    def __init__(self, topology: Topology, size: int) -> None:
        self.topology = topology
        self.arrays = topology.world.arrays
        if not isinstance(size, (int, np.integer)) or isinstance(size, bool) or size < 1:
            raise InvalidArgument(f"size: expected a whole number of entries from 1, got {size!r}")
        self.size = int(size)
        self.steps = 0
        self.last: Report | None = None
        self.workspace = Workspace(self.arrays)
        self._stopwatch = Stopwatch(topology.world.now, StageSeconds)
        self._means = MeanBuffers(self.size, self.arrays)
        self._carried: Float32 | None = None  # the residual of a predecessor
        self._is_synchronized = False
        self._shared: str | None = None  # the settings as text, which every step compares
        self._comparison: Callable[[], npt.NDArray[np.int64]] | None = None  # of the step under way
        self._flags = 0  # of any rank, in the step that is under way

    @property
    def takes_entries(self) -> bool:
        """Whether ``_reduce`` takes a ``SparseVector``; if not, such a gradient is made dense."""
        return False

    @overload
    def reduce(self, gradient: SparseVector) -> SparseVector: ...

    @overload
    def reduce(self, gradient: npt.ArrayLike, out: Float32 | None = None) -> Float32: ...

    def reduce(
        self, gradient: npt.ArrayLike | SparseVector, out: Float32 | None = None
    ) -> Float32 | SparseVector:
        """Return the mean over ranks, float32 of shape ``(size,)``, bitwise equal on all of them.

        ``gradient``: shape ``(size,)``, any float or integer type, not changed. What this call does not
        apply stays in the residual. A NaN or an infinity on any rank makes all ranks skip the step: the
        result is all NaN, ``last.finite`` is false and every residual is as before.

        The mean is memory of the reducer; in host memory it is read-only. It is valid until the next
        ``reduce``, and after that as long as the array, a view of it or a tensor that shares it exists. Copy
        means to hold more than two. With ``out``, a contiguous array of that shape and type apart from
        ``gradient``, the mean is written there, is returned, and belongs to the caller.

        The mean of a ``SparseVector`` is a ``SparseVector``, to the bit that of the same gradient given dense
        (to rounding, where ``oktopk`` sends all). Its arrays belong to the caller; where it ``is_dense``, the
        above holds for its values. Of a skipped step it has a NaN at index 0. Reducers without
        ``takes_entries`` make such a gradient dense.
        """
        mean: Float32 | SparseVector
        mean, self.last = self.propose(gradient, out)  # type: ignore[arg-type]
        if self.last.finite:
            self.commit()
        return mean

    @overload
    def propose(self, gradient: SparseVector) -> tuple[SparseVector, Report]: ...

    @overload
    def propose(self, gradient: npt.ArrayLike, out: Float32 | None = None) -> tuple[Float32, Report]: ...

    def propose(
        self, gradient: npt.ArrayLike | SparseVector, out: Float32 | None = None
    ) -> tuple[Float32 | SparseVector, Report]:
        """Return the mean and the report of a step whose change of state ``commit`` or ``discard`` decides.

        For a gradient in several parts, each with a reducer, whose step counts only if all parts are finite.
        A step with ``report.finite`` false is discarded already.
        """
        vector, buffer = self._taken(gradient, out)
        if not self._is_synchronized:
            self.synchronize()
        topology, before = self.topology, self.topology.traffic
        self._stopwatch.restart()
        # NaNs and infinities: the ranks agree to skip such a step instead.
        with np.errstate(invalid="ignore", over="ignore"), memory_errors(self):
            if self._carried is not None:
                vector = _sum_of(vector, self._carried)
            if topology.world.size == 1:
                outcome = self._alone(vector, buffer)
            else:  # meanwhile the ranks compare settings and exchange flags
                own = with_flags(self._digest(), topology.flags())
                self._comparison = topology.world.start_allgather_ints([own])
                outcome = self._reduce(vector, buffer)
                self.wait_for_comparison()
        self.steps += 1
        finite = outcome.mean is not None
        if not finite:
            self.discard()
        report = Report(
            finite,
            outcome.selected,
            outcome.applied,
            traffic=topology.traffic - before,
            seconds=self._stopwatch.seconds,
            flags=self._flags,
            forgotten=outcome.forgotten if finite else Forgotten(),
        )
        mean: Any = buffer.result(outcome.mean, out)
        if isinstance(gradient, SparseVector) and not isinstance(mean, SparseVector):
            mean = SparseVector.trusted(self.size, None, mean)
        return mean, report

    def _taken(self, gradient: Any, out: Float32 | None) -> tuple[Any, Any]:
        """Return a gradient as ``_reduce`` takes it, and the buffer for its mean."""
        if not isinstance(gradient, SparseVector):
            vector = as_gradient(gradient, self.size, self.arrays, self.workspace)
            return vector, self._means.take() if out is None else MeanBuffer(
                checked_out(out, vector, self.arrays)
            )
        entries = as_entries(gradient, self.size, self.arrays, out)
        if self.takes_entries:
            return entries, SparseMeanBuffer(self._means)
        return entries.to_dense(), self._means.take()

    def commit(self) -> None:
        """Apply the change of state of the proposed step; once, after a finite ``propose``."""
        self._carried = None
        if self.topology.world.size > 1:
            self._commit()

    def discard(self) -> None:
        """Drop the proposed step: the residual and all other state stay as before the step."""
        if self.topology.world.size > 1:
            self._discard()

    def measure(self, stage: str) -> AbstractContextManager[None]:
        """Add the time of the body to ``stage`` of the report, without stages measured inside the body."""
        return self._stopwatch.measure(stage)

    def record(self, recorder: Recorder | None) -> None:
        """Record a span of each stage in ``recorder`` from the next step on, or stop recording."""
        self._stopwatch.recorder = recorder

    @abstractmethod
    def _reduce(self, gradient: Float32, buffer: MeanBuffer) -> Outcome:
        """Run the algorithm on two ranks or more, and leave its change of state to ``_commit``.

        ``buffer`` holds the memory of the mean: write to ``buffer.dense()``. The gradient must not change; it
        is a ``SparseVector`` only if the reducer has ``takes_entries``. Either all ranks return a mean, or
        none does. That needs no exchange: a NaN that one rank sends makes the sums of all ranks a NaN.
        """

    def _commit(self) -> None:  # noqa: B027 - not every reducer has state of its own
        """Apply the change of state of the latest ``_reduce``."""

    def _discard(self) -> None:  # noqa: B027
        """Undo changes of state that the latest ``_reduce`` has made already."""

    def _alone(self, gradient: Float32 | SparseVector, buffer: AnyMeanBuffer) -> Outcome:
        """Apply everything: the step of a single rank."""
        self._flags = self.topology.flags()
        if isinstance(gradient, SparseVector):
            mean = buffer.scatter([(0, gradient)]) if gradient.is_finite else None
            return Outcome(mean, selected=gradient.nnz, applied=gradient.nnz)
        if not is_finite(gradient):
            return Outcome(None)
        mean = buffer.dense()
        mean[...] = gradient
        return Outcome(mean, selected=self.size, applied=self.size)

    def set_density(self, density: float) -> None:
        """Select another share of the entries from the next step on; sparse reducers define it."""
        raise InvalidArgument(f"density: {type(self).__name__} has none, got {density!r}")

    def sent_indices(self, mean: Float32) -> Index:
        """Return the indices of the gradient whose entries left this rank in the latest step.

        ``mean``: the result of that step. A single rank sends nothing.
        """
        return np.flatnonzero(mean if self.topology.world.size > 1 else mean[:0])

    @property
    def residual(self) -> Float32:
        """The unsent part of gradients: a new float32 array of shape ``(size,)``, 0 outside the own shard."""
        if self._carried is None:
            return self.arrays.zeros(self.size, np.float32)
        return self._carried.copy()

    def add_residual(self, residual: Float32) -> None:
        """Add a vector of shape ``(size,)`` to this rank's next gradient that counts.

        This flushes the residual of a predecessor into the first step of its successor. On a GPU, a vector in
        host memory, such as a checkpoint holds, is accepted, too.
        """
        self._carried = added_residual(self._carried, residual, self.size, self.arrays)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a restored reducer needs to continue bitwise: copies, in host memory."""
        return {
            "settings": self.settings(),
            "steps": self.steps,
            "carried": None if self._carried is None else to_host(self._carried.copy()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned on the same rank of an equal topology; arrays are copied."""
        check_settings(state["settings"], self.settings())
        self.steps = state["steps"]
        carried = state["carried"]
        self._carried = None if carried is None else self.arrays.array(carried, np.float32)

    def settings(self) -> dict[str, Any]:
        """Return the settings that must be equal on all ranks, by name."""
        own = {"reducer": type(self).__name__, "size": self.size, "nodes": self.topology.nodes}
        return own | asdict(self.options)

    def synchronize(self) -> None:
        """Check that all ranks have the same reducer; all ranks call it together, before the first step."""
        self.synchronize_step(True)
        self.mark_synchronized()

    def mark_synchronized(self) -> None:
        """Skip the comparison of settings, because the reducer that contains this one has made it."""
        self._is_synchronized = True

    def synchronize_step(self, finite: bool, *values: int) -> npt.NDArray[np.int64] | None:
        """Return every rank's ``values``, shape ``(P, len(values))``, or ``None`` if one is not finite.

        One exchange of a few bytes that all ranks wait for. A digest of the settings is part of it; where it
        differs, every rank raises ``RanksDisagree``.
        """
        with self.measure(self.topology.slowest_link):
            rows = self.topology.world.allgather_ints([finite, self._digest(), *values])
        self._expect_equal(rows[:, 1])
        return rows[:, 2:] if rows[:, 0].all() else None

    def wait_for_comparison(self) -> None:
        """Wait until the settings and the number of the step that is under way are compared among all ranks.

        Where the settings differ, every rank raises ``RanksDisagree``. Called at the end of every step; an
        algorithm calls it earlier, before exchanges that ranks with other settings would not make.
        """
        comparison, self._comparison = self._comparison, None
        if comparison is not None:
            with self.measure(self.topology.slowest_link):
                everyone = comparison()[:, 0]
            self._flags = flags_of(everyone)
            self._expect_equal(without_flags(everyone))

    def _digest(self) -> int:
        if self._shared is None:
            self._shared = repr(self.settings())
        return digest([f"{self._shared}, step {self.steps}".encode()])

    def _expect_equal(self, digests: npt.NDArray[np.int64]) -> None:
        if differing(digests):
            everywhere = self.topology.world.allgather_objects(self.settings() | {"step": self.steps})
            why = differences(everywhere) or CROSSED
            raise RanksDisagree(f"the reducer is not the same on all ranks: {why}")

    def close(self) -> None:  # noqa: B027 - not every reducer has something to close
        """Free resources other than memory; reducers with such resources override it."""

    def __enter__(self) -> "Reducer":  # noqa: D105 - it is closed at the end of the block
        return self

    def __exit__(self, *error: object) -> None:  # noqa: D105
        self.close()


def _sum_of(gradient: Any, residual: Float32) -> Any:
    """Return a new gradient, dense, of the type of ``gradient``."""
    if isinstance(gradient, SparseVector):
        return SparseVector.trusted(gradient.size, None, gradient.to_dense() + residual)
    return gradient + residual


def as_gradient(gradient: npt.ArrayLike, size: int, arrays: ModuleType, workspace: Workspace) -> Float32:
    """Return ``gradient`` as contiguous float32 of shape ``(size,)``, without a copy if it is that already.

    ``arrays``: the module whose array it must be, NumPy or CuPy; arrays of the other are refused. Else it is
    converted in the ``workspace``, under the name "gradient".
    """
    expect_module("gradient", gradient, arrays)
    given = arrays.asarray(gradient)
    if given.dtype.kind not in "fiu" and given.dtype != ml_dtypes.bfloat16:
        raise InvalidArgument(f"gradient: expected real numbers, got {given.dtype}")
    if given.shape != (size,):
        raise InvalidArgument(f"gradient: expected shape ({size},), got {given.shape}")
    if given.dtype == np.float32 and given.flags.c_contiguous:
        return given
    converted: Float32 = workspace.get("gradient", size)
    with np.errstate(over="ignore"):  # float64 beyond float32 becomes an infinity, and skips the step
        converted[...] = given
    return converted


def as_entries(vector: SparseVector, size: int, arrays: ModuleType, out: object) -> SparseVector:
    """Return a gradient that is a ``SparseVector`` of ``size`` with contiguous arrays of ``arrays``."""
    if out is not None:
        raise InvalidArgument("out: the mean of a SparseVector is one, expected none, got an array")
    expect_module("gradient", vector.values, arrays)
    if vector.size != size:
        raise InvalidArgument(f"gradient: expected a SparseVector of size {size}, got one of {vector.size}")
    indices = None if vector.indices is None else arrays.ascontiguousarray(vector.indices)
    return SparseVector.trusted(size, indices, arrays.ascontiguousarray(vector.values))


def checked_out(out: Float32, gradient: Float32, arrays: ModuleType) -> Float32:
    """Return ``out``; raise ``InvalidArgument`` where the mean of ``gradient`` cannot be written to it."""
    size = len(gradient)
    expect_module("out", out, arrays)
    if out.dtype != np.float32 or out.shape != (size,):
        raise InvalidArgument(
            f"out: expected float32 of shape ({size},), got {out.dtype} of shape {out.shape}"
        )
    if not (out.flags.c_contiguous and getattr(out.flags, "writeable", True)):
        raise InvalidArgument("out: expected a contiguous array that may be written to, got another")
    if arrays is np and np.may_share_memory(out, gradient):
        raise InvalidArgument("out: expected memory apart from the gradient's, got the same")
    return out


def added_residual(carried: Float32 | None, residual: Float32, size: int, arrays: ModuleType) -> Float32:
    """Return the sum as a new float32 vector; raise ``InvalidArgument`` if the sum is not finite."""
    if residual.shape != (size,):
        raise InvalidArgument(f"residual: expected shape ({size},), got {residual.shape}")
    with np.errstate(over="ignore", invalid="ignore"):
        given = arrays.asarray(residual)
        total: Float32 = arrays.asarray(given if carried is None else given + carried, np.float32)
    if not is_finite(total):
        raise InvalidArgument("residual: expected what adds up to finite float32 values, got others")
    return total.copy() if total is residual else total
