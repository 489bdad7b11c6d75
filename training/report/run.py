"""A run as a report shows it: epochs, steps, phases and events, each at its step and second of the run."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from commlib.density import exponential
from training.report.reading import Folder, Record, mapping, number, text, whole

UNIT = "_per_second"  # the end of the key of throughput; before it stands the unit of the task
LONGEST_WARMUP = 1000  # epochs of a density warm-up that are drawn


@dataclass(frozen=True)
class Event:
    """What a record of a run tells, but for epochs and steps.

    ``end``: steps of the run until then; ``seconds``: of training until then.
    """

    record: Record
    end: int
    seconds: float

    @property
    def kind(self) -> str:
        """Return the kind of the record."""
        return str(self.record["kind"])


@dataclass(frozen=True)
class Step(Event):
    """A step that has a record: one of rank 0, after which the run had ``end`` steps."""


@dataclass(frozen=True)
class Epoch(Event):
    """An epoch that has ended. ``number``: in the run, from 0 on; ``steps``: of it alone."""

    number: int
    phase: int
    steps: int

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics of its test: in a record they stand before the number of the epoch."""
        keys = list(self.record)
        found = {key: number(self.record, key) for key in keys[: keys.index("epoch")]}
        return {key: value for key, value in found.items() if value is not None and key != "seconds"}

    @property
    def unit(self) -> str:
        """Return what its throughput counts, such as images."""
        return next((key.removesuffix(UNIT) for key in self.record if key.endswith(UNIT)), "")

    @property
    def throughput(self) -> float | None:
        """Return the units a second."""
        return number(self.record, f"{self.unit}{UNIT}")

    def a_step(self, key: str) -> float | None:
        """Return the mean over its steps of a sum in its record."""
        value = number(self.record, key)
        return value / self.steps if value is not None and self.steps else None

    def stage(self, name: str) -> float:
        """Return the mean seconds of a stage, 0 where it was not measured."""
        return max(0.0, number(self.record, "stage_seconds", name) or 0.0)


@dataclass(frozen=True)
class Phase:
    """A phase. ``config``, ``result`` and ``choice``: what three records tell of it, each may be empty.

    ``begin``: steps of the run before it, ``None`` while it has not begun.
    """

    number: int
    config: Record
    result: Record
    choice: Record
    begin: int | None
    epochs: Sequence[Epoch]

    @property
    def reducer(self) -> str:
        """Return the name of its reducer; empty on one rank."""
        of_epochs = next((text(each.record.get("reducer")) for each in self.epochs), "")
        return of_epochs or text(self.result.get("reducer"))

    def density(self, epoch: int) -> float | None:
        """Return the density of one of its epochs as configured: 1 of all, ``None`` on one rank."""
        if not self.reducer:
            return None
        last, warmup = (
            number(mapping(self.config.get("reducer")), "density"),
            self.config.get("density_warmup"),
        )
        first, epochs = number(mapping(warmup), "start"), whole(mapping(warmup), "epochs")
        if last is None or not 0 < last <= 1:
            return 1.0
        if not first or not 0 < first <= 1 or epochs is None or epoch >= min(epochs, LONGEST_WARMUP):
            return last
        return exponential(first, last, min(epochs, LONGEST_WARMUP))[epoch]


@dataclass(frozen=True)
class Run:
    """A run; ``name``: by which legends tell it from others."""

    name: str
    folder: Folder
    epochs: list[Epoch] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)

    @property
    def begun(self) -> Record:
        """Return the record of the latest process that trained it."""
        return next((each.record for each in reversed(self.events) if each.kind == "run"), {})

    @property
    def end(self) -> int:
        """Return how many steps it has made, as far as that is known."""
        return max((each.end for each in (*self.epochs, *self.steps)), default=0)

    @property
    def seconds(self) -> float:
        """Return how long it has trained, without the time between a stop and its resumption."""
        known = number(self.folder.summary, "seconds")
        return known or max((each.seconds for each in (*self.epochs, *self.steps)), default=0.0)

    def all_of(self, kind: str) -> list[Event]:
        """Return the events of one kind, in their order."""
        return [each for each in self.events if each.kind == kind]
