"""The interface between a run and its callbacks: hooks, views of the run, events, and who is called when."""

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from commlib import Topology
from commlib.errors import one_line, suggestion
from training.process.progress import Progress
from training.results import (
    EpochAccumulator,
    EpochResult,
    PhaseResult,
    Position,
    Ranks,
    Step,
    StepHyperparameters,
    Summary,
)
from training.run_folder import RunFolder
from training.tasks.task import Task, Tested


@dataclass(frozen=True)
class Event:
    """An event to report. ``kind``: of its record, which has all fields unless ``record`` is overridden."""

    kind: ClassVar[str]

    def lines(self) -> Iterable[str]:
        """Return the lines to print."""
        return ()

    def record(self) -> dict[str, Any]:
        """Return the fields of the record in ``metrics.jsonl``, without the kind."""
        return asdict(self)


@dataclass(frozen=True)
class RunEvent(Event):
    """An event of the loop. ``fields``: of its record. ``text``: its lines."""

    kind: str  # type: ignore[misc]  # one class for all kinds
    fields: Mapping[str, Any]
    text: Sequence[str] = ()

    def lines(self) -> Sequence[str]:
        return self.text

    def record(self) -> dict[str, Any]:
        return dict(self.fields)


class PhaseView(Protocol):
    """A phase, as callbacks see it.

    ``data``: its batches, by ``training_batches(epoch)`` and ``test_batches()`` of this rank. ``result``: so
    far. ``epochs``: begun ones count. ``global_batch``: samples of a step, over all ranks.
    """

    number: int
    phase: Any
    data: Any
    steps: int
    epochs: int
    epoch_steps: int
    global_batch: int
    result: PhaseResult

    def hyperparameters(self, step: int) -> StepHyperparameters:
        """Return the hyperparameters of step ``step`` of the phase."""


class RunView(Protocol):
    """A run, as callbacks see it; they may change only ``summary`` and results."""

    rank: int
    size: int
    """The number of ranks."""
    topology: Topology
    """The communicators; between two steps no other exchange uses ``topology.world``."""
    config: Any
    """The configuration (:class:`training.config.config.Config`), with the reducers that were chosen."""
    task: Task
    """The task, with its metrics and its unit of samples."""
    model: Any
    """The Keras model."""
    data: Any
    """The samples: ``training`` and ``test`` are their manifests."""
    position: Position
    """The position of the run, after the latest step."""
    accumulator: EpochAccumulator
    """The sums of the epoch so far, on this rank."""
    summary: Summary
    """The results so far."""
    ranks: Ranks
    folder: RunFolder | None
    """The folder of the run; ``None`` on all ranks but rank 0, and in a run that writes nothing."""
    progress: Progress
    """The lines on the screen, and the live line."""

    @property
    def phases(self) -> Sequence[PhaseView]:
        """The phases of the run."""

    @property
    def phase(self) -> PhaseView:
        """The phase that is trained; at the end of the run, the last one."""

    @property
    def gradient_size(self) -> int:
        """The number of entries of the gradient."""

    def report(self, event: Event) -> None:
        """Print the lines of an event, and record it in ``metrics.jsonl``."""

    def stop(self, reason: str) -> None:
        """End the run after this epoch, on all ranks; any rank may call it."""

    def record(self, recorder: Any) -> None:
        """Record each stage and bucket with a :class:`commlib.trace.Recorder`; ``None`` ends recording."""

    def common_weights(self) -> AbstractContextManager[None]:
        """Give the model the common weights inside the block: with local steps each rank has its own."""

    def restart_step_clock(self) -> None:
        """Start timing the next step now, so that work since the last step does not count."""


