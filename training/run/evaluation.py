"""The result of an epoch: the metrics of the test, and the sums over all ranks."""

from collections.abc import Iterable

import numpy as np

from commlib import bytes_sent
from datacache import Batch
from training.callbacks.digests import check_equal_weights
from training.results import EpochAccumulator, EpochResult
from training.run.build import Parts
from training.run.model import average_statistics
from training.run.phases import PhaseRun
from training.tasks.task import Tested

NOT_TESTED = Tested({}, 0)


def evaluate(parts: Parts, batches: Iterable[Batch]) -> Tested:
    """Return the metrics on the test part, each sample counted once; collective.

    ``batches``: those of this rank. Afterwards all ranks have the same BatchNormalization statistics.
    """
    world = parts.topology.world
    with parts.waiting("a test"):  # Horovod's exchanges are not known to it
        average_statistics(parts.model.keras, world)
    with parts.exchange.common_weights():
        check_equal_weights(parts.model.keras, world, "before the test")
        with parts.model.tested():
            return parts.model.evaluation.evaluate(batches, world)


def add_up(
    epoch: int,
    phase: PhaseRun,
    parts: Parts,
    accumulator: EpochAccumulator,
    tested: Tested,
    *,
    run_seconds: float,
) -> EpochResult:
    """Return the result of an epoch over all ranks, and add its bytes to the phase; collective."""
    topology = parts.topology
    dense = bytes_sent("dense", topology.nodes, topology.world.rank, parts.exchange.gradients.size).inter
    sums = accumulator.over_ranks(topology.world, dense)
    phase.result.sent += sums.sent.inter
    phase.result.dense += sums.dense_inter_bytes
    seconds = float(np.sum(accumulator.seconds))
    return EpochResult(
        epoch=epoch,
        reducer=phase.result.reducer,
        input=phase.result.input,
        steps=accumulator.steps,
        loss=sums.loss,
        metrics=dict(tested.values),
        tested=tested.count,
        train_seconds=seconds,
        run_seconds=run_seconds,
        throughput=sums.size / seconds if seconds else 0.0,
        sent_intra_bytes=sums.sent.intra,
        sent_inter_bytes=sums.sent.inter,
        dense_inter_bytes=sums.dense_inter_bytes,
        stages=sums.stages,
    )
