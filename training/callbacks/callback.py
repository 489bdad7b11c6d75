"""The interface between a run and its callbacks: hooks, views of the run, and events."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

from commlib import Topology
from commlib.errors import suggestion
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


class PhaseView(Protocol):
    """A phase, as callbacks see it."""

    @property
    def number(self) -> int:
        """The number of the phase; the first is 0."""

    @property
    def phase(self) -> Any:
        """The phase of the configuration."""

    @property
    def data(self) -> Any:
        """The batches of the phase: ``training_batches(epoch)`` and ``test_batches()`` of this rank."""

    @property
    def steps(self) -> int:
        """Steps of the phase."""

    @property
    def global_batch(self) -> int:
        """Samples of a step, over all ranks."""

    @property
    def result(self) -> PhaseResult:
        """The result of the phase so far."""

    def hyperparameters(self, step: int) -> StepHyperparameters:
        """Return the hyperparameters of step ``step`` of the phase."""


class RunView(Protocol):
    """A run, as callbacks see it; they may change only ``summary`` and results.

    ``folder`` is ``None`` on all ranks but rank 0, and in a run that writes nothing.
    """

    @property
    def rank(self) -> int:
        """The number of this rank."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def topology(self) -> Topology:
        """The communicators; between two steps no other exchange uses ``topology.world``."""

    @property
    def config(self) -> Any:
        """The configuration (:class:`training.config.config.Config`), with the reducers that were chosen."""

    @property
    def task(self) -> Task:
        """The task, with its metrics and its unit of samples."""

    @property
    def model(self) -> Any:
        """The Keras model."""

    @property
    def data(self) -> Any:
        """The samples: ``training`` and ``test`` are their manifests."""

    @property
    def phases(self) -> Sequence[PhaseView]:
        """The phases of the run."""

    @property
    def phase(self) -> PhaseView:
        """The phase that is trained; at the end of the run, the last one."""

    @property
    def position(self) -> Position:
        """The position of the run, after the latest step."""

    @property
    def accumulator(self) -> EpochAccumulator:
        """The sums of the epoch so far, on this rank."""

    @property
    def summary(self) -> Summary:
        """The results so far."""

    @property
    def ranks(self) -> Ranks:
        """Hosts, nodes and hardware of the ranks."""

    @property
    def folder(self) -> RunFolder | None:
        """The folder of the run, on rank 0."""

    @property
    def progress(self) -> Progress:
        """The lines on the screen, and the live line."""

    @property
    def gradient_size(self) -> int:
        """The number of entries of the gradient."""

    def report(self, event: Event) -> None:
        """Print the lines of an event, and record it in ``metrics.jsonl``."""

    def stop(self, reason: str) -> None:
        """End the run after this epoch, on all ranks; any rank may call it."""

    def record(self, recorder: Any) -> None:
        """Give a span of each stage and bucket to a :class:`commlib.trace.Recorder`, or to none."""

    def restart_step_clock(self) -> None:
        """Begin the next step's time now, without the work since the last step."""


class Callback:
    """A base class whose hooks a run calls while it trains; they do nothing unless a subclass defines them.

    All hooks are called on all ranks, in the order of the configuration, but ``on_event``, which only rank 0
    gets. Callbacks write where ``run.rank`` is 0, and exchange data on all ranks. The constructor takes the
    options and opens nothing: it is also called where a configuration is only checked.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in vars(cls):
            if name.startswith("on_") and not hasattr(Callback, name):
                raise TypeError(f"{cls.__name__}: there is no hook {name}{suggestion(name, HOOKS)}")

    def on_build(self, run: RunView) -> None:
        """Raise ``ValueError`` to refuse the run, before it writes anything; exchange nothing.

        The only hook of a dry run.
        """

    def on_run_begin(self, run: RunView) -> None:
        """Handle the begin or resumption of a run, with its folder; otherwise as ``on_build``."""

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