class Callback:
    """A base class whose hooks a run calls while it trains; they do nothing unless a subclass defines them.

    Each hook is called on all ranks, in the order of the configuration, except ``on_event`` (on rank 0) and
    ``on_error`` (perhaps on some ranks). Write files on rank 0 alone; call collectives on all ranks. The
    constructor takes the options and opens nothing: it is also called where a configuration is only checked.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in vars(cls):
            if name.startswith("on_") and not hasattr(Callback, name):
                raise TypeError(f"{cls.__name__}: there is no hook {name}{suggestion(name, HOOKS)}")

    def on_build(self, run: RunView) -> None:
        """Raise ``ValueError`` to refuse the run, before it writes anything; exchange nothing.

        A dry run calls no other hook.
        """

    def on_run_begin(self, run: RunView) -> None:
        """Handle the start or resumption of a run; its folder exists now. Otherwise as ``on_build``."""

    def on_resume(self, run: RunView) -> None:
        """Handle a resumption from a checkpoint, after ``load_state_dict`` and ``on_run_begin``."""

    def on_phase_begin(self, run: RunView, phase: PhaseView) -> None:
        """Handle the begin of a phase, or a resumption in it."""

    def on_step_end(self, run: RunView, step: Step) -> None:
        """Handle the end of a step, skipped ones too; ``run.position`` is after the step."""

    def on_test_end(self, run: RunView, tested: Tested) -> None:
        """Handle the end of a test; ``tested`` has the metrics over all ranks."""

    def on_epoch_end(self, run: RunView, result: EpochResult) -> None:
        """Handle the end of an epoch and its test; ``run.stop`` ends the run here."""

    def on_checkpoint(self, run: RunView, step: int) -> None:
        """Handle a complete checkpoint of ``step``; the run may have made other steps since."""

    def on_phase_end(self, run: RunView, phase: PhaseView) -> None:
        """Handle the end of a phase."""

    def on_run_end(self, run: RunView) -> None:
        """Handle the end of the run: the weights are saved, and ``run.summary`` is complete."""

    def on_error(self, run: RunView, error: BaseException) -> None:
        """Handle an error or SIGTERM that ends the run, perhaps on this rank alone: exchange nothing."""

    def on_event(self, run: RunView, event: Event) -> None:
        """Handle a record of ``metrics.jsonl``, on rank 0 alone: exchange nothing."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state for a checkpoint; the state of rank 0 is saved, and given to all."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint; not called where the checkpoint has no state."""


HOOKS = [name for name in vars(Callback) if name.startswith("on_")]
FIRST_HOOKS = ("on_build", "on_run_begin")  # a ValueError of these refuses the run


class CallbackFailed(RuntimeError):
    """A callback of the configuration raised an error, perhaps on this rank alone; one line names it."""


class Callbacks:
    """Calls callbacks in order: the loop's ``own``, those ``given`` by a configuration, the loop's ``last``.

    ``given``: names and callbacks; an error names the callback. Errors of the loop's own are not changed.
    """

    def __init__(
        self,
        own: Sequence[Callback],
        given: Sequence[tuple[str, Callback]] = (),
        last: Sequence[Callback] = (),
    ) -> None:
        self._own, self._last = [("", each) for each in own], [("", each) for each in last]
        self._given: dict[str, Callback] = {}
        seen: Counter[str] = Counter()
        for name, callback in given:
            seen[name] += 1
            self._given[name if seen[name] == 1 else f"{name} {seen[name]}"] = callback

    def call(self, hook: Callable[..., None], *arguments: Any) -> None:
        """Call ``hook``, a method of :class:`Callback`, of all callbacks."""
        for name, callback in self._all():
            with _named(name, hook.__name__):
                getattr(callback, hook.__name__)(*arguments)

    def end(self, run: RunView, error: BaseException) -> None:
        """Call ``on_error`` of all callbacks; ignore what they raise, since ``error`` came first."""
        for _, callback in self._all():
            with suppress(Exception):
                callback.on_error(run, error)

    def _all(self) -> list[tuple[str, Callback]]:
        return [*self._own, *self._given.items(), *self._last]

    def leave_out_given(self) -> None:
        """Call only the loop's callbacks from now on."""
        self._given.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the configuration's callbacks that have one, by name."""
        states: dict[str, Any] = {}
        for name, callback in self._given.items():
            with _named(name, "state_dict"):
                if state := callback.state_dict():
                    states[name] = dict(state)
        return states

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore the callbacks that the configuration still has."""
        for name in self._given.keys() & states.keys():
            with _named(name, "load_state_dict"):
                self._given[name].load_state_dict(states[name])


@contextmanager
def _named(name: str, hook: str) -> Iterator[None]:
    """Raise an error of the block with the name of its callback, if it has one."""
    try:
        yield
    except Exception as error:
        if not name:
            raise
        if hook in FIRST_HOOKS and isinstance(error, ValueError):
            raise ValueError(one_line(f"callback {name}: {error}")) from error
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}, line {last.lineno}"
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise CallbackFailed(one_line(f"callback {name}: {hook} raised {what} ({where})")) from error
