"""The plan of a run: what each phase takes of steps, memory, bytes, seconds and money."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datacache.capacity import readable
from training.plan.memory import Memory
from training.plan.site import Capacity, Site

MOST_VALUES = 10_000  # of a curve, that are looked at for its largest one


@dataclass(frozen=True)
class Curve:
    """The values of a curve over the steps of a phase.

    >>> [str(Curve.of_values(values)) for values in ([0.0, 0.4, 0.01], [0.25, 0.001], [0.1])]
    ['0 → 0.4 → 0.01', '0.25 → 0.001', '0.1']
    """

    start: float
    peak: float
    end: float

    @classmethod
    def of(cls, at: Callable[[int], float], steps: int, *more: int) -> "Curve":
        """Return the curve ``at(step)``; of many steps some are looked at, and those of ``more``."""
        seen = {*range(0, steps, -(-steps // MOST_VALUES)), *(step for step in more if 0 <= step < steps)}
        return cls.of_values(list(map(at, sorted({*seen, steps - 1}))))

    @classmethod
    def of_values(cls, values: Sequence[float]) -> "Curve":
        """Return the curve of all these values, one after the other."""
        return cls(values[0], max(values), values[-1])

    def __str__(self) -> str:
        values = [self.start, self.peak, self.end]
        kept = [each for place, each in enumerate(values) if place == 0 or each != values[place - 1]]
        return " → ".join(f"{each:.4g}" for each in kept)


@dataclass(frozen=True)
class PhasePlan:
    """One phase, numbered from 1; its steps at the density of the phase's end, or the mean step of rounds.

    ``slow_bytes``, ``dense_bytes``: of the busiest node in a step over the slow link, by the phase's reducer
    and by ``dense``. Seconds of a step: ``messages``, ``computing`` on one rank, and the whole ``step``, in
    which messages may hide behind the backward pass. ``traffic_bytes``: of all nodes in the phase. ``auto``:
    the pick of ``reducer: auto``, and why. ``None``: not known.
    """

    number: int
    steps: int
    epochs: float
    global_batch: int
    unit: str
    batch: str
    input: str
    rate: Curve
    density: Curve | None
    local_steps: int | None
    reducer: str
    options: Mapping[str, Any]
    buckets: int
    memory: Memory
    slow_bytes: int | None
    dense_bytes: int
    traffic_bytes: int | None
    messages: float | None
    computing: float | None
    step: float | None
    seconds: float | None
    auto: str | None

    @property
    def per_second(self) -> float | None:
        """Return how much of its unit all ranks train on in a second."""
        return self.global_batch / self.step if self.step else None

    @property
    def efficiency(self) -> float | None:
        """Return the throughput over that of as many ranks which exchange nothing."""
        return self.computing / self.step if self.step and self.computing is not None else None


@dataclass(frozen=True)
class Plan:
    """A run on a site. ``weights``: entries of the gradient. ``disk``, ``memory``: bytes of a node's cache.

    ``seconds``: of all phases, without tests and checkpoints. ``missing``: a line for each unknown fact.
    """

    name: str
    site: Site
    weights: int
    phases: Sequence[PhasePlan]
    disk: int | None
    memory: int
    room: Capacity
    price: float | None
    missing: Sequence[str]

    @property
    def seconds(self) -> float | None:
        """Return the seconds of all phases."""
        return total([phase.seconds for phase in self.phases])

    @property
    def traffic_bytes(self) -> int | None:
        """Return what all nodes send over the slow link."""
        sent = total([phase.traffic_bytes for phase in self.phases])
        return None if sent is None else int(sent)

    @property
    def cost(self) -> float | None:
        """Return what all nodes cost for that long."""
        return None if self.seconds is None or self.price is None else self.seconds / 3600 * self.price


def total(values: Sequence[float | None], counts: Sequence[int] | None = None) -> float | None:
    """Return the sum of values, each so many times; ``None`` where one is not known."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return sum(value * count for value, count in zip(known, counts or [1] * len(known), strict=True))


def check_room(plan: Plan) -> None:
    """Raise a ``ValueError`` of one line for a plan that does not fit a node."""
    room, where = plan.room, plan.site.source if plan.site.file is not None else "this machine"

    def check(what: str, needed: int | None, there: int | None) -> None:
        if needed is not None and there is not None and needed > there:
            expected = f"expected at most the {readable(there)} that {where} has"
            raise ValueError(f"{what}: {expected}, got {readable(needed)}")

    check("cache.disk", plan.disk, room.disk)
    check("cache.memory", plan.memory, room.shm)
    for phase in plan.phases:
        rank, ranks = phase.memory.total, plan.site.ranks_of_node
        if room.gpu is not None:
            check(f"phases[{phase.number - 1}]: memory of a rank on its GPU", rank, room.gpu)
            rank = 0
        what = f"phases[{phase.number - 1}]: memory of {ranks} ranks on a node, and its cache.memory"
        check(what, ranks * rank + plan.memory, room.memory)
