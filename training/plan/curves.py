"""The curves of a phase: learning rate and density, by their first, largest and last values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from training.config.config import Config
from training.config.records import Phase
from training.config.schedules import Span

MOST_VALUES = 10_000  # of a curve, that are looked at for its largest one


@dataclass(frozen=True)
class Curve:
    """The values of a curve over the steps of a phase.

    >>> [str(Curve.of_values(values)) for values in ([0.0, 0.4, 0.01], [0.25, 0.001], [0.1])]
    ['0 → 0.4 → 0.01', '0.25 → 0.001', '0.1']
    """

    start: float
    peak: float
    end: float

    @classmethod
    def of(cls, at: Callable[[int], float], steps: int, *more: int) -> "Curve":
        """Return the curve ``at(step)``; of many steps some are looked at, and those of ``more``."""
        seen = {*range(0, steps, -(-steps // MOST_VALUES)), *(step for step in more if 0 <= step < steps)}
        return cls.of_values(list(map(at, sorted({*seen, steps - 1}))))

    @classmethod
    def of_values(cls, values: Sequence[float]) -> "Curve":
        """Return the curve of all these values, one after the other."""
        return cls(values[0], max(values), values[-1])

    def __str__(self) -> str:
        values = [self.start, self.peak, self.end]
        kept = [each for place, each in enumerate(values) if place == 0 or each != values[place - 1]]
        return " → ".join(f"{each:.4g}" for each in kept)


def rate_of(phase: Phase, number: int, span: Span) -> Curve:
    """Return the learning rate of a phase; ``ValueError`` that begins with the key where it does not fit."""
    schedule = phase.learning_rate
    assert schedule is not None  # of a resolved configuration
    try:
        resolved = schedule.resolved(span)
    except ValueError as error:
        raise ValueError(f"phases[{number}].learning_rate.{error}") from error
    warmup = getattr(resolved, "warmup", None)
    peaks = [warmup.steps] if warmup is not None else []
    if (own := getattr(resolved, "warmup_steps", None)) is not None:
        peaks.append(own - 1)
    return Curve.of(lambda step: resolved.at(step, span.steps), span.steps, *peaks)


def densities_of(config: Config, phase: Phase, number: int, span: Span) -> list[tuple[float, int]]:
    """Return the densities of a phase's warm-up and of the rest, each with its steps.

    Raises a ``ValueError`` that begins with the key where the warm-up is longer than the phase.
    """
    last, warmup = config.density_of(phase), phase.density_warmup
    if warmup is None:
        return [(last, span.steps)]
    epochs = -(-span.steps // span.epoch_steps)
    if warmup.epochs > epochs:
        expected = f"expected at most the {epochs} of the phase"
        raise ValueError(f"phases[{number}].density_warmup.epochs: {expected}, got {warmup.epochs}")
    found, left = [], span.steps
    for density in warmup.densities(last):
        found.append((density, min(left, span.epoch_steps)))
        left -= found[-1][1]
    return [*found, *([(last, left)] if left else [])]
