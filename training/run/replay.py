"""The replay of recorded steps of a run, from one of its checkpoints; nothing is written."""

from collections.abc import Callable
from contextlib import suppress

from training.callbacks.callback import Callback, Callbacks, RunView
from training.callbacks.digests import check_equal_weights
from training.config.records import Checkpointing
from training.receipt import Recorded
from training.results import Step
from training.run.checkpointing import Checkpointer
from training.run.trainer import Trainer


class _Done(Exception):
    """The last recorded step was taken."""


class Replay(Callback):
    """Takes recorded steps again with a trainer that has not begun, and compares the digests of the weights.

    ``checkpoints``: where those of the run are. Collective, but for ``say``, to which lines are given.
    """

    def __init__(
        self, recorded: Recorded, trainer: Trainer, checkpoints: Checkpointing, say: Callable[[str], None]
    ) -> None:
        self._recorded, self._trainer, self._checkpoints, self._say = recorded, trainer, checkpoints, say
        self._compared = self._agreeing = 0
        trainer.callbacks = Callbacks([self])

    def begin(self) -> None:
        """Restore the newest checkpoint before the steps; ``ValueError`` if one is needed and missing."""
        recorded, run = self._recorded, self._trainer
        folder = recorded.folder.absolute()
        run.begin(writes=False)
        checkpointer = Checkpointer(run, folder, self._checkpoints, recorded.identity)
        checkpointer.resume(at_most=recorded.first)
        start = run.position.steps
        if start < recorded.since:
            expected = f"expected a checkpoint of step {recorded.since} to {recorded.first}, got none"
            raise ValueError(f"{checkpointer.place}: {expected}: before, the run was another")
        whence = f"the checkpoint of step {start}" if start else "the beginning"
        self._say(f"{recorded.folder}: steps {recorded.first} to {recorded.last}, from {whence}")

    def run(self) -> None:
        """Take the steps; raises :class:`training.callbacks.digests.WeightsDiffer`."""
        if self._trainer.position.steps:
            self._compare()
        with suppress(_Done):
            self._trainer.run()

    def ends_well(self) -> bool:
        """Say how many digests agree, and return whether all do."""
        self._say(f"{self._agreeing} of {self._compared} digests agree")
        return self._agreeing == self._compared

    def on_step_end(self, run: RunView, step: Step) -> None:
        self._compare()
        if run.position.steps == self._recorded.last:
            raise _Done

    def _compare(self) -> None:
        run = self._trainer
        steps = run.position.steps
        expected = self._recorded.digests.get(steps)
        if expected is None:
            return
        found = check_equal_weights(run.model, run.topology.world, f"after step {steps}")
        self._compared += 1
        self._agreeing += found == expected
        verdict = f"{found} agrees" if found == expected else f"expected {expected}, got {found}"
        self._say(f"step {steps}: {verdict}")
