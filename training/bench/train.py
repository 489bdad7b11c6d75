"""``cloudtrain bench train``: seconds of whole training steps with each reducer, on the ranks of this job."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import count
from statistics import fmean, median
from typing import Any

from commlib import LinkBytes, Report, Topology
from commlib.reducers import StageSeconds
from training.bench.record import Record, Seconds, against_baseline, busiest, median_bytes, report
from training.commands.train import make_trainer
from training.config.config import Config, load
from training.process.job import all_or_exit, as_rank
from training.results import ALL_FRAGMENTS

# Unless a configuration is given: ResNet-20 on generated pictures.
CONFIG = "synthetic"
OVERRIDES = ("model=resnet20", "dataset.side=32", "phases.0.input_size=32", "phases.0.batch_size=64")
BASELINE = "dense"
REDUCERS = (BASELINE, "hitopk", "oktopk")
TURNS, WARM_UP_STEPS, COUNTED_STEPS = 4, 2, 6
QUICK_TURNS, QUICK_COUNTED_STEPS = 2, 2


class TimedSteps:
    """Steps of a phase of a trainer on one rank, in turns that alternate with the turns of other trainers.

    ``batches``: of the phase, endless. ``counter``: read before and after the steps that count.
    """

    def __init__(
        self, trainer: Any, number: int, batches: Iterator[Any], counter: Callable[[], float] = float
    ) -> None:
        self._trainer, self._batches, self._counter = trainer, batches, counter
        self._phase = trainer.phases[number]
        self._world = trainer.topology.world
        self._turns: list[float] = []
        self._counts: list[float] = []
        self._reports: list[Report] = []

    def turn(self, warm_up: int, counted: int) -> None:
        """Take ``warm_up`` steps and ``counted`` steps, or whole rounds of local steps; collective."""
        phase = self._phase.phase
        self._trainer.parts.step.begin(phase)
        first, local_steps = self._phase.hyperparameters(0), phase.local_steps
        counted = -(-counted // (local_steps or 1)) * (local_steps or 1)
        for number in range(warm_up):  # with local steps one round
            ends = number == warm_up - 1
            exchanged = {"round_steps": warm_up if ends else 0, "leaving": ALL_FRAGMENTS if ends else None}
            self._step(replace(first, **exchanged) if local_steps else first)
        self._world.barrier()
        before, start = self._counter(), self._world.now()
        for number in range(counted):
            hyperparameters = self._phase.hyperparameters(number) if local_steps else first
            report = self._step(hyperparameters)
            if hyperparameters.round_steps:
                self._reports.append(report)
        if (local := self._trainer.parts.exchange.local) is not None:
            local.abandon_round()  # which waits for what is under way
        self._world.barrier()
        self._turns.append((self._world.now() - start) / counted)
        self._counts.append((self._counter() - before) / counted)

    def _step(self, hyperparameters: Any) -> Report:
        step = self._trainer.parts.step
        return step.take(self._phase.backward, next(self._batches), hyperparameters)[1]

    def result(self) -> dict[str, Any]:
        """Return what was measured, equal on all ranks; collective."""
        own: dict[str, Any] = {
            "turns": self._turns,
            "count": median(self._counts),
            "sent": median_bytes([each.traffic.sent for each in self._reports]),
            "stages": {
                stage.name: median(getattr(each.seconds, stage.name) for each in self._reports)
                for stage in fields(StageSeconds)
            },
            "busy": sum(each.busy for each in self._reports),
            "hidden": sum(each.hidden for each in self._reports),
        }
        ranks = self._world.allgather_objects(own)
        busy, gradients = sum(rank["busy"] for rank in ranks), self._trainer.parts.exchange.gradients
        return {
            "seconds": [max(turns) for turns in zip(*(rank["turns"] for rank in ranks), strict=True)],
            "bytes": asdict(busiest(rank["sent"] for rank in ranks)),
            "count": max(rank["count"] for rank in ranks),
            "stages": {name: fmean(rank["stages"][name] for rank in ranks) for name in own["stages"]},
            "hidden_share": sum(rank["hidden"] for rank in ranks) / busy if busy else None,
            "overlaps": gradients.overlaps,
            "buckets": gradients.buckets,
            "reducer": self._trainer.config.reducer_config(self._phase.phase),
            "weights": gradients.size,
        }


def endless(batches_of: Callable[[int], Iterator[Any]]) -> Iterator[Any]:
    """Yield the batches of one epoch after the other."""
    for epoch in count():
        yield from batches_of(epoch)


def close(trainer: Any) -> None:
    """Free what a trainer holds that was not run."""
    for phase in trainer.phases:
        phase.close()
    trainer.close()


def bench(
    as_json: bool, *, config: str | None, overrides: Sequence[str], reducers: Sequence[str], quick: bool
) -> int:
    """Print the records of all reducers, on rank 0, and return the exit status."""

    def configs() -> dict[str, Config]:
        words = [*overrides] if config else [*OVERRIDES, *overrides]
        names = reducers or REDUCERS
        return {name: load(config or CONFIG, [*words, f"phases.0.reducer={name}"]) for name in names}

    with as_rank() as comm:
        checked = all_or_exit(comm, configs)
        ranks_per_node = next(iter(checked.values())).ranks_per_node
        topology = all_or_exit(comm, lambda: Topology(comm, ranks_per_node))
        return report([measure(topology, checked, quick)], as_json=as_json, show=_show, comm=comm)


def measure(topology: Topology, configs: Mapping[str, Config], quick: bool) -> Iterator[Record]:
    """Yield a record a reducer, beside dense where that is measured; all ranks call it together."""
    trainers = {name: make_trainer(config, topology) for name, config in configs.items()}
    timed = {}
    for name, trainer in trainers.items():
        trainer.phases[0].backward.prepare()
        timed[name] = TimedSteps(trainer, 0, endless(trainer.phases[0].data.training_batches))
    turns, counted = (QUICK_TURNS, QUICK_COUNTED_STEPS) if quick else (TURNS, COUNTED_STEPS)
    for _ in range(turns):
        for each in timed.values():
            each.turn(WARM_UP_STEPS, counted)
    results = {name: each.result() for name, each in timed.items()}
    for trainer in trainers.values():
        close(trainer)
    seconds = {name: Seconds.of(result["seconds"]) for name, result in results.items()}
    for name, result in results.items():
        phase: Any = configs[name].phases[0]  # of the task
        case = {"model": configs[name].model.name, "batch_size": phase.batch_size}
        case |= {"ranks_of_nodes": [len(node) for node in topology.nodes], "quick": quick}
        more = {key: result[key] for key in ("stages", "hidden_share", "buckets", "weights", "reducer")}
        record = Record("train", case, name, seconds[name], bytes=LinkBytes(**result["bytes"]), more=more)
        yield record.beside(BASELINE, seconds[BASELINE]) if name != BASELINE in seconds else record


def _show(records: Sequence[Record]) -> None:
    case, nodes = records[0].case, records[0].case["ranks_of_nodes"]
    what = f"{case['model']}, {records[0].more['weights']:,} weights, {case['batch_size']} samples of a rank"
    notes = [f"{what} in a step, {sum(nodes)} ranks on {len(nodes)} nodes; a turn ends with its slowest rank"]
    against_baseline(records, "a training step", 1e3, "ms", notes).print()
