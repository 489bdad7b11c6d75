"""``cloudtrain train CONFIG --dry-run``: a run is built, and takes one step of each phase.

The data are few and synthetic, the inputs and batches tiny. Everything else is as configured: model,
optimizer, precision, reducers, schedules, which are checked for the number of samples of the data set.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from commlib.registry import options_of
from training.config.config import Config
from training.config.records import Cache, DatasetRecord, Phase, smallest_side
from training.config.reducers import AUTO
from training.config.schedules import Linear, Span
from training.datasets.synthetic import synthetic

BATCH = 2  # samples in a step of one rank, and for each part of `accumulate`
SIDE = 32  # pixels of the inputs, where the model takes so few
STEPS_GENERATED = 8  # global batches that are generated


@dataclass(frozen=True)
class Facts:
    """Properties of a data set that are known without reading it. ``samples``: to train on."""

    samples: int
    classes: int
    channels: int


KNOWN = {
    "digits": Facts(1_437, 10, 1),
    "mnist5k": Facts(4_000, 10, 1),
    "cifar10": Facts(50_000, 10, 3),
    "imagenet": Facts(1_281_167, 1000, 3),
}


def generated(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a configuration with generated data of as many samples, classes and channels.

    An unknown data set is left unchanged: validation reports it.
    """
    given = content.get("dataset")
    name = given.get("name") if isinstance(given, Mapping) else given
    if name not in KNOWN:
        return dict(content)
    facts = KNOWN[name]
    classes = given.get("classes", facts.classes) if isinstance(given, Mapping) else facts.classes
    dataset = {"name": "synthetic", "samples": facts.samples, "classes": classes, "channels": facts.channels}
    return {**content, "dataset": dataset}


def tiny(config: Config, ranks: int, output: str) -> Config:
    """Return a configuration of one step a phase, on generated data, whose run is below ``output``.

    Raises a ``ValueError`` that begins with the key where a schedule does not fit its phase.
    """
    facts = _facts(config.dataset)
    samples = facts.samples
    phases = [_tiny(config, number, samples, ranks) for number in range(len(config.phases))]
    few = max(phase.batch_size for phase in phases) * ranks * STEPS_GENERATED
    side = max(phase.input_size for phase in phases)
    options = {"classes": facts.classes, "channels": facts.channels, "side": side, "samples": few}
    options["test_samples"] = 2 * ranks
    return config.model_copy(
        update={
            "phases": phases,
            "dataset": DatasetRecord.model_validate({"name": "synthetic", **options}),
            "cache": Cache(),
            "checkpoints": None,
            "resume": "never",
            "target": None,
            "trace": None,
            "output": output,
        }
    )


def _facts(dataset: DatasetRecord) -> Facts:
    """Return the properties that generated data need; a user's own data set is loaded for that."""
    if dataset.name == "synthetic":
        given = {key: dataset.options.get(key, default) for key, default in options_of(synthetic).items()}
        return Facts(given["samples"], given["classes"], given["channels"])
    made = dataset.make()
    return Facts(len(made.manifest("training")), made.classes, made.channels)


def checked(path: str, config: Config) -> Iterator[str]:
    """Yield lines on what a dry run of a configuration has checked, and what it has not."""
    for number, phase in enumerate(config.phases, 1):
        length = f"{phase.epochs} epochs" if phase.steps is None else f"{phase.steps} steps"
        reducer = config.reducer_name(phase)
        yield (
            f"phase {number}: {length} of {phase.input_size} px, {phase.batch_size} samples a rank, "
            f"{reducer}, {config.optimizer.name}: its schedules fit, a tiny step was taken and tested"
        )
    yield "not looked at: the real samples, and the memory and time that whole batches take"
    yield f"dry run of {path}: all is built, and each phase took a step"


def _tiny(config: Config, number: int, samples: int, ranks: int) -> Phase:
    phase = config.phases[number]
    if config.reducer_name(phase) == AUTO and ranks > 1:
        raise ValueError(f"phases[{number}].reducer: expected a name in a dry run of {ranks} ranks, got auto")
    side = max(smallest_side(config.model.name), min(phase.input_size, SIDE))
    return phase.model_copy(
        update={
            "epochs": None,
            "steps": 1,
            "input_size": side,
            "kept_size": None,
            "batch_size": BATCH * config.accumulate,
            "learning_rate": _first_rate(phase, number, samples, ranks),
            "density_warmup": None,
        }
    )


def _first_rate(phase: Phase, number: int, samples: int, ranks: int) -> Linear:
    """Return the rate of the phase's first step, after a check of the whole schedule."""
    global_batch = phase.batch_size * ranks
    epoch_steps = samples // global_batch
    if epoch_steps == 0:
        raise ValueError(
            f"phases[{number}].batch_size: expected at most the {samples} training samples for all {ranks} "
            f"ranks together, got {phase.batch_size} on each"
        )
    steps = phase.steps or (phase.epochs or 0) * epoch_steps
    assert phase.learning_rate is not None  # of a resolved configuration
    try:
        rate = phase.learning_rate.resolved(Span(steps, epoch_steps, global_batch)).at(0, steps)
    except ValueError as error:
        raise ValueError(f"phases[{number}].learning_rate.{error}") from error
    return Linear(start=rate, end=rate)
