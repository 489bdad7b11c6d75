"""A training step: gradient, exchange, update."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from commlib import Report, Topology
from commlib.reducers.report import Stopwatch
from commlib.topology import Traffic
from commlib.trace import Recorder
from datacache import Batch
from training.config.records import Phase
from training.results import LoopSeconds, StepHyperparameters
from training.run.backward import Array, Backward
from training.run.exchange import PhaseExchange
from training.run.local_steps import NOTHING_EXCHANGED
from training.run.model import Model
from training.run.optimizer import WeightUpdate


class TrainingStep:
    """The steps of one rank; ``stopwatch`` adds up the time of steps until it is restarted."""

    def __init__(
        self,
        topology: Topology,
        model: Model,
        exchange: PhaseExchange,
        optimizer: WeightUpdate,
        *,
        accumulate: int = 1,
    ) -> None:
        self.model, self.exchange, self.optimizer, self._accumulate = model, exchange, optimizer, accumulate
        self.stopwatch = Stopwatch(topology.world.now, LoopSeconds)

    def begin(self, phase: Phase) -> float | None:
        """Begin a phase, as :meth:`PhaseExchange.begin` does; collective."""
        self.optimizer.begin(phase)
        return self.exchange.begin(phase, self.optimizer.optimizer)

    def settle(self, hyperparameters: StepHyperparameters) -> Traffic:
        """Apply the residual before a change to or from local steps; return the traffic; collective."""
        return self.exchange.settle(lambda mean: self._apply(mean, hyperparameters))

    def begin_epoch(self, density: float | None, *, is_new: bool) -> None:
        """Begin an epoch, or continue it, with a density, if its reducer has one."""
        exchange = self.exchange.gradients.exchange
        if density is not None and density != exchange.density:
            exchange.set_density(density)
        if is_new:
            self.model.restart_carried()

    def take(
        self, backward: Backward, batch: Batch, hyperparameters: StepHyperparameters
    ) -> tuple[float, Report]:
        """Train on one batch; return the loss of this rank's samples, and the report of the exchange.

        A step with a non-finite gradient on any rank changes only the loss scale and the random states of the
        model. With local steps the whole round is skipped, at its last step. The stopwatch measures a
        round's seconds; the caller restarts it after each step.
        """
        exchange, local = self.exchange.current, self.exchange.local
        if local is not None:
            local.begin_step()
        with self.stopwatch.measure("forward_backward"):
            loss, inputs, before = self._gradient(backward, batch)
        with self.stopwatch.measure("exchange_wait"):
            if not backward.overlaps:
                exchange.submit_inputs(inputs)
            mean, report = exchange.wait()
        if report.finite:
            report = replace(report, finite=self._apply(mean, hyperparameters))
        if not report.finite:
            backward.undo(before)
            if local is not None:
                local.rounds.failed = True
        if local is not None:
            local.pace.took(sum(vars(self.stopwatch.seconds).values()))
        return loss, self._ended(hyperparameters, report)

    def passes_over(self) -> bool:
        """Whether the next step is passed over, as the round has lasted its ``round_seconds``."""
        return self.exchange.local is not None and self.exchange.local.passes_over()

    def pass_over(self, hyperparameters: StepHyperparameters) -> Report:
        """End a step of a round without training in it; return the report of the exchange; collective."""
        assert self.exchange.local is not None
        self.exchange.local.begin_step()
        return self._ended(hyperparameters, NOTHING_EXCHANGED)

    def _ended(self, hyperparameters: StepHyperparameters, report: Report) -> Report:
        """End a step with this report so far."""
        if (local := self.exchange.local) is not None:
            with self.stopwatch.measure("exchange_wait"):
                report = local.end_step(hyperparameters, within=report)
            if not hyperparameters.round_steps:
                # A round is skipped as a whole, at its end.
                return replace(report, finite=True)
        if self.optimizer.scale is not None:
            self.optimizer.scale.update(report.finite)
        return report

    def abandon_round(self) -> None:
        """Return to the common weights, where a run ends within a round of local steps; collective."""
        if self.exchange.local is not None:
            self.exchange.local.abandon_round()

    def _gradient(self, backward: Backward, batch: Batch) -> tuple[float, list[Any], Sequence[Any]]:
        """Return loss and gradient of a batch, computed in parts, and the values that this has changed."""
        arrays, *more = parts_of(batch, self._accumulate)
        loss, inputs = backward(*arrays)
        before = backward.before
        if more:
            gradients = self.exchange.gradients
            for arrays in more:
                own_loss, own = backward(*arrays)
                loss += own_loss
                inputs = gradients.sum_of(inputs, own)
            loss, inputs = loss / self._accumulate, gradients.divided(inputs, self._accumulate)
        return loss, inputs, before

    def _apply(self, mean: Any, hyperparameters: StepHyperparameters) -> bool:
        return self.optimizer.apply(mean, hyperparameters, self.stopwatch.measure)

    def record(self, recorder: Recorder | None) -> None:
        self.stopwatch.recorder = recorder
        self.exchange.gradients.record(recorder)


def parts_of(batch: Batch, parts: int) -> list[tuple[Array, ...]]:
    """Return the arrays of each of ``parts`` equal parts of a batch."""
    if parts == 1:
        return [batch.arrays]
    return list(zip(*(np.split(array, parts) for array in batch.arrays), strict=True))
