"""A run as a report shows it: epochs, steps, phases and events, each at its step and second of the run.

They come from the records of all processes that trained the run. Damaged lines and missing files of the
run's folder are left out.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from commlib.density import exponential
from datacache.escaping import escaped
from training.config.reading import mapping, mappings, parsed_file
from training.config.run_files import CONFIG, DAWNBENCH, METRICS, SUMMARY, object_in, object_of
from training.config.schema import ConfigurationError, is_number, is_whole
from training.config.secrets import mask
from training.run_folder import holder_of

Record = Mapping[str, Any]


def _record(line: bytes) -> Record | None:
    value = object_of(line)
    if not isinstance(kind := value.get("kind"), str):
        return None
    if kind in ("step", "epoch") and "run_steps" not in value:  # of an earlier version
        return None
    return value if kind == "step" else _masked(value) or None  # a step has no text


def _masked(value: Record) -> Record:
    """Return a record with its secrets masked; an empty one where it is nested too deep for that."""
    try:
        return mask(value)
    except RecursionError:
        return {}


def _config(path: Path) -> Record:
    try:
        return _masked(mapping(parsed_file(path)))
    except ConfigurationError:
        return {}


def number(record: Record, *keys: str) -> float | None:
    """Return the finite number at a path of keys, ``None`` where there is none.

    >>> number({"traffic": {"sent": 3}}, "traffic", "sent"), number({"loss": "x"}, "loss")
    (3.0, None)
    """
    value: Any = record
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if is_number(value) and abs(value) <= sys.float_info.max else None


def whole(record: Record, key: str) -> int | None:
    """Return the whole number from 0 on at a key, ``None`` where there is none."""
    value: Any = record.get(key)
    return value if is_whole(value, 0) and value < 1 << 53 else None  # as float64 holds it


def text(value: Any) -> str:
    """Return a text, a number as text, and an empty text for anything else."""
    is_shown = isinstance(value, str | int | float) and not isinstance(value, bool)
    return escaped(str(value)) if is_shown else ""


def named(value: Any) -> str:
    """Return the name of a part, which a configuration gives as a text or as a record.

    >>> named("dense"), named({"name": "hitopk", "density": 0.01}), named(None)
    ('dense', 'hitopk', '')
    """
    return text(mapping(value).get("name")) or text(value)


UNIT = "_per_second"  # the end of the key of throughput; before it stands the unit of the task
LONGEST_WARMUP = 1000  # epochs of a density warm-up that are drawn


@dataclass(frozen=True)
class Event:
    """A record of a run, after ``end`` steps and ``seconds`` of training."""

    record: Record
    end: int
    seconds: float

    @property
    def kind(self) -> str:
        return str(self.record["kind"])


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
    """A phase: its configuration, its result in the summary, and the choice of ``auto``; each may be empty.

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

    def density(self, epoch: Epoch) -> float | None:
        """Return the density of one of its epochs as configured: 1 of all, ``None`` on one rank."""
        if not self.reducer:
            return None
        last = number(self.config, "reducer", "density")
        warmup = mapping(self.config.get("density_warmup"))
        first, epochs = number(warmup, "start"), min(whole(warmup, "epochs") or 0, LONGEST_WARMUP)
        place = epoch.number - self.epochs[0].number
        if last is None or not 0 < last <= 1:
            return 1.0
        if not first or not 0 < first <= 1 or place >= epochs:
            return last
        return exponential(first, last, epochs)[place]


@dataclass(frozen=True)
class Run:
    """A run, as its folder has it; ``name``: by which legends tell it from others.

    ``damaged``: lines of ``metrics.jsonl`` that are no records. ``config`` and ``summary`` are empty where
    they are missing or damaged. ``is_alive``: whether it is trained now.
    """

    name: str
    path: Path
    damaged: int
    config: Record
    summary: Record
    hardware: str
    is_alive: bool
    epochs: list[Epoch] = field(default_factory=list)
    steps: list[Event] = field(default_factory=list)
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
        known = number(self.summary, "seconds")
        return known or max((each.seconds for each in (*self.epochs, *self.steps)), default=0.0)

    def all_of(self, kind: str) -> list[Event]:
        """Return the events of one kind, in their order."""
        return [each for each in self.events if each.kind == kind]


