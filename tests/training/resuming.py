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
# With 48 samples a rank and two ranks, an epoch has 14 steps.
PHASE = "{{steps: {steps}, input_size: {size}, batch_size: 48, {of}}}"
CHECKPOINTS = "checkpoints={every_epochs: 1, every_steps: 17, keep: 100}"


def two_phases(first: str, second: str) -> str:
    """Return the word for 25 steps and 15 more."""
    one = PHASE.format(steps=BOUNDARY, size=6, of=first)
    return f"phases=[{one}, {PHASE.format(steps=STEPS - BOUNDARY, size=8, of=second)}]"


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
            "model=tests.training.resuming:with_statistics",  # each rank's own between two tests
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
                f"reducer: {{name: allgather, density: 0.01}}, {WARMUP}, {CROPS}",
                f"reducer: dense, {CROPS}",
            ),
            "learning_rate=0.002",
            "optimizer={name: adamw, sharded: true}",
            "cache={disk: null, memory: null, shards: 2, exchange: 0.5}",
        ),
        stop=17,
    ),
}
OTHER_WORLD = "sgd, hitopk then dense"


def with_statistics(channels: int, classes: int, *, normalised: bool = False) -> keras.Model:
    """Return a model with batch normalisation that is traced sooner than those that ship."""
    images, x = image_input(channels, normalised=normalised)
    for filters in (16, 16):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, layers.Dense(classes, dtype="float32", name="logits")(x))


def with_dropout(channels: int, classes: int, *, normalised: bool = False) -> keras.Model:
    """Return a model with random states that is traced sooner than those that ship."""
    images, x = image_input(channels, normalised=normalised)
    x = layers.Flatten()(layers.Resizing(4, 4, interpolation="area")(x))
    x = layers.Dropout(0.3)(layers.Dense(128, activation="relu")(x))
    return keras.Model(images, layers.Dense(classes, dtype="float32", name="logits")(x))


with_statistics.smallest_side = 1  # type: ignore[attr-defined]
with_dropout.smallest_side = 4  # type: ignore[attr-defined]


class Run:
    """A trainer of a configuration that notes what its steps read, and calls ``at_end`` before step END."""

    def __init__(
        self, config: Config, topology: Topology, at_end: Callable[["Run"], None] | None = None
    ) -> None:
        keras.utils.clear_session()
        self.trainer = Trainer(config, topology=topology)
        self.at_end = at_end
        self.first: dict[str, Any] | None = None
        self.read: list[tuple[int, int, list[int]]] = []  # epoch, step of the run, ids
        before_steps(self.trainer, self._note)

    def _note(self, backward: Any, batch: Any, hyperparameters: Any) -> None:
        at, gradients = self.trainer.position, self.trainer.parts.exchange.gradients
        if at.steps == END and self.at_end is not None:
            settle(self.trainer)
            self.at_end(self)
        if self.first is None:
            self.first = {"steps": at.steps, "residual": gradients.exchange.residual}
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
    model = "model=tests.training.resuming:with_dropout"
    common = [model, "ranks_per_node=1", "cache={}", "reducer=dense"]
    return load(DIGITS, [*common, f"output={folder}", "evaluate_every=2", *scenario.words, *words])


def copy_until(folder: Path, copy: Path, step: int) -> None:
    """Copy a folder of runs as it was when the checkpoint of ``step`` was the newest."""
    shutil.copytree(folder, copy)
    for path in copy.glob("*/checkpoints/step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


def run_whole(scenario: Scenario, folder: Path, topology: Topology) -> tuple[Run, dict[str, bytes], float]:
    """Train to the end with checkpoints, and copy what a crash before step END would leave to ``stopped``.

    Return the run, its state before that step, and how far its ranks' statistics were apart then.
    """
    seen: list[tuple[dict[str, bytes], float]] = []

    def look(run: Run) -> None:
        seen.append((run.state(), spread_of_statistics(run)))
        if topology.world.rank == 0:
            shutil.copytree(folder / "whole", folder / "stopped")
        topology.world.barrier()

    config = configuration(folder / "whole", scenario, CHECKPOINTS)
    return Run(config, topology, look).fit(), *seen[0]


def facts_of(scenario: Scenario, folder: Path, topology: Topology) -> dict[str, Any]:
    """Return what came of a run that was not stopped, and of one that went on; equal on all ranks."""
    comm = topology.world
    whole, before, spread = run_whole(scenario, folder, topology)
    expected, statistics = whole.state(), [spread, spread_of_statistics(whole)]
    read = comm.allgather_objects(whole.read)
    if comm.rank == 0:
        (folder / "read.json").write_text(json.dumps(read))
        copy_until(folder / "stopped", folder / "resumed", scenario.stop)
    comm.barrier()
    run = Run(configuration(folder / "resumed", scenario, CHECKPOINTS, "resume=auto"), topology).fit()
    state = run.state()
    differ = sorted({*expected, *state} - {key for key in expected if state.get(key) == expected[key]})
    assert run.first is not None
    equal = _epochs(folder / "resumed") == _epochs(folder / "whole")
    return {
        "moved": any(expected[key] != before[key] for key in expected if key.startswith("/shared/weights")),
        "statistics": statistics,
        "began at": comm.allgather_objects(run.first["steps"]),
        "differ": comm.allgather_objects(differ),
        "steps": run.trainer.position.steps,
        "same samples": run.read == whole.read[scenario.stop :],
        "equal epochs": comm.allgather_objects(equal)[0],
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
    left, stop = Path(folder) / str(number), scenario.stop
    topology = Topology(comm, ranks_per_node=1)
    copy = left / f"world-{comm.size}"
    if comm.rank == 0:
        copy_until(left / "stopped", copy, stop)
    comm.barrier()
    config = configuration(copy, scenario, CHECKPOINTS, "resume=auto")
    run = Run(config, topology)
    sums = _sum_of_residuals(run, to_resume(config, config.resume), stop)
    run.fit()
    assert run.first is not None
    residuals = comm.allgather_objects(run.first["residual"].astype(np.float64))
    read = comm.allgather_objects(run.read)
    if comm.rank == 0:
        epoch = read[0][0][0]
        before = json.loads((left / "read.json").read_text())
        error = np.abs(np.sum(residuals, axis=0) - sums)
        facts = {
            "began at": run.first["steps"],
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
