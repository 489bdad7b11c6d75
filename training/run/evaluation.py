"""The result of an epoch: correct answers on the test part, and the sums over all ranks."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib import bytes_sent
from training.run.learner import Learner
from training.run.phases import PhaseRun
from training.run.replicas import average_statistics, check_equal_weights
from training.run.summary import EpochResult
from training.run.totals import EpochAccumulator


@dataclass(frozen=True)
class Answers:
    """Correct answers of all ranks on ``samples``: label ranked first, or among the first five."""

    correct: int | None
    correct_of_five: int | None
    samples: int


NOT_TESTED = Answers(None, None, 0)


def evaluate(learner: Learner, batches: Iterable[Any]) -> Answers:
    """Return the answers on the test part, each sample counted once; collective.

    ``batches``: those of this rank. Afterwards all ranks have the same BatchNormalization statistics.
    """
    world, counted = learner.topology.world, np.zeros(3, np.int64)
    average_statistics(learner.model, world)
    check_equal_weights(learner.model, world)
    with learner.tested():
        for batch in batches:
            counted[:2] += learner.forward.right(batch.images, batch.labels, batch.counts)
            counted[2] += batch.counts.sum()
    return Answers(*map(int, world.allgather_ints(counted.tolist()).sum(axis=0)))


def add_up(
    epoch: int,
    phase: PhaseRun,
    learner: Learner,
    accumulator: EpochAccumulator,
    answers: Answers,
    *,
    run_seconds: float,
) -> EpochResult:
    """Return the result of an epoch over all ranks, and add its bytes to the phase; collective."""
    topology = learner.topology
    dense = bytes_sent("dense", topology.nodes, topology.world.rank, learner.gradients.size).inter
    sums = accumulator.over_ranks(topology.world, dense)
    phase.result.sent += sums.sent.inter
    phase.result.dense += sums.dense_inter_bytes
    seconds = float(np.sum(accumulator.seconds))
    return EpochResult(
        epoch=epoch,
        reducer=phase.result.reducer,
        input_size=phase.phase.input_size,
        steps=accumulator.steps,
        loss=sums.loss,
        correct=answers.correct,
        correct_of_five=answers.correct_of_five,
        samples=answers.samples,
        train_seconds=seconds,
        run_seconds=run_seconds,
        images_per_second=len(accumulator.seconds) * phase.global_batch / seconds if seconds else 0.0,
        sent_intra_bytes=sums.sent.intra,
        sent_inter_bytes=sums.sent.inter,
        dense_inter_bytes=sums.dense_inter_bytes,
        stages=sums.stages,
    )