def read(path: Path, name: str) -> Run:
    """Read the folder of a run, secrets masked; raise ``ValueError`` with one line where it is none.

    Steps that were trained again after a resumption are there once.
    """
    is_alive = holder_of(path) is not None  # before its files are read: it may end meanwhile
    try:
        with (path / METRICS).open("rb") as file:
            lines = [_record(line) for line in file if line.strip()]
    except OSError as error:
        expected = f"expected the folder of a run, which has a file {METRICS}"
        raise ValueError(f"{escaped(str(path))}: {expected}: {error.strerror}") from error
    records = [each for each in lines if each is not None]
    if not records:
        raise ValueError(f"{escaped(str(path / METRICS))}: expected the records of a run, found none")
    last = next((each for each in reversed(records) if each["kind"] == "summary"), {})
    run = Run(
        name=name,
        path=path,
        damaged=len(lines) - len(records),
        config=_config(path / CONFIG),
        summary=_masked(object_in(path / SUMMARY)) or last,
        hardware=text(_masked(object_in(path / DAWNBENCH)).get("hardware")),
        is_alive=is_alive,
    )
    _add_records(run, records)
    return run


def _add_records(run: Run, records: Sequence[Record]) -> None:
    begins: dict[int, int] = {}  # steps of the run before each phase that has begun
    end = 0
    for record, seconds in _survivors(records):
        kind, phase, place = record["kind"], whole(record, "phase"), whole(record, "run_steps")
        end = place or end
        if kind not in ("step", "epoch"):
            run.events.append(Event(record, end, seconds))
            continue
        # the record of a step has its number in the phase, that of an epoch the steps of that epoch
        count = whole(record, "step" if kind == "step" else "steps") or 0
        if phase is None or place is None or (epoch := whole(record, "epoch")) is None:
            continue
        begins.setdefault(phase, max(0, place - count))
        if kind == "step":
            run.steps.append(Event(record, place, seconds))
        else:
            at = number(record, "run_seconds")
            run.epochs.append(Epoch(record, place, seconds if at is None else at, epoch, phase, count))
    configs, results = (dict(enumerate(mappings(each.get("phases")))) for each in (run.config, run.summary))
    choices = {whole(each.record, "phase"): each.record for each in run.all_of("choice")}
    for index in range(max([*configs, *results, *begins], default=-1) + 1):
        config, result, choice = (each.get(index, {}) for each in (configs, results, choices))
        own = [each for each in run.epochs if each.phase == index]
        run.phases.append(Phase(index, config, result, choice, begins.get(index), own))


_Timed = tuple[Record, float]  # a record, and the second of the run at which it was written


def _survivors(records: Sequence[Record]) -> list[_Timed]:
    """Return the records of all processes, without steps and epochs that a later process trained again."""
    found: list[_Timed] = []
    for process in _processes(records):
        start = 0.0
        if found:
            resumption = next((each for each in process if each["kind"] == "resume"), {})
            start = _resumed_at(found, resumption)
            found = [each for each in found if not _is_repeated(each[0], resumption)]
        seconds = {each["kind"]: number(each, "seconds") or 0.0 for each in process}
        ahead = start - seconds.get("prepare", 0.0)  # training begins once the steps are compiled
        found += [(each, max(start, ahead + (number(each, "seconds") or 0.0))) for each in process]
    return found


def _processes(records: Sequence[Record]) -> Iterator[Sequence[Record]]:
    begins = [place for place, each in enumerate(records) if place and each["kind"] == "run"]
    for begin, end in pairwise([0, *begins, len(records)]):
        yield records[begin:end]


def _resumed_at(before: Sequence[_Timed], resumption: Record) -> float:
    """Return the second of the checkpoint that a run was resumed from; 0 where it began again."""
    steps = whole(resumption, "steps")
    if not steps:
        return 0.0
    for record, seconds in reversed(before):
        if record["kind"] == "checkpoint" and whole(record, "steps") == steps:
            taken = sum(number(record, key) or 0.0 for key in ("copy_seconds", "write_seconds"))
            return max(0.0, seconds - taken)
    return max(seconds for _, seconds in before)


def _is_repeated(record: Record, resumption: Record) -> bool:
    """Return whether a step or an epoch is after the place where a run was resumed."""
    if record["kind"] == "epoch":
        return (whole(record, "epoch") or 0) >= (whole(resumption, "run_epoch") or 0)
    return record["kind"] == "step" and (whole(record, "run_steps") or 0) > (whole(resumption, "steps") or 0)
