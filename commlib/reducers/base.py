"""What a reducer is: an all-reduce algorithm for gradients together with its state.

:class:`Reducer` holds what all share: checks, the report, the residual that a predecessor hands over, the
agreement on whether the step counts.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, NoReturn

import ml_dtypes
import numpy as np
import numpy.typing as npt

from commlib.agreement import CROSSED, differences, differing, digest
from commlib.arrays import expect_module, is_on_gpu, to_host
from commlib.cost import Cost
from commlib.errors import InvalidArgument, RanksDisagree
from commlib.gpu.errors import OutOfDeviceMemory
from commlib.memory import Workspace
from commlib.reducers.mean import Mean, Means
from commlib.topology import Topology, Traffic
from commlib.vectors import Float32, is_finite


@dataclass
class StageSeconds:
    """Time of one call by stage: picking entries, inside the node, between nodes, adding up.

    By the transport's clock: wall time, or on simulated ranks the predicted time of the messages.
    """

    select: float = 0.0
    intra: float = 0.0
    inter: float = 0.0
    combine: float = 0.0


@dataclass(frozen=True)
class Report:
    """What one call of ``reduce`` did on this rank.

    ``finite``: false when a NaN or an infinity on any rank made all ranks skip the step. ``selected``:
    entries this rank picked; ``applied``: entries of the result, as held on the wire (all ``d`` where it
    travelled dense).
    """

    finite: bool
    selected: int
    applied: int
    traffic: Traffic
    seconds: StageSeconds


@dataclass(frozen=True)
class Outcome:
    """What an algorithm returns: the mean, or ``None`` for a skipped step."""

    mean: Float32 | None
    selected: int = 0
    applied: int = 0


def as_gradient(
    gradient: npt.ArrayLike, size: int, arrays: ModuleType = np, workspace: Workspace | None = None
) -> Float32:
    """Return ``gradient`` as contiguous float32 of shape ``(size,)``, the same array where it is that.

    ``arrays``: the module whose array it is to be, NumPy or CuPy; one of the other is refused. With a
    ``workspace`` it is converted in there, under the name "gradient".
    """
    expect_module("gradient", gradient, arrays)
    given = arrays.asarray(gradient)
    if given.dtype.kind not in "fiu" and given.dtype != ml_dtypes.bfloat16:
        raise InvalidArgument(f"gradient: expected real numbers, got {given.dtype}")
    if given.shape != (size,):
        raise InvalidArgument(f"gradient: expected shape ({size},), got {given.shape}")
    with np.errstate(over="ignore"):  # float64 beyond float32 becomes an infinity, and skips the step
        if workspace is None or (given.dtype == np.float32 and given.flags.c_contiguous):
            return arrays.ascontiguousarray(given, np.float32)  # type: ignore[no-any-return]
        converted: Float32 = workspace.get("gradient", size)
        converted[...] = given
        return converted


def check_settings(there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgument`` naming what differs between a state's settings and those of who loads it."""
    others = [
        f"{key} is {there.get(key)!r} there and {here.get(key)!r} here"
        for key in {**here, **there}
        if there.get(key) != here.get(key)
    ]
    if others:
        raise InvalidArgument(f"state: expected one of equal settings, got another: {'; '.join(others)}")


