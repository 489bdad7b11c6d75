"""Rounds of local steps: replicas take steps from common weights, then exchange how far they have come.

From the common weights ``θ`` replica ``r`` comes to ``wᵣ`` in a round. The differences ``θ − wᵣ`` are reduced
as gradients are, and an outer optimizer moves ``θ`` by their mean. That is DiLoCo (Douillard et al. 2023),
with a sparse reducer whose residual decays SparseLoCo (Sarfi et al. 2025).

The weights may be cut into fragments, which take turns, and a replica may go on while a fragment travels:
Streaming DiLoCo (Douillard et al. 2025, algorithm 2). After step ``t`` of replica ``r``, where fragment ``p``
of ``F`` is exchanged every ``H`` steps and travels for ``τ`` steps::

    (t − p·H/F) mod H = 0:        Δᵣ = θₚ − wᵣₚ leaves
    (t − τ − p·H/F) mod H = 0:    Δ = reduce(Δ₁, …) arrives
                                  θₚ ← OuterOpt(θₚ, Δ)
                                  wᵣₚ ← α·wᵣₚ + (1 − α)·θₚ

With ``F = 1``, ``τ = 0`` and ``α = 0`` that is DiLoCo.

Replicas may take different numbers of steps to an exchange: each difference then counts by the samples of
its steps, ``Δ = Σ nᵣ·Δᵣ / Σ nᵣ``.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from commlib.arrays import copy_of, empty, module_of, zeros
from commlib.errors import InvalidArgument
from commlib.reducers import Report
from commlib.reducers.report import merged
from commlib.vectors import Float32


@dataclass(frozen=True)
class Schedule:
    """When each of ``fragments`` is exchanged: every ``steps`` steps, in turns, for ``delay`` steps.

    Steps are numbered from 1. No fragment leaves before the one before has arrived: ``InvalidArgument``
    unless ``delay < steps/fragments``, a whole number.

    >>> schedule = Schedule(6, fragments=2, delay=1)
    >>> [(t, schedule.leaving(t), schedule.arrives(t)) for t in range(3, 8)]
    [(3, 1, False), (4, None, True), (5, None, False), (6, 0, False), (7, None, True)]
    """

    steps: int
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        if self.steps % self.fragments:
            expected = f"a divisor of the {self.steps} local steps"
            raise InvalidArgument(f"expected {expected}, got {self.fragments}", key="fragments")
        if self.delay >= self.interval:
            expected = f"fewer steps than the {self.interval} from one fragment's exchange to the next"
            raise InvalidArgument(f"expected {expected}, got {self.delay}", key="delay")

    @property
    def interval(self) -> int:
        """Return the steps from one fragment's exchange to that of the next."""
        return self.steps // self.fragments

    def leaving(self, step: int) -> int | None:
        """Return the fragment that leaves after a step, if one does."""
        turn, rest = divmod(step, self.interval)
        return None if rest or not turn else turn % self.fragments

    def arrives(self, step: int) -> bool:
        """Return whether a fragment arrives after a step."""
        return self.leaving(step - self.delay) is not None if step > self.delay else False

    def since(self, step: int) -> int:
        """Return the number of steps, this one included, since a fragment last arrived or training began.

        >>> [Schedule(6, fragments=2, delay=1).since(step) for step in range(1, 9)]
        [1, 2, 3, 4, 1, 2, 3, 1]
        """
        arrived = (step - 1 - self.delay) // self.interval
        return step - (arrived * self.interval + self.delay if arrived > 0 else 0)


def fragment_bounds(shapes: Sequence[tuple[int, ...]], fragments: int) -> list[int]:
    """Return the bounds, in entries, of fragments of about equal size of variables of these ``shapes``.

    A variable may be cut between rows, along axis 0; each bound is the nearest such place to equal sizes.
    ``InvalidArgument`` where there are fewer variables than fragments.

    >>> fragment_bounds([(50,), (10, 8), (20,)], 3)  # 100 is within a row
    [0, 50, 98, 150]
    """
    if fragments > len(shapes):
        expected = f"at most the {len(shapes)} variables of the model"
        raise InvalidArgument(f"expected {expected}, got {fragments}", key="fragments")
    ends = list(accumulate(map(math.prod, shapes), initial=0))
    allowed = set(ends)  # and the rows about each place that would be best
    for number in range(1, fragments):
        best = number * ends[-1] // fragments
        variable = bisect_right(ends, best) - 1
        row = math.prod(shapes[variable][1:])
        before = best - (best - ends[variable]) % row
        allowed |= {before, before + row}
    places = np.array(sorted(allowed))
    found = [0]
    for number in range(1, fragments):
        low, high = found[-1] + 1, len(places) - 1 - (fragments - number)
        distances = abs(fragments * places[low : high + 1] - number * places[-1])
        found.append(low + int(distances.argmin()))
    return [int(places[each]) for each in (*found, -1)]


