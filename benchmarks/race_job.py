"""One job of ``cloudtrain bench train --cluster``, on one of its ranks.

usage: python -m benchmarks.race_job JOB.json

It times steps, subject after subject and turn after turn, then makes whole runs; rank 0 prints a JSON
object for each result. The file holds ``config``, a configuration whose phases the subjects replace;
``steps``, the subjects whose steps are timed, and ``turns``; ``runs``, the subjects that are raced. A subject
has a ``name``, what it adds to the configuration, and whether it goes through Horovod.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import fields, replace
from itertools import count
from pathlib import Path
from statistics import fmean, median, median_low
from typing import Any

from commlib import Communicator, Report, Topology
from commlib.reducers import StageSeconds
from training.bench.record import machine, settings
from training.config.config import Config
from training.process.job import all_or_exit, as_rank
from training.process.tf_logging import import_tensorflow

CARD = Path("/sys/class/net/eth0/statistics/tx_bytes")  # of the node that this rank is on
LINKS = ("intra", "inter")
Json = dict[str, Any]


class Contestant:
    """A subject whose steps are timed, on one rank.

    Several share a trainer where only their reducers differ: its phase ``number`` is this one's.
    """

    def __init__(self, subject: Json, trainer: Any, number: int, batches: Iterator[Any]) -> None:
        self.subject, self._trainer, self._batches = subject, trainer, batches
        self._phase = trainer.phases[number]
        self._world = trainer.topology.world
        self.turns: list[float] = []
        self._reports: list[Report] = []
        self._card_bytes: list[float] = []

    def turn(self, warm_up: int, counted: int) -> None:
        """Take steps, of which the last ones count, or as many rounds as have them; collective.

        Reports are those of exchanges.
        """
        learner, backward = self._trainer.learner, self._phase.backward
        learner.begin(self._phase.phase)
        local_steps = self._phase.phase.local_steps or 1
        counted = -(-counted // local_steps) * local_steps
        for number in range(warm_up + counted):
            if number == warm_up:
                self._world.barrier()
                sent, start = _card_bytes(), self._world.now()
            hyperparameters = self._hyperparameters(number, warm_up)
            _, report = learner.step(backward, next(self._batches), hyperparameters)
            if number >= warm_up and hyperparameters.round_steps:
                self._reports.append(report)
        self._world.barrier()
        self.turns.append((self._world.now() - start) / counted)
        self._card_bytes.append((_card_bytes() - sent) / counted)

    def _hyperparameters(self, number: int, warm_up: int) -> Any:
        """Return those of a step of a turn; with local steps, the warm-up is a round."""
        first = self._phase.hyperparameters(0)
        if self._phase.phase.local_steps is None:
            return first
        if number < warm_up:
            return replace(first, round_steps=warm_up if number == warm_up - 1 else 0)
        return self._phase.hyperparameters(number - warm_up)

    def result(self) -> Json:
        """Return what was measured, equal on all ranks; collective."""
        own = {
            "turns": self.turns,
            "card": median(self._card_bytes),
            "sent": [
                median_low(getattr(each.traffic.sent, link) for each in self._reports) for link in LINKS
            ],
            "stages": {
                stage.name: median(getattr(each.seconds, stage.name) for each in self._reports)
                for stage in fields(StageSeconds)
            },
            "busy": sum(each.busy for each in self._reports),
            "hidden": sum(each.hidden for each in self._reports),
        }
        ranks = self._world.allgather_objects(own)
        busy, gradients = sum(rank["busy"] for rank in ranks), self._trainer.learner.gradients
        intra, inter = max((rank["sent"] for rank in ranks), key=lambda sent: (sent[1], sent[0]))
        is_known = not self.subject["horovod"]
        return {
            "seconds": [max(turns) for turns in zip(*(rank["turns"] for rank in ranks), strict=True)],
            "bytes": {"intra": intra, "inter": inter} if is_known else None,
            "card_bytes": max(rank["card"] for rank in ranks),
            "stages": _means([rank["stages"] for rank in ranks]) if is_known else None,
            "hidden_share": sum(rank["hidden"] for rank in ranks) / busy if busy else None,
            "overlaps": gradients.overlaps,
            "buckets": gradients.buckets,
            "reducer": self._trainer.config.reducer_config(self._phase.phase),
            "weights": gradients.size,
        }


def _means(stages: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: fmean(rank[name] for rank in stages) for name in stages[0]}


def _card_bytes() -> int:
    return int(CARD.read_text()) if CARD.exists() else 0


def timed_steps(job: Json, topology: Topology, dataset: Any) -> Iterator[Json]:
    """Yield a result for each subject whose steps are timed; collective."""
    if not job["steps"]:
        return
    groups: dict[str, list[Json]] = {}
    for subject in job["steps"]:
        groups.setdefault(json.dumps([subject["config"], subject["horovod"]]), []).append(subject)
    trainers, contestants = [], []
    for group in groups.values():
        phases = {"phases": [subject["phase"] for subject in group]}
        trainer = _trainer(job["config"] | group[0]["config"] | phases, group[0], topology, dataset)
        trainers.append(trainer)
        batches = _endless(trainer.phases[0].data.training_batches)
        contestants += [Contestant(each, trainer, number, batches) for number, each in enumerate(group)]
    for group, trainer in zip(groups.values(), trainers, strict=True):
        with _horovod_of(group[0], topology.world):
            trainer.phases[0].backward.prepare()
    taken = job["turns"]
    for _ in range(taken["turns"]):
        for contestant in contestants:
            with _horovod_of(contestant.subject, topology.world):
                contestant.turn(taken["warm_up"], taken["counted"])
    for contestant in contestants:
        yield {"part": "steps", "subject": contestant.subject["name"], **contestant.result()}
    for trainer in trainers:
        _close(trainer)


def runs(job: Json, topology: Topology, dataset: Any) -> Iterator[Json]:
    """Yield the course of a run of each subject that is raced; collective."""
    for subject in job["runs"]:
        with tempfile.TemporaryDirectory(prefix="cloudtrain-race-") as folder:
            config = job["config"] | subject["config"] | {"output": folder, "log_every": 1_000_000}
            trainer = _trainer(config, subject, topology, dataset)
            with redirect_stdout(sys.stderr), _horovod_of(subject, topology.world):  # of the run's own lines
                trainer.fit()
            written = sorted(Path(folder).glob("*/metrics.jsonl"))  # on rank 0
            lines = [json.loads(line) for path in written for line in path.read_text().splitlines()]
        epochs = [line for line in lines if line["kind"] == "epoch"]
        yield {
            "part": "run",
            "subject": subject["name"],
            "seed": job["config"]["seed"],
            "curve": [[line["run_seconds"], line["top1"]] for line in epochs],
            "steps": sum(line["steps"] for line in epochs),
            "train_seconds": sum(line["train_seconds"] for line in epochs),
            "sent_inter_bytes": sum(line["sent_inter_bytes"] for line in epochs),
            "weights": trainer.learner.gradients.size,
            "overlaps": trainer.learner.gradients.overlaps,
            "reducers": [trainer.config.reducer_config(phase) for phase in trainer.config.phases],
        }
        _close(trainer)


def _horovod_of(subject: Json, world: Communicator) -> AbstractContextManager[Any]:
    """Return what a subject computes and exchanges within; collective."""
    from training.run.replicas import running_horovod

    return running_horovod(world) if subject["horovod"] else nullcontext()


def _trainer(config: Json, subject: Json, topology: Topology, dataset: Any) -> Any:
    from benchmarks.horovod_exchange import HorovodLearner
    from training.run.data import Data
    from training.run.learner import Learner
    from training.run.trainer import Trainer

    checked = Config.model_validate(config).resolved()
    learner = HorovodLearner if subject["horovod"] else Learner
    return Trainer(checked, topology=topology, data=Data(checked, topology, dataset), learner=learner)


def _close(trainer: Any) -> None:
    """Free what a trainer holds: there are many in this process."""
    import keras

    for phase in trainer.phases:
        phase.close()
    trainer.learner.gradients.close()
    keras.utils.clear_session()


def _endless(batches_of: Callable[[int], Iterator[Any]]) -> Iterator[Any]:
    for epoch in count():
        yield from batches_of(epoch)


def main(path: str) -> None:
    """Measure on all ranks of this job."""
    job = json.loads(Path(path).read_text())
    with as_rank() as comm:
        import_tensorflow()
        topology = Topology(comm)
        dataset = all_or_exit(comm, Config.model_validate(job["config"]).dataset.make)
        where = {"nodes": [len(node) for node in topology.nodes]}
        for measure in (timed_steps, runs):
            for result in measure(job, topology, dataset):
                if comm.rank == 0:
                    told = {**result, **where, "machine": machine(), "settings": settings()}
                    print(json.dumps(told, allow_nan=False), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
