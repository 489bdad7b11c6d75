"""The overhead of the training loop over a bare step: python -m benchmarks.loop."""

import sys
from collections.abc import Callable, Iterable
from itertools import islice, repeat
from typing import Any

import keras
import tensorflow as tf

from training.bench.record import Record, Seconds, against_baseline, alternate, report
from training.bench.train import endless
from training.config.config import Config
from training.run.trainer import Trainer

RUNS, QUICK_RUNS = 21, 3
STEPS, QUICK_STEPS = 8, 2  # of a run
LOOP, READING, BARE = "loop", "loop that reads", "bare step"
RESNET20 = {
    "name": "bench",
    "dataset": {"name": "synthetic", "samples": 2048, "test_samples": 64, "side": 32},
    "model": "resnet20",
    "phases": [
        {
            "steps": 1_000_000,
            "input_size": 32,
            "batch_size": 64,
            "learning_rate": {"start": 0.01, "end": 0.01},
            "augmentation": {"area": [0.5, 1.0]},
        }
    ],
    "cache": {"memory": "auto"},
    "log_every": 1_000_000,
}


def main(as_json: bool, quick: bool) -> int:
    """Print what was measured and return the exit status."""
    runs, steps = (QUICK_RUNS, QUICK_STEPS) if quick else (RUNS, STEPS)
    return report([_loop(runs, steps, quick)], as_json=as_json, show=_print)


def _loop(runs: int, steps: int, quick: bool) -> list[Record]:
    """Compare steps of a trainer with the same steps bare: on one batch, and on those that it reads."""
    with Trainer(Config.model_validate(RESNET20).resolved()) as trainer:
        trainer.begin(writes=False)
        seconds = _loop_seconds(trainer, runs, steps)
    case = {"model": "resnet20", "batch": 64, "input_size": 32, "ranks": 1, "quick": quick}
    case["unit"] = "seconds a step"
    return [_record(case, subject, BARE, seconds, steps) for subject in (LOOP, READING)]


def _loop_seconds(trainer: Any, runs: int, steps: int) -> dict[str, Seconds]:
    (phase,) = trainer.phases
    batches = endless(phase.data.training_batches)
    batch = next(batches)
    bare = bare_step(trainer, phase, batch)

    def train(batches: Iterable[Any]) -> None:
        for each in islice(batches, steps):
            trainer.train_step(phase, each)

    candidates: dict[str, Callable[[None], object]] = {
        READING: lambda _: train(batches),
        LOOP: lambda _: train(repeat(batch)),
        BARE: lambda _: [bare() for _ in range(steps)],
    }
    seconds = alternate(candidates, [None], runs)
    phase.close()
    return seconds


def _record(case: dict[str, Any], subject: str, peer: str, seconds: dict[str, Seconds], steps: int) -> Record:
    own, baseline = (seconds[name].per(steps) for name in (subject, peer))
    return Record("train", case, subject, own, peer, baseline, bytes=None)


def _print(records: list[Record]) -> None:
    notes = ["resnet20, 64 samples of 32 pixels a step, one rank"]
    against_baseline(records, "ms", 1e3, "ms", notes).print()


def bare_step(trainer: Any, phase: Any, batch: Any) -> Callable[[], None]:
    """Return a step on one batch, again and again: one graph of forward, backward and update."""
    model = keras.models.clone_model(trainer.model)
    model.set_weights(trainer.model.get_weights())
    settings = trainer.config.optimizer
    optimizer = keras.optimizers.SGD(phase.rate.at(0, phase.steps), momentum=settings.momentum)
    optimizer.build(model.trainable_variables)
    variables = [variable.value for variable in model.trainable_variables]

    @tf.function
    def step(images: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            loss = tf.reduce_mean(losses)
        optimizer.apply(tape.gradient(loss, variables), model.trainable_variables)
        return loss

    images, labels = tf.constant(batch.images), tf.constant(batch.labels)
    return lambda: float(step(images, labels))  # type: ignore[return-value]  # float() waits for the result


if __name__ == "__main__":
    sys.exit(main("--json" in sys.argv, "--quick" in sys.argv))