class Reducer(ABC):
    """Averages a gradient of ``size`` entries over all ranks of ``topology``.

    ``last`` is the :class:`Report` of the latest call, ``None`` before the first. ``arrays``: the module
    whose arrays gradient, mean and residual are, NumPy, or CuPy where the topology's transport moves those.
    """

    sparse: ClassVar[bool]
    cost: ClassVar[Cost | None] = None

    def __init__(self, topology: Topology, size: int) -> None:
        if not isinstance(size, (int, np.integer)) or isinstance(size, bool) or size < 1:
            raise InvalidArgument(f"size: expected a whole number of entries from 1, got {size!r}")
        self.topology = topology
        self.arrays = topology.world.arrays
        self.size = int(size)
        self.steps = 0
        self.last: Report | None = None
        self.seconds = StageSeconds()
        self.workspace = Workspace(self.arrays)
        self._means = Means(self.size, self.arrays)
        self._step_mean: Mean | None = None  # of the step that is under way
        self._measured: list[str] = []  # stages whose bodies are running, the innermost last
        self._charged_until = 0.0
        self._carried: Float32 | None = None
        self._shared = repr(self.settings())  # settings do not change: written out once, not at every step
        self.synchronize_step(True)

    def reduce(self, gradient: npt.ArrayLike, out: Float32 | None = None) -> Float32:
        """Return the mean over ranks, float32 of shape ``(size,)``, bitwise equal on all of them.

        ``gradient``: shape ``(size,)``, any float or integer type, left as it is. What this call does not
        apply stays in the residual. A NaN or an infinity on any rank makes all ranks skip the step: the
        result is all NaN, ``last.finite`` is false and every residual is as before.

        The mean is memory of the reducer, and in host memory not to be written to. It is valid until the next
        ``reduce``, and beyond that as long as it is held: the memory is used again for the first mean that is
        made after the array, its views and the tensors that share it are gone. Who keeps many means keeps
        copies. With ``out``, a contiguous array of that shape and type apart from ``gradient``, the mean is
        written there, is returned, and belongs to the caller.
        """
        vector = as_gradient(gradient, self.size, self.arrays, self.workspace)
        self._step_mean = self._means.take() if out is None else Mean(self._checked(out, vector))
        target = self._step_mean.array
        try:
            mean = self._step(vector)
            if mean is None:
                self._step_mean.overwrite().fill(np.nan)
        finally:
            self._step_mean = None
        if mean is not None and mean is not target:  # a reducer from elsewhere may return its own array
            if out is None:
                return mean
            target[...] = mean
        if out is not None:
            return out
        mean = target[:]
        if self.arrays is np:
            mean.flags.writeable = False
        return mean

    def _checked(self, out: Float32, gradient: Float32) -> Float32:
        expect_module("out", out, self.arrays)
        if out.dtype != np.float32 or out.shape != (self.size,):
            raise InvalidArgument(
                f"out: expected float32 of shape ({self.size},), got {out.dtype} of shape {out.shape}"
            )
        if not (out.flags.c_contiguous and getattr(out.flags, "writeable", True)):
            raise InvalidArgument("out: expected a contiguous array that may be written to, got another")
        if self.arrays is np and np.may_share_memory(out, gradient):
            raise InvalidArgument("out: expected memory apart from the gradient's, got the same")
        return out

    def _step(self, vector: Float32) -> Float32 | None:
        """Take a step and report it; return the mean, or ``None`` where the step is skipped."""
        before = self.topology.traffic
        self.seconds = StageSeconds()
        # NaNs and infinities: the ranks agree to skip such a step instead.
        with np.errstate(invalid="ignore", over="ignore"), self.memory_errors():
            if self._carried is not None:
                vector = vector + self._carried
            outcome = self._alone(vector) if self.topology.world.size == 1 else self._reduce(vector)
        self.steps += 1
        finite = outcome.mean is not None
        if finite:
            self._carried = None
        traffic = self.topology.traffic - before
        self.last = Report(finite, outcome.selected, outcome.applied, traffic, self.seconds)
        return outcome.mean

    @property
    def step_mean(self) -> Mean:
        """Where the mean of the step that is under way is made."""
        assert self._step_mean is not None, "a step is under way"
        return self._step_mean

    @contextmanager
    def memory_errors(self) -> Iterator[None]:
        """Raise ``OutOfDeviceMemory`` for an array that did not fit on the GPU beside this reducer's own."""
        try:
            yield
        except MemoryError as error:
            if self.arrays is np or isinstance(error, OutOfDeviceMemory):
                raise
            self._name_what_is_held(error)

    def _name_what_is_held(self, error: MemoryError) -> NoReturn:
        held = {name: array.nbytes for name, array in vars(self).items() if is_on_gpu(array)}
        names = ", ".join(f"{name.strip('_')} {size:,}" for name, size in held.items()) or "nothing"
        text = f"{type(self).__name__}: {error}; held by it, in bytes: {names}"
        raise OutOfDeviceMemory(text) from error

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Add the time of the body to ``stage`` of the report, but for what is measured inside of it."""
        self._charge()
        self._measured.append(stage)
        try:
            yield
        finally:
            self._charge()
            self._measured.pop()

    def _charge(self) -> None:
        now = self.topology.world.now()
        if self._measured:
            stage = self._measured[-1]
            setattr(self.seconds, stage, getattr(self.seconds, stage) + now - self._charged_until)
        self._charged_until = now

    @abstractmethod
    def _reduce(self, gradient: Float32) -> Outcome:
        """Run the algorithm on two ranks or more, and change the state only if all ranks are finite.

        The mean is made in ``self.step_mean``, and the gradient left as it is.
        """

    def _alone(self, gradient: Float32) -> Outcome:
        """Apply everything: one rank has nobody to save bytes for."""
        if not is_finite(gradient):
            return Outcome(None)
        mean = self.step_mean.overwrite()
        mean[...] = gradient
        return Outcome(mean, selected=self.size, applied=self.size)

    @property
    def residual(self) -> Float32:
        """What this rank holds back: a new float32 array of shape ``(size,)``, zero where others hold it."""
        if self._carried is None:
            return self.arrays.zeros(self.size, np.float32)  # type: ignore[no-any-return]
        return self._carried.copy()

    def add_residual(self, residual: Float32) -> None:
        """Add a vector of shape ``(size,)`` to this rank's next gradient that counts.

        So a predecessor's residual is flushed into the first step of its successor. One in host memory, such
        as a checkpoint holds, is taken on a GPU, too.
        """
        if residual.shape != (self.size,):
            raise InvalidArgument(f"residual: expected shape ({self.size},), got {residual.shape}")
        with np.errstate(over="ignore", invalid="ignore"):
            given = self.arrays.asarray(residual)
            total = self.arrays.asarray(given if self._carried is None else given + self._carried, np.float32)
        if not is_finite(total):
            raise InvalidArgument("residual: expected what adds up to finite float32 values, got others")
        self._carried = total.copy() if total is residual else total

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a restored reducer needs to go on bitwise: copies, in host memory."""
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
        """Return what must be equal on all ranks, by name."""
        return {"reducer": type(self).__name__, "size": self.size, "nodes": self.topology.nodes}

    def synchronize_step(self, finite: bool, *values: int) -> npt.NDArray[np.int64] | None:
        """Return every rank's ``values``, shape ``(P, len(values))``, or ``None`` if one is not finite.

        One exchange of a few bytes. A digest of what must be equal rides on it; where it is not,
        :class:`commlib.errors.RanksDisagree` is raised on every rank.
        """
        here = f"{self._shared}, step {self.steps}"
        with self.measure(self.topology.slowest_link):
            rows = self.topology.world.allgather_ints([finite, digest([here.encode()]), *values])
        if differing(rows[:, 1]):
            everywhere = self.topology.world.allgather_objects(self.settings() | {"step": self.steps})
            why = differences(everywhere) or CROSSED
            raise RanksDisagree(f"the reducer is not the same on all ranks: {why}")
        return rows[:, 2:] if rows[:, 0].all() else None
