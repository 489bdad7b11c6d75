"""What a run reports before its first step: data, model, ranks, and what was chosen for it."""

from collections.abc import Iterator, Sequence

import numpy as np

from training.callbacks.callback import Event
from training.config.config import Config
from training.run.build import Parts
from training.run.events import (
    InBuckets,
    LocalRounds,
    NormsShared,
    OnGPUs,
    ReducerChosen,
    SparseTables,
    VarianceFrozen,
)
from training.run.phases import PhaseRun


def introduction(parts: Parts) -> str:
    """Return the first line of a run: data set, model and ranks."""
    config, topology, data = parts.config, parts.topology, parts.data
    nodes = [len(node) for node in topology.nodes]
    samples = f"{len(data.training):,} training and {len(data.test):,} test samples"
    begin = (
        f"{config.dataset.name}: {samples}; {config.model.name}: {parts.exchange.gradients.size:,} weights"
    )
    if topology.world.size == 1:
        return f"{begin}; one rank, so nothing is exchanged and no reducer is used"
    emulated = "emulated " if config.ranks_per_node else ""
    word = "node" if len(nodes) == 1 else "nodes"
    return f"{begin}; {topology.world.size} ranks on {len(nodes)} {emulated}{word} {nodes}"


def choices(parts: Parts, phases: Sequence[PhaseRun], why_not_on_gpus: str | None) -> Iterator[Event]:
    """Yield the choices that the configuration left open, and how its local steps go."""
    topology, config = parts.topology, parts.config
    if why_not_on_gpus is not None or topology.world.arrays is not np:
        yield OnGPUs(topology.world.size, config.transport, why_not_on_gpus)
    for number, choice in parts.choices.items():
        yield ReducerChosen(
            phase=number,
            reducer=choice.reducer,
            options=choice.options,
            predicted_seconds=choice.seconds,
            predicted_dense_seconds=choice.dense_seconds,
            reason=choice.reason,
        )
    yield from map(SparseTables, parts.model.tables.lines())
    yield from map(InBuckets, parts.exchange.lines())
    yield from map(NormsShared, parts.optimizer.lines())
    yield from map(VarianceFrozen, how_the_variance_is_frozen(config, [each.steps for each in phases]))
    yield from (LocalRounds(line) for phase in phases if (line := phase.how_rounds_go()) is not None)


def how_the_variance_is_frozen(config: Config, steps: Sequence[int]) -> list[str]:
    """Return a line on ``freeze_variance``, if it is given; ``steps``: of the phases."""
    left = given = getattr(config.optimizer, "freeze_variance", None)
    if left is None:
        return []
    for number, own in enumerate(steps, 1):
        if left <= own:
            return [f"the second moment is frozen after {left:,} of the {own:,} steps of phase {number}"]
        left -= own
    return [f"optimizer.freeze_variance={given} has no effect: the run has {sum(steps)} steps"]
