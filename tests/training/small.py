"""Small runs for tests, in one process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from commlib import RanksDisagree, Topology
from commlib.transport import simulated
from tests.launching import DIGITS
from training import Trainer
from training.config.config import load
from training.models.images import image_input

ALONE = ("ranks_per_node=null", "cache={}", "reducer=dense")
LINEAR = "model=tests.training.small:linear"
RATE = "learning_rate: {start: 0.1, end: 0.1}"


def linear(channels: int, classes: int, *, normalised: bool = False) -> keras.Model:
    """Return one layer, from the four means of the quarters of an image: its gradient has a closed form."""
    images, x = image_input(channels, normalised=normalised)
    x = layers.Flatten()(layers.Resizing(2, 2, interpolation="area")(x))
    return keras.Model(images, layers.Dense(classes, dtype="float32", name="logits")(x), name="linear")


linear.smallest_side = 2  # type: ignore[attr-defined]


def phase(*, size: int = 4, batch: int = 64, rate: str = RATE, **others: Any) -> str:
    given = [f"{key}: {value}" for key, value in others.items()]
    return f"{{input_size: {size}, batch_size: {batch}, {', '.join([rate, *given])}}}"


def trainer(folder: Path, *words: str, phases: tuple[str, ...] = (phase(steps=4),)) -> Trainer:
    """Return a trainer of the linear model on the digits, whose runs are in ``folder``."""
    keras.utils.clear_session()
    lists = f"phases=[{', '.join(phases)}]"
    return Trainer(load(DIGITS, [*ALONE, LINEAR, lists, f"output={folder}", *words]))


def on_ranks(
    folder: Path, ranks: int, *words: str, phases: tuple[str, ...], prepare: Callable[[Trainer], None]
) -> list[tuple[Trainer, RanksDisagree | None]]:
    """Train on simulated ranks, two a node; return what each ends with."""
    keras.utils.clear_session()
    lists = f"phases=[{', '.join(phases)}]"
    config = load(DIGITS, [*ALONE, LINEAR, lists, f"output={folder}", *words])

    def body(comm: Any) -> tuple[Trainer, RanksDisagree | None]:
        run = Trainer(config, topology=Topology(comm, ranks_per_node=2))
        prepare(run)
        try:
            run.fit()
        except RanksDisagree as error:
            return run, error
        return run, None

    return simulated.run(body, ranks)


def assert_same_weights(one: Trainer, other: Trainer) -> None:
    """Expect two runs to have ended with weights that are equal in every bit."""
    for found, expected in zip(one.model.weights, other.model.weights, strict=True):
        np.testing.assert_array_equal(found.numpy(), expected.numpy())


def settle(run: Trainer) -> None:
    """Wait for the checkpoint that a run is writing: what a test then leaves is as if that had been quick."""
    if run.checkpointer is not None:
        run.checkpointer._checkpoints.finish()


def before_steps(run: Trainer, function: Callable[..., object]) -> None:
    """Call a function with what each step of a run is given, before that."""
    step = run.parts.step.take

    def take(*arguments: Any) -> Any:
        function(*arguments)
        return step(*arguments)

    run.parts.step.take = take


def crash_after(run: Trainer, steps: int) -> None:
    """Train until a run has made so many steps, and its checkpoint is written; then it raises an error."""

    def fail(*arguments: Any) -> None:
        if run.position.steps == steps:
            settle(run)
            raise RuntimeError("a crash")

    before_steps(run, fail)
    with pytest.raises(RuntimeError, match="a crash"):
        run.fit()


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    (run,) = Path(folder).iterdir()
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def records_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in metrics_of(folder) if line["kind"] == kind]
