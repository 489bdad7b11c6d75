"""Local steps of a phase: the record of its outer optimizer, and what goes with them and what does not."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import model_validator

from training.config.reducers import AUTO
from training.config.schema import Momentum, Positive, Record, problem

if TYPE_CHECKING:
    from training.config.config import Config
    from training.config.records import Phase


class Outer(Record):
    """The outer optimizer, which moves the common weights by the mean difference of a round.

    At the defaults the common weights become the mean of all replicas' weights.
    """

    optimizer: Literal["sgd"] = "sgd"
    """Gradient descent, with the mean difference in place of a gradient."""
    rate: Positive = 1.0
    """Times the mean difference is subtracted from the common weights."""
    momentum: Momentum = 0.0
    """Share of the last round's velocity that is added to the next."""
    nesterov: bool = False
    """Whether the weights are moved by Nesterov's momentum."""

    @model_validator(mode="after")
    def _nesterov_has_a_momentum(self) -> "Outer":
        if self.nesterov and not self.momentum:
            raise problem("expected false where momentum is 0, got true", key="nesterov")
        return self


class Budget(Record):
    """What a rank may send on average: ``auto`` chooses reducer, codec and local steps for it."""

    mbit_per_second: Positive
    """Of a rank, between nodes where there are several; the time of exchanges is not counted."""
    step_seconds: Positive
    """How long a local step takes."""

    @property
    def bytes_per_step(self) -> float:
        """Return the bytes that a rank may send in an average step."""
        return self.mbit_per_second * 1e6 / 8 * self.step_seconds


def check_local_steps(config: "Config") -> None:
    """Raise a problem for settings that exclude local steps, or that need them."""
    for number, phase in enumerate(config.phases):
        place = f"phases[{number}]"
        if phase.budget is not None:
            _the_budget_is_for_auto(config, phase, place)
        elif phase.local_steps is None:
            for key in ("outer", "local"):
                if getattr(phase, key) is not None:
                    raise problem("expected none without local_steps, got one", key=f"{place}.{key}")
            continue
        given = f"{place} has " + ("a budget" if phase.budget else f"local_steps={phase.local_steps}")
        if wrappers := config.reducer_config(phase).get("wrappers"):
            expected = f"expected none, {given} and exchanges no gradients"
            raise problem(f"{expected}; got {wrappers[0]['name']}", key=f"{place}.reducer.wrappers")
        for key, excluded in _excluded(config).items():
            if excluded:
                none = "false" if excluded is True else "none"
                got = str(excluded).lower()
                raise problem(f"expected {none}, {given}; got {got}", key=key)


def _the_budget_is_for_auto(config: "Config", phase: "Phase", place: str) -> None:
    if (name := config.reducer_name(phase)) != AUTO:
        raise problem(
            f"expected none, the reducer of this phase is {name}, not auto; got one", key=f"{place}.budget"
        )
    if phase.local_steps is not None:
        expected = "expected none beside budget, for which auto chooses them"
        raise problem(f"{expected}; got {phase.local_steps}", key=f"{place}.local_steps")


def _excluded(config: "Config") -> dict[str, bool | float | None]:
    """Return the settings that do not go with local steps, by key."""
    return {
        "optimizer.sharded": config.optimizer.sharded,  # replicas have weights of their own
        "sparse_tables": config.sparse_tables,  # a difference of weights has all rows
        "average": config.average,
    }


def local_steps_without_effect(config: "Config") -> Iterator[str]:
    """Yield a line for what local steps leave without an effect."""
    if "overlap" in config.model_fields_set and config.overlap and all(p.local_steps for p in config.phases):
        yield "overlap=True has no effect: every phase has local_steps, whose exchange is after the last one"
