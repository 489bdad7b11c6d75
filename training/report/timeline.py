"""Where the records of a run are in its steps and seconds, over all processes that trained it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from training.report.reading import Folder, Record, mappings, number, whole
from training.report.run import Epoch, Event, Phase, Run, Step


def run_of(name: str, folder: Folder) -> Run:
    """Return the run of a folder. What was trained twice, after a resumption, is there once."""
    run = Run(name, folder)
    walk = _Walk(run)
    for timed in _survivors(folder.records):
        walk.add(timed)
    configs, results = walk.configs, mappings(folder.summary.get("phases"))
    choices = {whole(each.record, "phase"): each.record for each in run.all_of("choice")}
    for index in range(max(len(configs), len(results), *(each + 1 for each in walk.begins), 0)):
        run.phases.append(
            Phase(
                number=index,
                config=configs[index] if index < len(configs) else {},
                result=results[index] if index < len(results) else {},
                choice=choices.get(index, {}),
                begin=walk.begins.get(index),
                epochs=[each for each in run.epochs if each.phase == index],
            )
        )
    return run


# --------------------------------------------------------------------------------------------- in seconds


@dataclass(frozen=True)
class _Timed:
    """A record, and the second of the run at which it was written."""

    record: Record
    seconds: float


def _survivors(records: Sequence[Record]) -> list[_Timed]:
    """Return the records of all processes, without the steps and epochs that a later one trained again."""
    found: list[_Timed] = []
    for process in _processes(records):
        start = 0.0
        if found:
            resumption = next((each for each in process if each["kind"] == "resume"), {})
            start = _resumed_at(found, resumption)
            found = [each for each in found if not _is_repeated(each.record, resumption)]
        ahead = start - _began_at(process)
        found += [_Timed(each, max(start, ahead + (number(each, "seconds") or 0.0))) for each in process]
    return found


def _processes(records: Sequence[Record]) -> Iterator[Sequence[Record]]:
    begins = [place for place, each in enumerate(records) if place and each["kind"] == "run"]
    for begin, end in pairwise([0, *begins, len(records)]):
        yield records[begin:end]


def _began_at(process: Sequence[Record]) -> float:
    """Return when training began, by the clock of a process: once its steps were compiled."""
    seconds = {each["kind"]: number(each, "seconds") or 0.0 for each in process}
    return seconds.get("prepare", 0.0)


def _resumed_at(before: Sequence[_Timed], resumption: Record) -> float:
    """Return the second of the checkpoint that a run was resumed from; 0 where it began again."""
    steps = whole(resumption, "steps")
    if not steps:
        return 0.0
    saved = [each for each in before if each.record["kind"] == "checkpoint"]
    own = next((each for each in reversed(saved) if whole(each.record, "steps") == steps), None)
    if own is None:
        return max(each.seconds for each in before)
    taken = sum(number(own.record, key) or 0.0 for key in ("copy_seconds", "write_seconds"))
    return max(0.0, own.seconds - taken)


def _is_repeated(record: Record, resumption: Record) -> bool:
    """Return whether a step or an epoch is after the place where a run was resumed."""
    epoch = whole(record, "epoch")
    if record["kind"] not in ("step", "epoch") or epoch is None:
        return False
    at = whole(resumption, "run_epoch") or 0
    if record["kind"] == "epoch" or epoch != at:
        return epoch >= at
    return (whole(record, "step") or 0) > (whole(resumption, "phase_steps") or 0)


# ---------------------------------------------------------------------------------------------- in steps


class _Walk:
    """Adds records to a run in their order; knows in which phase that is.

    ``begins``: steps of the run before each phase that has begun. A record of a step counts those of its
    phase; one of an epoch has its own steps.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.configs = mappings(run.folder.config.get("phases"))
        self.begins: dict[int, int] = {}
        self._phase = self._begin = self._first_epoch = 0
        self._next_epoch = self._epochs_end = self._end = self._step = 0

    def add(self, timed: _Timed) -> None:
        """Add a record; one that lacks its number is left out."""
        record, seconds = timed.record, timed.seconds
        kind = record["kind"]
        if kind == "step":
            if (step := whole(record, "step")) is not None:
                self._add_step(step, record, seconds)
        elif kind == "epoch":
            if (epoch := whole(record, "epoch")) is not None:
                self._add_epoch(epoch, record, seconds)
        else:
            if kind in ("checkpoint", "resume"):
                self._end = max(self._end, whole(record, "steps") or 0)
            self._run.events.append(Event(record, self._end, seconds))

    def _add_step(self, step: int, record: Record, seconds: float) -> None:
        if not self.configs and step <= self._step:  # all there is to tell phases apart by
            self._begin_phase()
        self._step = step
        self._end = self._begin + step
        self.begins.setdefault(self._phase, self._begin)
        self._run.steps.append(Step(record, self._end, seconds))

    def _add_epoch(self, epoch: int, record: Record, seconds: float) -> None:
        steps = whole(record, "steps") or 0
        missing = max(0, epoch - self._next_epoch)  # their lines are, as where a disk was full
        self._epochs_end += (missing + 1) * steps
        self._end, self._next_epoch = self._epochs_end, epoch + 1
        self.begins.setdefault(self._phase, self._begin)
        at = number(record, "run_seconds")
        end = Epoch(record, self._end, seconds if at is None else at, epoch, self._phase, steps)
        self._run.epochs.append(end)
        if self._is_over(epoch):
            self._begin_phase()

    def _is_over(self, epoch: int) -> bool:
        """Return whether an epoch is the last one of the phase."""
        if self._phase + 1 >= len(self.configs):
            return False
        config = self.configs[self._phase]
        epochs, steps = whole(config, "epochs"), whole(config, "steps")
        made = self._epochs_end - self._begin
        return (epochs is not None and epoch - self._first_epoch + 1 >= epochs) or (
            steps is not None and made >= steps
        )

    def _begin_phase(self) -> None:
        self._phase += 1
        self._begin, self._first_epoch, self._step = self._epochs_end, self._next_epoch, 0
