"""The resources of a phase of a run: its batches, its compiled step, its schedules."""

import threading
from contextlib import suppress
from dataclasses import replace

from commlib.tuning.tuner import Choice
from training.config.config import Config
from training.config.records import Phase
from training.config.schedules import momentum_at
from training.results import ALL_FRAGMENTS, PhaseResult, Position, StepHyperparameters
from training.run.autotune import check_budget
from training.run.backward import Backward
from training.run.data import Data, PhaseData
from training.run.dry_run import resolved_rate


class PhaseRun:
    """One phase, on one rank. ``steps``: of the phase; ``epoch_steps``: of a pass over the samples.

    ``backward``: computes the gradients of its batches. ``choice``: of ``auto``, if it chose the reducer.
    ``size``: the number of ranks. Raises a ``ValueError`` of one line that begins with the key where a
    schedule does not fit the phase.
    """

    def __init__(
        self,
        number: int,
        phase: Phase,
        config: Config,
        data: Data,
        backward: Backward,
        choice: Choice | None = None,
        *,
        size: int = 1,
    ) -> None:
        self.number, self.phase = number, phase
        self.data: PhaseData = data.of_phase(phase)
        span = phase.span_of(self.data.order.steps(), self.data.order.global_batch)
        self.steps, self.epochs = span.steps, span.epochs
        self.epoch_steps, self.global_batch = span.epoch_steps, span.global_batch
        check_budget(number, choice, self.steps)
        self.rate = resolved_rate(number, phase, span)
        self.momentum, self.backward = config.momentum_of(phase), backward
        reducer = None if size == 1 else str(config.reducer_config(phase)["name"])
        self.result = PhaseResult(reducer, data.task.describe(phase), self.epochs)
        self._filling: threading.Thread | None = None
        self._closing = threading.Event()

    def hyperparameters(self, step: int) -> StepHyperparameters:
        momentum = None if self.momentum is None else momentum_at(self.momentum, step, self.steps)
        return StepHyperparameters(self.rate.at(step, self.steps), momentum, *self._exchanged(step + 1))

    def _exchanged(self, step: int) -> tuple[int, int | None]:
        """Return ``round_steps`` and ``leaving`` of :class:`StepHyperparameters` for a step, from 1."""
        if (schedule := self.phase.schedule) is None:
            return 1, None
        if step == self.steps:
            return schedule.since(step), ALL_FRAGMENTS
        # A fragment that could not arrive before the phase ends is sent at its end, with all others.
        leaving = schedule.leaving(step) if step + schedule.delay < self.steps else None
        return schedule.since(step) if schedule.arrives(step) else 0, leaving

    def how_rounds_go(self) -> str | None:
        """Return a line on the local steps of the phase, if it has them."""
        if (schedule := self.phase.schedule) is None:
            return None
        last = schedule.since(self.steps)
        shorter = f"; its last round has {last}" if last != schedule.interval else ""
        whose = "rank" if self.phase.local == "rank" else "node"
        how = f"{schedule.steps} local steps of each {whose} to an exchange"
        if schedule.fragments > 1:
            how += f", one of {schedule.fragments} fragments after every {schedule.interval}"
        if schedule.delay:
            how += f", for which {schedule.delay} more have time"
        if self.phase.round_seconds is not None:
            how += f", none after {self.phase.round_seconds:g} s of them"
        return f"phase {self.number + 1}: {how}{shorter}"

    def density(self, epoch: int) -> float | None:
        """Return the density of an epoch of the phase; ``None`` if its reducer has none."""
        reducer, warmup = self.phase.reducer, self.phase.density_warmup
        last = None if reducer is None else reducer.density
        if last is None or warmup is None:
            return last
        densities = warmup.densities(last)
        return densities[epoch] if epoch < len(densities) else last

    def converted(self, position: Position) -> Position:
        """Return a position in the phase in its own steps; it may count steps of another batch size."""
        here = position.in_world(self.global_batch, self.epoch_steps)
        return here if self.phase.steps is None else replace(here, phase_steps=position.phase_steps)

    def fill_ahead(self) -> None:
        """Start filling the phase's cache in the background, unless that is under way."""
        if self._filling is None:
            self._filling = threading.Thread(target=self._fill, name="fill ahead", daemon=True)
            self._filling.start()

    def _fill(self) -> None:
        def report(done: int, total: int) -> None:
            if self._closing.is_set():
                raise _Over

        with suppress(Exception):  # training reports the error when it reads the sample
            self.data.fill(report)

    def close(self) -> None:
        """Release the node's folders; idempotent."""
        if self._filling is not None:
            self._closing.set()
            self._filling.join()
        self.data.close()


class _Over(Exception):
    """Stops filling the cache."""
