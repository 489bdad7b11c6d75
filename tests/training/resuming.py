"""Runs that are stopped and go on, on the ranks of this job: ``test_resume`` judges the facts."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers

from commlib import Topology, transport
from tests.launching import DIGITS
from tests.training.small import before_steps, settle
from tests.training.stored import newest
from training import Trainer
from training.checkpoint.folders import Checkpoints
from training.checkpoint.places import Folder
from training.config.config import Config, load
from training.models.images import image_input
from training.run.checkpointing import states_of
from training.run.exchange import dense_residual
from training.run_folder import to_resume

STEPS, BOUNDARY = 40, 25
END = STEPS - 4  # a run that is stopped ends before this step
WARMUP = "density_warmup: {start: 0.25, epochs: 2}"
RATE = "learning_rate: {start: 0.05, end: 0.02}"
CHECKPOINTS = "checkpoints={every_epochs: 1, every_steps: 17, keep: 100}"


def two_phases(first: str, second: str) -> str:
    """Return the word for 25 steps at 6 pixels and 15 more at 8; an epoch of two ranks has 14 steps."""
    lengths = f"steps: {BOUNDARY}, input_size: 6", f"steps: {STEPS - BOUNDARY}, input_size: 8"
    of_both = [
        f"{{{length}, batch_size: 48, {of}}}" for length, of in zip(lengths, (first, second), strict=True)
    ]
    return f"phases=[{', '.join(of_both)}]"


@dataclass(frozen=True)
class Scenario:
    """``words``: of the configuration. ``stop``: the step whose checkpoint the run goes on from."""

    words: tuple[str, ...]
    stop: int


CROPS = "augmentation: {area: [0.5, 1.0], mirror: false}"
SCENARIOS = {
    "sgd, hitopk then dense": Scenario(
        (
            two_phases(f"reducer: {{name: hitopk, density: 0.05}}, {RATE}", f"reducer: dense, {RATE}"),
            "bucket_mib=0.002",  # several buckets
        ),
        stop=17,
    ),
    "lars, oktopk then torus2d, clipped, in two parts, averaged": Scenario(
        (
            two_phases(
                "reducer: {name: oktopk, density: 0.05}, momentum: {start: 0.95, end: 0.85}, "
                "learning_rate: {start: 2.0, end: 1.0}",
                "reducer: torus2d, label_smoothing: 0.1, learning_rate: {start: 1.0, end: 0.5}",
            ),
            "optimizer={name: lars, trust: 0.02, weight_decay: 0.0001}",
            "clip_norm=0.5",
            "accumulate=2",
            "average=0.9",
        ),
        stop=34,
    ),
    "lamb, float16, gtopk then hioktopk": Scenario(
        (
            two_phases(
                "reducer: {name: gtopk, density: 0.05}, learning_rate: {start: 0.01, end: 0.01}",
                "reducer: {name: hioktopk, density: 0.02}, learning_rate: {start: 0.01, end: 0.001}",
            ),
            "optimizer={name: lamb, weight_decay: 0.01}",
            "precision=float16",
            "bucket_mib=0.01",
        ),
        stop=25,
    ),
    "adamw, updated in parts, density warm-up, crops, parts of the samples that change places": Scenario(
        (
            two_phases(
                f"reducer: {{name: allgather, density: 0.01}}, {WARMUP}, {CROPS}", f"reducer: dense, {CROPS}"
            ),
            "learning_rate=0.002",
            "optimizer={name: adamw, sharded: true}",
            "cache={disk: null, memory: null, shards: 2, exchange: 0.5}",
        ),
        stop=17,
    ),
}
OTHER_WORLD = "sgd, hitopk then dense"


def small_model(channels: int, classes: int, *, normalised: bool = False) -> keras.Model:
    """Return a model with all kinds of state that is traced sooner than those that ship.

    Between two tests, each rank has statistics of its own for the normalisation.
    """
    images, x = image_input(channels, normalised=normalised)
    x = layers.Flatten()(layers.Resizing(4, 4, interpolation="area")(x))
    x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(layers.Dense(48)(x)))
    x = layers.Dropout(0.2)(x)
    return keras.Model(images, layers.Dense(classes, dtype="float32", name="logits")(x))


small_model.smallest_side = 4  # type: ignore[attr-defined]


class Run:
    """A trainer of a configuration that notes what its steps read, and calls ``at_end`` before step END."""

    def __init__(
        self, config: Config, topology: Topology, at_end: Callable[["Run"], None] | None = None
    ) -> None:
        keras.utils.clear_session()
        self.trainer = Trainer(config, topology=topology)
        self.at_end = at_end
        self.residual: Any = None  # before the first step
        self.read: list[tuple[int, int, list[int]]] = []  # epoch, step of the run, ids
        before_steps(self.trainer, self._note)

    def _note(self, backward: Any, batch: Any, hyperparameters: Any) -> None:
        at, gradients = self.trainer.position, self.trainer.parts.exchange.gradients
        if at.steps == END and self.at_end is not None:
            settle(self.trainer)
            self.at_end(self)
        if not self.read:
            self.residual = gradients.exchange.residual
        self.read.append((at.run_epoch, at.steps, batch.ids.tolist()))

    def fit(self) -> "Run":
        self.trainer.fit()
        return self

    def state(self) -> dict[str, bytes]:
        """Return the bits of all that a run has, by name; all ranks call it together."""
        tree = dict(zip(("shared", "own"), states_of(self.trainer.parts), strict=True))
        return dict(_leaves("", tree))


def _leaves(place: str, tree: Any) -> Any:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(f"{place}/{key}", value)
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            yield from _leaves(f"{place}/{number}", value)
    else:
        yield place, tree.tobytes() if isinstance(tree, np.ndarray) else repr(tree).encode()


def configuration(folder: Path, scenario: Scenario, *words: str) -> Config:
    model = "model=tests.training.resuming:small_model"
    common = [model, "ranks_per_node=1", "cache={}", "reducer=dense", "evaluate_every=2", CHECKPOINTS]
    return load(DIGITS, [*common, f"output={folder}", *scenario.words, *words])


def copy_until(folder: Path, copy: Path, step: int) -> None:
    """Copy a folder of runs as it was when the checkpoint of ``step`` was the newest."""
    shutil.copytree(folder, copy)
    for path in copy.glob("*/checkpoints/step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


def facts_of(scenario: Scenario, folder: Path, topology: Topology) -> dict[str, Any]:
    """Return what came of a run that was not stopped, and of one that went on; equal on all ranks."""
    comm = topology.world
    seen: list[tuple[dict[str, bytes], float]] = []

    def look(run: Run) -> None:
        """Copy what a crash now would leave, and note how far the ranks' statistics are apart."""
        seen.append((run.state(), spread_of_statistics(run)))
        if comm.rank == 0:
            shutil.copytree(folder / "whole", folder / "stopped")
        comm.barrier()

    whole = Run(configuration(folder / "whole", scenario), topology, look).fit()
    ((before, spread),) = seen
    expected = whole.state()
    read = comm.allgather_objects(whole.read)
    copy = folder / f"from-{scenario.stop}"
    if comm.rank == 0:
        (folder / "read.json").write_text(json.dumps(read))
        copy_until(folder / "stopped", copy, scenario.stop)
    comm.barrier()
    run = Run(configuration(copy, scenario, "resume=auto"), topology).fit()
    state = run.state()
    differ = sorted({*expected, *state} - {key for key in expected if state.get(key) == expected[key]})
    return {
        "moved": any(expected[key] != before[key] for key in expected if key.startswith("/shared/weights")),
        "statistics": [spread, spread_of_statistics(whole)],
        "began at": comm.allgather_objects(run.read[0][1]),
        "differ": comm.allgather_objects(differ),
        "steps": run.trainer.position.steps,
        "same samples": run.read == whole.read[scenario.stop :],
        "equal epochs": _epochs(copy) == _epochs(folder / "whole"),
    }


