"""The interface between a run and what watches it: hooks, and the events that a run reports."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from commlib.errors import suggestion

if TYPE_CHECKING:
    from training.checkpoint.serialization import Tree
    from training.run.phases import PhaseRun
    from training.run.stages import Step
    from training.run.summary import EpochResult
    from training.run.trainer import Trainer
    from training.tasks.task import Tested


@dataclass(frozen=True)
class Event:
    """An event to report. ``kind``: of its record, which has all fields unless an event overrides it."""

    kind: ClassVar[str]

    def lines(self) -> Iterable[str]:
        """Return the lines that remain on the screen."""
        return ()

    def record(self) -> dict[str, Any]:
        """Return the fields of its record in ``metrics.jsonl``, without the kind."""
        return asdict(self)


class Callback:
    """What a run calls while it trains; each hook does nothing unless a subclass defines it.

    All hooks are called on all ranks, in the order of the configuration, but ``on_event``, which only rank 0
    gets. What writes does so where ``run.rank`` is 0; what exchanges something does so on all ranks. The
    constructor takes the options, and opens nothing: it is also called where a configuration is only checked.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in vars(cls):
            if name.startswith("on_") and not hasattr(Callback, name):
                raise TypeError(f"{cls.__name__}: there is no hook {name}{suggestion(name, HOOKS)}")

    def on_build(self, run: "Trainer") -> None:
        """Raise ``ValueError`` for what cannot be, while nothing is written; exchange nothing.

        The only hook of a dry run.
        """

    def on_run_begin(self, run: "Trainer") -> None:
        """Begin, or go on, in the run's folder. Raise ``ValueError`` as ``on_build``; exchange nothing."""

    def on_resume(self, run: "Trainer") -> None:
        """Go on from a checkpoint; after ``load_state_dict`` and ``on_run_begin``."""

    def on_phase_begin(self, run: "Trainer", phase: "PhaseRun") -> None:
        """Begin a phase, or go on with it."""

    def on_step_end(self, run: "Trainer", step: "Step") -> None:
        """Hear of a step that was made, or skipped; ``run.position`` is behind it."""

    def on_test_end(self, run: "Trainer", tested: "Tested") -> None:
        """Hear of a test: the metrics over all ranks."""

    def on_epoch_end(self, run: "Trainer", result: "EpochResult") -> None:
        """Hear of an epoch that has ended, with its test; ``run.stop`` ends the run here."""

    def on_checkpoint(self, run: "Trainer", step: int) -> None:
        """Hear of the checkpoint of a step that is complete: the run may have made others since."""

    def on_phase_end(self, run: "Trainer", phase: "PhaseRun") -> None:
        """Hear of a phase that has ended."""

    def on_run_end(self, run: "Trainer") -> None:
        """Hear of the end of the run: its weights are saved, ``run.summary`` is complete."""

    def on_error(self, run: "Trainer", error: BaseException) -> None:
        """Hear of an error that ends the run on this rank, perhaps alone, or of SIGTERM: exchange nothing."""

    def on_event(self, run: "Trainer", event: Event) -> None:
        """Hear of what ``metrics.jsonl`` records; on rank 0 alone: exchange nothing."""

    def state_dict(self) -> Mapping[str, "Tree"]:
        """Return what a checkpoint keeps of it, equal on all ranks: that of rank 0 is written."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of a checkpoint; not called where that has none."""


HOOKS = [name for name in vars(Callback) if name.startswith("on_")]
