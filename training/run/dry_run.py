"""``cloudtrain train CONFIG --dry-run``: a run is built, and takes one step of each phase.

The data are few and synthetic, the inputs and batches tiny. Everything else is as configured: model,
optimizer, precision, reducers, schedules, which are checked for the number of samples of the data set.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from training.config.config import Config
from training.config.records import Cache, Phase
from training.config.reducers import AUTO
from training.config.schedules import Linear, Schedule, Span
from training.datasets.synthetic import STAND_INS
from training.tasks.task import EpochSize


def generated(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's keys, its data set replaced by a generated one of its kind, if any."""
    given = content.get("dataset")
    keys = given if isinstance(given, Mapping) else {"name": given}
    name = keys.get("name")
    if not isinstance(name, str) or name not in STAND_INS:
        return dict(content)
    return {**content, "dataset": STAND_INS[name](keys)}


def tiny(config: Config, ranks: int, output: str) -> Config:
    """Return a configuration of one step a phase, on few samples, whose run is below ``output``.

    Raises a ``ValueError`` that begins with the key where a schedule does not fit its phase.
    """
    few = config.task.make().tiny(config, ranks)
    return config.model_copy(
        update={
            "phases": [
                _tiny(config, number, phase, epoch, ranks)
                for number, (phase, epoch) in enumerate(zip(few.phases, few.epochs, strict=True))
            ],
            "dataset": few.dataset,
            "cache": Cache(),
            "checkpoints": None,
            "resume": "never",
            "target": None,
            "trace": None,
            "metrics_port": None,
            "output": output,
        }
    )


def checked(path: str, config: Config) -> Iterator[str]:
    """Yield lines on what a dry run of a configuration has checked, and what it has not."""
    task = config.task.make()
    for number, phase in enumerate(config.phases, 1):
        length = f"{phase.epochs} epochs" if phase.steps is None else f"{phase.steps} steps"
        reducer = config.reducer_name(phase)
        yield (
            f"phase {number}: {length} of {task.describe(phase)}, {task.describe_batch(phase)} a rank, "
            f"{reducer}, {config.optimizer.name}: its schedules fit, a tiny step was taken and tested"
        )
    yield "not looked at: the real samples, and the memory and time that whole batches take"
    yield f"dry run of {path}: all is built, and each phase took a step"


def resolved_rate(number: int, phase: Phase, span: Span) -> Schedule:
    """Return the learning rate of phase ``number``.

    ``ValueError``, key first, where it does not fit, or the warm-up of the density is longer than the phase.
    """
    assert phase.learning_rate is not None  # of a resolved configuration
    try:
        rate = phase.learning_rate.resolved(span)
    except ValueError as error:
        raise ValueError(f"phases[{number}].learning_rate.{error}") from error
    warmup = phase.density_warmup
    if warmup is not None and warmup.epochs > span.epochs:
        expected = f"expected at most the {span.epochs} of the phase, got {warmup.epochs}"
        raise ValueError(f"phases[{number}].density_warmup.epochs: {expected}")
    return rate


def _tiny(config: Config, number: int, phase: Phase, epoch: EpochSize, ranks: int) -> Phase:
    """Return one step of a phase, after a check of the whole of its schedule."""
    if config.reducer_name(phase) == AUTO and ranks > 1:
        raise ValueError(f"phases[{number}].reducer: expected a name in a dry run of {ranks} ranks, got auto")
    span = phase.span_of(epoch.steps, epoch.global_batch)
    rate = resolved_rate(number, phase, span).at(0, span.steps)
    once = {"epochs": None, "steps": 1, "density_warmup": None}
    return phase.model_copy(update={**once, "learning_rate": Linear(start=rate, end=rate)})
