"""Schedules of learning rate and momentum over the steps of a phase, and the density warm-up.

A schedule gives the value of step ``step`` (from 0) of ``steps``. Values are Python floats (float64), and the
first and the last one are exact.
"""

import itertools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, SerializeAsAny, model_validator

from commlib.density import exponential
from commlib.errors import shown
from training.config.schema import (
    ConfigurationError,
    Count,
    Density,
    Momentum,
    Positive,
    Rate,
    Record,
    Share,
    is_number,
    one_of,
    record_in,
)


@dataclass(frozen=True)
class Span:
    """The steps that the schedules of a phase run over.

    ``epoch_steps``: of a pass over the training samples; ``global_batch``: samples in a step, of all ranks.
    """

    steps: int
    epoch_steps: int
    global_batch: int

    @property
    def epochs(self) -> int:
        """Return the epochs; one that is begun counts."""
        return -(-self.steps // self.epoch_steps)


def linear(step: int, steps: int, start: float, end: float) -> float:
    """Return a straight line from ``start`` in the first step to ``end`` in the last.

    >>> [linear(step, 5, 1.0, 0.0) for step in range(5)]
    [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if 0 < step == steps - 1:
        return end  # the formula may differ by a rounding error
    return start + (end - start) * step / max(1, steps - 1)


def _blend(start: float, end: float, share: float) -> float:
    """Both ends are exact, which ``start + (end - start) * share`` is not; and so is what does not change."""
    return start if start == end else start * (1 - share) + end * share


class Warmup(Record):
    """A straight line from ``start`` to the first value of the schedule, which the step after it has."""

    start: Rate
    """Not scaled by ``per_batch``: a rate that is safe for one small batch is safe to begin with."""
    steps: Count | None = None
    """Steps of the warm-up."""
    epochs: Positive | None = None
    """Instead of steps; parts of one, too."""

    @model_validator(mode="after")
    def _has_one_length(self) -> "Warmup":
        one_of(self, ("steps", "epochs"))
        return self

    def resolved(self, span: Span) -> "Warmup":
        """Return the same in steps; it must leave the schedule a step."""
        key, given = one_of(self, ("steps", "epochs"))
        steps = given if key == "steps" else max(1, round(given * span.epoch_steps))
        if steps >= span.steps:
            raise ValueError(
                f"warmup.{key}: expected fewer than the {span.steps} steps of the phase, "
                f"got {given:g} ({steps} steps)"
            )
        return Warmup(start=self.start, steps=steps)


class Schedule(Record, ABC):
    """A learning rate over the steps of a phase."""

    rates: ClassVar[tuple[str, ...]] = ("start", "end")  # the keys that ``per_batch`` scales

    schedule: str
    """A name of ``SCHEDULES``."""
    per_batch: Count | None = None
    """The rate is for so many samples a step, and is scaled linearly with the global batch size."""

    def at(self, step: int, steps: int) -> float:
        """Return the rate of a step; one with ``epochs``, shares or ``per_batch`` is ``resolved`` before."""
        assert self.per_batch is None, "resolve the schedule first"
        assert 0 <= step < steps, f"step {step} of {steps}"
        return self._at(step, steps)

    @abstractmethod
    def _at(self, step: int, steps: int) -> float:
        """Return the rate of a resolved schedule."""

    def resolved(self, span: Span) -> "Schedule":
        """Return the schedule over ``span``, in steps; ``ValueError``, key first, if it does not fit."""
        factor = 1.0 if self.per_batch is None else span.global_batch / self.per_batch
        scaled = {name: getattr(self, name) * factor for name in self.rates}
        return self.model_copy(update={"per_batch": None, **scaled, **self._in_steps(span)})

    def _in_steps(self, span: Span) -> dict[str, Any]:
        """Return the keys in epochs or shares, in steps."""
        return {}


class _Warmed(Schedule):
    """A schedule that a warm-up may come before."""

    start: Rate
    """The first rate, after the warm-up."""
    warmup: Warmup | None = None
    """Its steps are the first ones of the phase; the schedule has the rest."""

    def _at(self, step: int, steps: int) -> float:
        if self.warmup is None:
            return self._after(0, step, steps)
        first = self.warmup.steps
        assert first is not None, "resolve the schedule first"
        if step < first:
            return linear(step, first + 1, self.warmup.start, self.start)
        return self._after(first, step, steps)

    @abstractmethod
    def _after(self, first: int, step: int, steps: int) -> float:
        """Return the rate of ``step``, where ``first`` is the first one that is not warm-up."""

    def _in_steps(self, span: Span) -> dict[str, Any]:
        return {"warmup": None if self.warmup is None else self.warmup.resolved(span)}


class _Line(_Warmed):
    """A schedule from a first to a last rate."""

    end: Rate
    """The rate of the last step."""


class Linear(_Line):
    """A straight line from ``start`` to ``end``; a number alone is both of them."""

    schedule: Literal["linear"] = "linear"

    def _after(self, first: int, step: int, steps: int) -> float:
        return linear(step - first, steps - first, self.start, self.end)


class Cosine(_Line):
    """Half a cosine wave from ``start`` to ``end``, flat at both (SGDR, equation 5, one period)."""

    schedule: Literal["cosine"] = "cosine"

    def _after(self, first: int, step: int, steps: int) -> float:
        share = (1 - math.cos(math.pi * (step - first) / max(1, steps - first - 1))) / 2
        return _blend(self.start, self.end, share)


class Polynomial(_Line):
    """From ``start`` to ``end`` as a power of the share of the phase that is left.

    With ``t`` from 0 in the first step to 1 in the last: ``end + (start − end)·(1 − t)^power``.
    """

    schedule: Literal["polynomial"] = "polynomial"
    power: Positive
    """1 is a straight line."""

    def _after(self, first: int, step: int, steps: int) -> float:
        left = 1 - (step - first) / max(1, steps - first - 1)
        return _blend(self.start, self.end, 1 - left**self.power)


PLACES = ("at_epochs", "at_steps", "at_shares")


class Drops(_Warmed):
    """``start``, and ``factor`` times as much from each of the places on.

    Give one of ``at_epochs``, ``at_steps`` and ``at_shares``; all count from the beginning of the phase, with
    its warm-up.
    """

    rates: ClassVar[tuple[str, ...]] = ("start",)

    schedule: Literal["step"] = "step"
    factor: Share
    """What the rate is multiplied by at each place."""
    at_epochs: list[Positive] | None = None
    """Places in epochs."""
    at_steps: list[Count] | None = None
    """Places in steps."""
    at_shares: list[Share] | None = None
    """Places as shares of the steps of the phase."""

    @model_validator(mode="after")
    def _has_places_in_order(self) -> "Drops":
        key, places = one_of(self, PLACES)
        if not places or any(after <= before for before, after in itertools.pairwise(places)):
            raise ConfigurationError(
                f"expected one place or more, each after the one before, got {places}", key=key
            )
        return self

    def _after(self, first: int, step: int, steps: int) -> float:
        assert self.at_steps is not None, "resolve the schedule first"
        return self.start * self.factor ** sum(step >= place for place in self.at_steps)

    def _in_steps(self, span: Span) -> dict[str, Any]:
        changes = super()._in_steps(span)
        warmup = changes["warmup"]
        first = 1 if warmup is None else warmup.steps
        key, given = one_of(self, PLACES)
        unit = {"at_epochs": span.epoch_steps, "at_steps": 1, "at_shares": span.steps}[key]
        places = [round(place * unit) for place in given]
        if places[0] < first or places[-1] >= span.steps:
            raise ValueError(
                f"{key}: expected places in the steps {first} to {span.steps - 1} of the phase, "
                f"got {given} (steps {places})"
            )
        return changes | {"at_epochs": None, "at_shares": None, "at_steps": places}


class Noam(Schedule):
    """The rate of "Attention Is All You Need" (section 5.3), with a warm-up of its own.

    ``scale · model_size^−½ · min(s^−½, s · warmup_steps^−³ᐟ²)`` in step ``s``, from 1.
    """

    rates: ClassVar[tuple[str, ...]] = ("scale",)

    schedule: Literal["noam"] = "noam"
    scale: Rate
    """What the paper's rate is multiplied by."""
    warmup_steps: Count
    """Steps in which the rate rises."""
    model_size: Count
    """Width of the model's vectors."""

    def _at(self, step: int, steps: int) -> float:
        one = step + 1
        return float(self.scale * self.model_size**-0.5 * min(one**-0.5, one * self.warmup_steps**-1.5))


SCHEDULES: dict[str, type[Schedule]] = dict(
    linear=Linear, cosine=Cosine, step=Drops, polynomial=Polynomial, noam=Noam
)


def _constant(value: Any) -> Any:
    return Linear(start=value, end=value) if is_number(value) and value >= 0 else value


LearningRate = Annotated[
    SerializeAsAny[Schedule],
    record_in(
        SCHEDULES,
        "schedule",
        "linear",
        "a number from 0, or the keys start and end",
        key="schedule",
        short=_constant,
    ),
]


class MomentumLine(Record):
    """A straight line from ``start`` to ``end`` over the steps of the phase."""

    start: Momentum
    """Momentum of the first step."""
    end: Momentum
    """Momentum of the last step."""


def _number_or_line(value: Any) -> float | MomentumLine:
    if isinstance(value, (dict, MomentumLine)):
        return MomentumLine.model_validate(value)
    if not is_number(value) or not 0 <= value < 1:
        raise ConfigurationError(
            f"expected a number in [0, 1), or the keys start and end, got {shown(value)}"
        )
    return float(value)


MomentumSchedule = Annotated[float | MomentumLine, BeforeValidator(_number_or_line)]


def momentum_at(momentum: float | MomentumLine, step: int, steps: int) -> float:
    """Return the momentum of step ``step`` of ``steps``."""
    if isinstance(momentum, MomentumLine):
        return linear(step, steps, momentum.start, momentum.end)
    return momentum


class DensityWarmup(Record):
    """Densities of the first epochs: from ``start`` in equal ratios to the phase's own (DGC, section 3.3)."""

    start: Density
    """Density of the first epoch."""
    epochs: Count
    """Epochs before the phase's own density."""

    def densities(self, last: float) -> tuple[float, ...]:
        """Return one an epoch; ``last`` is that of the epochs after them."""
        return exponential(self.start, last, self.epochs)