def entries_in(part: slice, sizes: Sequence[int]) -> list[tuple[int, slice]]:
    """Return the number of each variable with entries in a part of the flat vector, and the slice of these.

    >>> entries_in(slice(5, 12), sizes=[4, 6, 3])
    [(1, slice(1, 6, None)), (2, slice(0, 2, None))]
    """
    (low, high, _), end, found = part.indices(sum(sizes)), 0, list[tuple[int, slice]]()
    for number, size in enumerate(sizes):
        start, end = end, end + size
        if low < end and start < high:
            found.append((number, slice(max(low - start, 0), min(high - start, size))))
    return found


class OuterSgd:
    """``v ← μ·v + Δ``, then ``θ ← θ − rate·v``; with Nesterov's momentum ``θ ← θ − rate·(Δ + μ·v)``.

    ``velocity``: ``v`` of all weights; ``None`` before the first update, and where ``μ`` is 0.
    """

    def __init__(
        self,
        rate: float = 1.0,
        momentum: float = 0.0,
        *,
        nesterov: bool = False,
        velocity: Float32 | None = None,
    ) -> None:
        self._rate, self._momentum, self._nesterov = np.float32(rate), np.float32(momentum), nesterov
        self.velocity = velocity if momentum else None

    def apply(self, weights: Float32, mean: Float32, part: slice = slice(None)) -> None:
        """Move the ``part`` of all ``weights`` by its mean difference, which is changed."""
        if self._momentum and self.velocity is None:
            self.velocity = zeros(len(weights), module_of(weights))
        self._move(weights[part], mean, None if self.velocity is None else self.velocity[part])

    def tried(self, weights: Float32, mean: Float32, part: slice) -> Float32:
        """Return what ``apply`` would make of the weights of a part, and change nothing."""
        moved = copy_of(weights)
        velocity = (
            zeros(len(moved), module_of(moved)) if self.velocity is None else self.velocity[part].copy()
        )
        self._move(moved, copy_of(mean), velocity)
        return moved

    def _move(self, weights: Float32, mean: Float32, velocity: Float32 | None) -> None:
        if self._momentum and velocity is not None:
            velocity *= self._momentum
            velocity += mean
            if self._nesterov:
                mean += self._momentum * velocity
            else:
                mean[...] = velocity
        mean *= self._rate
        weights -= mean