def spread_of_statistics(run: Run) -> float:
    own = [each.numpy().ravel() for each in run.trainer.model.non_trainable_weights]
    of_ranks = run.trainer.topology.world.allgather_objects(np.concatenate([*own, np.zeros(1)]))
    return float(np.ptp(of_ranks, axis=0).max())


def _epochs(folder: Path) -> dict[int, dict[str, Any]]:
    """Return what the metrics of the run in ``folder`` have last said of every epoch, but for its times."""
    (path,) = folder.glob("*/metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    timed = ("seconds", "train_seconds", "run_seconds", "images_per_second")
    timed += ("stage_seconds", "hidden_seconds", "hidden_share", "slowest")
    return {
        line["epoch"]: {key: value for key, value in line.items() if key not in timed}
        for line in lines
        if line["kind"] == "epoch"
    }


def on_two_ranks(folder: str) -> None:
    comm = transport.mpi.world()
    topology = Topology(comm, ranks_per_node=1)
    for number, (name, scenario) in enumerate(SCENARIOS.items()):
        facts = facts_of(scenario, Path(folder) / str(number), topology)
        if comm.rank == 0:
            print(f"FACTS {json.dumps({name: facts})}", flush=True)


def in_another_world(folder: str) -> None:
    """Go on with what two ranks have left; rank 0 prints the facts."""
    comm = transport.mpi.world()
    number, scenario = list(SCENARIOS).index(OTHER_WORLD), SCENARIOS[OTHER_WORLD]
    stop, left = scenario.stop, Path(folder) / str(number)
    topology = Topology(comm, ranks_per_node=1)
    copy = left / f"world-{comm.size}-from-{stop}"
    if comm.rank == 0:
        copy_until(left / "stopped", copy, stop)
    comm.barrier()
    config = configuration(copy, scenario, "resume=auto")
    run = Run(config, topology)
    sums = _sum_of_residuals(run, to_resume(config, config.resume), stop)
    run.fit()
    residuals = comm.allgather_objects(run.residual.astype(np.float64))
    read = comm.allgather_objects(run.read)
    if comm.rank == 0:
        epoch = read[0][0][0]
        before = json.loads((left / "read.json").read_text())
        error = np.abs(np.sum(residuals, axis=0) - sums)
        facts = {
            "began at": run.read[0][1],
            "largest residual": float(np.abs(sums).max()),
            "largest error": float(error.max()),
            "read before": _ids(before, lambda at, step: at == epoch and step < stop),
            "read then": _ids(read, lambda at, step: at == epoch),
            "ended at": [run.trainer.position.steps, run.trainer.position.phase],
        }
        print(f"FACTS {json.dumps(facts)}", flush=True)


def _ids(of_ranks: Any, counts: Callable[[int, int], bool]) -> list[int]:
    return [sample for read in of_ranks for epoch, step, ids in read if counts(epoch, step) for sample in ids]


def _sum_of_residuals(run: Run, path: Path | None, stop: int) -> Any:
    """Return what the ranks of the checkpoint held back, added up in float64."""
    assert path is not None
    identity = json.loads((path / "run.json").read_text())["identity"]
    checkpoint = newest(Checkpoints(Folder(path / "checkpoints"), run.trainer.topology.world, run=identity))
    assert checkpoint is not None
    assert checkpoint.step == stop
    size = run.trainer.gradient_size
    states: list[Any] = [checkpoint.own_of(rank) for rank in range(checkpoint.world_size)]
    return np.sum([dense_residual(state["reducer"], size).astype(np.float64) for state in states], axis=0)
