"""One job of :mod:`benchmarks.race`, on one of its ranks.

usage: python -m benchmarks.race_job JOB.json

It times steps, subject after subject and turn after turn, then makes whole runs; rank 0 prints a JSON
object for each result. The file holds ``config``, a configuration whose phases the subjects replace;
``steps``, the subjects whose steps are timed, and ``turns``; ``runs``, the subjects that are raced. A subject
has a ``name``, what it adds to the configuration, and whether it goes through Horovod.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from commlib import Communicator, Topology
from training.bench.record import machine, settings
from training.bench.train import TimedSteps, close, endless
from training.config.config import Config
from training.process.job import all_or_exit, as_rank
from training.process.tf_logging import import_tensorflow

CARD = Path("/sys/class/net/eth0/statistics/tx_bytes")  # of the node that this rank is on
SUMMED = ("steps", "train_seconds", "sent_inter_bytes")  # over the epochs of a run
Json = dict[str, Any]


def _card_bytes() -> float:
    return float(CARD.read_text()) if CARD.exists() else 0.0


def timed_steps(job: Json, topology: Topology, dataset: Any) -> Iterator[Json]:
    """Yield a result for each subject whose steps are timed; collective."""
    groups: dict[str, list[Json]] = {}
    for subject in job["steps"]:
        groups.setdefault(json.dumps([subject["config"], subject["horovod"]]), []).append(subject)
    trainers, timed = [], []
    for group in groups.values():
        phases = {"phases": [subject["phase"] for subject in group]}
        config = job["config"] | group[0]["config"] | phases
        trainer = make_trainer(config, topology, dataset, horovod=group[0]["horovod"])
        trainers.append(trainer)
        batches = endless(trainer.phases[0].data.training_batches)
        timed += [
            (each, TimedSteps(trainer, number, batches, _card_bytes)) for number, each in enumerate(group)
        ]
    for group, trainer in zip(groups.values(), trainers, strict=True):
        with _horovod(group[0], topology.world):
            trainer.phases[0].backward.prepare()
    taken = job["turns"]
    for _ in range(taken["turns"]):
        for subject, steps in timed:
            with _horovod(subject, topology.world):
                steps.turn(taken["warm_up"], taken["counted"])
    for subject, steps in timed:
        result = steps.result()
        unknown = {"bytes": None, "stages": None} if subject["horovod"] else {}
        result["card_bytes"] = result.pop("count")
        yield {"part": "steps", "subject": subject["name"], **result, **unknown}
    for trainer in trainers:
        close_trainer(trainer)


def runs(job: Json, topology: Topology, dataset: Any) -> Iterator[Json]:
    """Yield the course of a run of each subject that is raced; collective."""
    for subject in job["runs"]:
        with tempfile.TemporaryDirectory(prefix="cloudtrain-race-") as folder:
            config = job["config"] | subject["config"] | {"output": folder, "log_every": 1_000_000}
            trainer = make_trainer(config, topology, dataset, horovod=subject["horovod"])
            with redirect_stdout(sys.stderr), _horovod(subject, topology.world):  # of the run's own lines
                trainer.fit()
            written = sorted(Path(folder).glob("*/metrics.jsonl"))  # on rank 0
            lines = [json.loads(line) for path in written for line in path.read_text().splitlines()]
        epochs = [line for line in lines if line["kind"] == "epoch"]
        yield {
            "part": "run",
            "subject": subject["name"],
            "seed": job["config"]["seed"],
            "curve": [[line["run_seconds"], line["top1"]] for line in epochs],
            **{key: sum(line[key] for line in epochs) for key in SUMMED},
            "weights": trainer.parts.exchange.gradients.size,
            "overlaps": trainer.parts.exchange.gradients.overlaps,
            "reducers": [trainer.config.reducer_config(phase) for phase in trainer.config.phases],
        }
        close_trainer(trainer)


@contextmanager
def _horovod(subject: Json, world: Communicator) -> Iterator[None]:
    """Run Horovod for the block where the subject exchanges through it; collective.

    Horovod's thread exchanges a message with all ranks each millisecond, and waits for it in a busy loop.
    """
    if not subject["horovod"]:
        yield
        return
    import horovod.tensorflow as hvd

    hvd.init()
    yield
    world.barrier()  # the first rank that shuts Horovod down does so for all
    hvd.shutdown()


def make_trainer(config: Json, topology: Topology, dataset: Any, *, horovod: bool) -> Any:
    from benchmarks.horovod_exchange import build_horovod
    from training.run.build import build
    from training.run.data import Data
    from training.run.trainer import Trainer

    checked = Config.model_validate(config).resolved()
    parts = build_horovod if horovod else build
    return Trainer(checked, topology=topology, data=Data(checked, topology, dataset), build=parts)


def close_trainer(trainer: Any) -> None:
    """Free what a trainer holds: there are many in this process."""
    import keras

    close(trainer)
    keras.utils.clear_session()


def tell(path: str, *measures: Callable[[Json, Topology, Any], Iterator[Json]]) -> None:
    """Print what each yields for the job in a file, from rank 0; on all ranks of this job."""
    job = json.loads(Path(path).read_text())
    with as_rank() as comm:
        import_tensorflow()
        topology = Topology(comm)
        dataset = all_or_exit(comm, Config.model_validate(job["config"]).dataset.make)
        where = {"nodes": [len(node) for node in topology.nodes]}
        for measure in measures:
            for result in measure(job, topology, dataset):
                if comm.rank == 0:
                    told = {**result, **where, "machine": machine(), "settings": settings()}
                    print(json.dumps(told, allow_nan=False), flush=True)


if __name__ == "__main__":
    tell(sys.argv[1], timed_steps, runs)