class Pace:
    """How far a replica has come from one exchange to the next, where others may take more steps or fewer.

    ``parts``: slices of the weights, each exchanged as a whole; a fragment has one or several. ``seconds``:
    the time after which this replica takes no further step until the next exchange begins; it takes at least
    one. ``weighs``: whether differences are weighted by samples; with ``seconds`` they always are.

    ``spent``: the seconds of the steps since the latest exchange began; ``samples``: for each part, the
    samples of the steps since the latest exchange of that part began.

    >>> pace = Pace([slice(0, 4), slice(4, 6)], seconds=1.5)
    >>> for _ in range(2):
    ...     pace.took(1.0, samples=8)
    >>> pace.is_over, pace.leaves(slice(4, 6)), pace.is_over
    (True, [16], False)
    >>> pace.took(1.0, samples=8)
    >>> pace.leaves(slice(0, 6))
    [24, 8]
    """

    def __init__(self, parts: Sequence[slice], seconds: float | None = None, *, weighs: bool = False) -> None:
        self._parts, self.seconds, self._weighs = list(parts), seconds, weighs or seconds is not None
        self.restart()

    def restart(self) -> None:
        """Begin anew, as where all steps since the latest exchange are undone."""
        self.spent, self.samples = 0.0, np.zeros(len(self._parts), np.int64)

    def took(self, seconds: float, samples: int = 1) -> None:
        """Count a step, how long it took, and its samples, in any unit that is that of all ranks."""
        self.spent += seconds
        self.samples += samples

    @property
    def is_over(self) -> bool:
        """Whether the replica takes no further step before the next exchange."""
        return self.seconds is not None and self.spent >= self.seconds

    def leaves(self, fragment: slice) -> list[int] | None:
        """Count from here on, as a fragment leaves; return the samples of its parts, if these weigh."""
        self.spent = 0.0
        inside = [fragment.start <= own.start and own.stop <= fragment.stop for own in self._parts]
        found = self.samples[inside].tolist()
        self.samples[inside] = 0
        return found if self._weighs else None

    def state_dict(self) -> dict[str, Any]:
        return {"spent": self.spent, "samples": self.samples.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned; of other parts, each has the most samples of any."""
        found = state["samples"]
        if len(found) != len(self.samples):
            found = [max(found)] * len(self.samples)
        self.spent, self.samples = state["spent"], np.array(found, np.int64)


class Weights(Protocol):
    """The weights of a replica as one vector, of which a fragment is a slice."""

    def read(self, fragment: slice) -> Float32:
        """Return a copy of a fragment."""

    def write(self, vector: Float32, fragment: slice) -> None:
        """Set a fragment to the values of a vector, which are copied."""


class Rounds:
    """The rounds of one rank. A fragment is a slice of all weights.

    ``submit(fragment, difference)`` begins an exchange; ``wait(fragment)`` returns its mean over all ranks,
    and a report. ``mixing``: ``α``. With ``eager`` a replica instead moves a fragment that leaves by its own
    difference at once, and corrects that when the mean arrives (after Kale et al. 2025).

    ``common``: the common weights, ``None`` where all replicas have them. ``failed``: whether a local step of
    this rank was not finite, so that its weights are useless. Its next exchange is then skipped on all ranks,
    as is one with a difference that is not finite. ``leaving``: the fragment that is under way. ``arrived``:
    what ``wait`` returned for it, where ``finish`` was called. ``ahead``: where ``eager`` has moved it to.
    """

    def __init__(
        self,
        outer: OuterSgd,
        submit: Callable[[slice, Float32], None],
        wait: Callable[[slice], tuple[Float32, Report]],
        *,
        mixing: float = 0.0,
        eager: bool = False,
    ) -> None:
        self.outer, self._submit, self._wait = outer, submit, wait
        self._shares = np.float32(mixing), np.float32(1 - mixing)  # of a replica, of the common weights
        self._eager = eager
        self.common: Float32 | None = None
        self.failed = False
        self.leaving: slice | None = None
        self.arrived: tuple[Float32, Report] | None = None
        self.ahead: Float32 | None = None

    def begin(self, weights: Float32) -> None:
        """Begin with these common weights, which are changed when fragments arrive."""
        self.common, self.failed = weights, False

    def end_step(self, weights: Weights, leaving: slice | None, *, arrives: bool) -> Report | None:
        """Exchange after a local step; return the report of what has arrived, if anything has.

        ``leaving``: the fragment whose exchange begins, if any. ``arrives``: whether to wait, with all ranks,
        for the exchange under way, or else for this one; without ``mixing`` and ``eager`` its fragment then
        equals the common weights. If it was skipped (``finite`` of the report), all weights do.
        """
        reports = []
        if self.leaving is not None and (arrives or leaving is not None):
            reports.append(self._arrive(weights, mixes=True))
        if leaving is not None and self.common is not None:
            self._leave(weights, leaving)
            if arrives:
                reports.append(self._arrive(weights, mixes=False))
        return merged(reports) if reports else None

    def _leave(self, weights: Weights, fragment: slice) -> None:
        assert self.common is not None
        before, own = self.common[fragment], weights.read(fragment)
        difference = np.subtract(before, own, out=empty(len(before), module_of(before)))
        if self.failed:
            difference.fill(np.nan)
        elif self._eager:
            self.ahead = self.outer.tried(before, difference, fragment)
            weights.write(self.ahead, fragment)
        self.leaving = fragment
        self._submit(fragment, difference)

    def finish(self) -> None:
        """Wait for the exchange that is under way, if one is; what it returns is kept until it arrives."""
        if self.leaving is not None and self.arrived is None:
            self.arrived = self._wait(self.leaving)

    def _arrive(self, weights: Weights, *, mixes: bool) -> Report:
        self.finish()
        assert self.common is not None
        assert self.leaving is not None
        assert self.arrived is not None
        (mean, report), fragment, ahead = self.arrived, self.leaving, self.ahead
        self.arrived = self.leaving = self.ahead = None
        if not report.finite:
            self.abandon(weights)
            return report
        self.outer.apply(self.common, mean, fragment)
        common = self.common[fragment]
        if mixes and (ahead is not None or self._shares[0]):
            own = weights.read(fragment)
            if ahead is not None:
                own += common - ahead
            else:
                own *= self._shares[0]
                own += self._shares[1] * common
            weights.write(own, fragment)
            return report
        weights.write(common, fragment)
        if len(common) == len(self.common):
            self.common = None
        return report

    def abandon(self, weights: Weights) -> None:
        """Wait for the exchange under way, drop its result, and go back to the common weights."""
        self.finish()
        self.arrived = self.leaving = self.ahead = None
        if self.common is not None:
            weights.write(self.common, slice(0, len(self.common)))
            self.common = None
