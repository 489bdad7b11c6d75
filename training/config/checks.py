"""Checks across the settings of a configuration, and warnings for settings without effect."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from commlib.errors import InvalidArgument, UnknownName, shown
from training.config.records import smallest_side
from training.config.reducers import (
    AUTO,
    DEFAULT_REDUCER,
    REDUCER_KEYS,
    check_options,
    check_takes,
    options_of,
)
from training.config.schema import problem

if TYPE_CHECKING:
    from training.config.config import Config
    from training.config.records import Phase


def check(config: "Config") -> None:
    """Raise a problem for settings that exclude each other: the key, the value and what was expected."""
    _reducers_take_what_they_are_given(config)
    _momentum_is_not_counted_twice(config)
    _phases_have_a_learning_rate(config)
    _nothing_is_given_that_auto_picks(config)
    _there_is_something_to_resume(config)
    _images_are_large_enough(config)
    _parts_are_whole(config)
    _the_optimizer_has_what_is_given(config)


def _reducers_take_what_they_are_given(config: "Config") -> None:
    check_takes(config.reducer.name or DEFAULT_REDUCER, config.reducer, "reducer")
    for number, phase in enumerate(config.phases):
        name, place = config.reducer_name(phase), f"phases[{number}]"
        known = options_of(name)
        check_takes(name, phase.reducer, f"{place}.reducer")
        if known is None:  # not imported yet
            continue
        for key in (*REDUCER_KEYS, "density_warmup"):
            value, needed = getattr(phase, key), key.removesuffix("_warmup")
            if value is not None and needed not in known:
                does = "picks its own" if name == AUTO else f"takes no {needed}"
                expected = f"expected none, the reducer of this phase ({name}) {does}"
                raise problem(f"{expected}; got {value}", key=f"{place}.{key}")
        _values_are_right(config, number)


def _values_are_right(config: "Config", number: int) -> None:
    """Raise a problem that names the key by which a value was given that the reducer of a phase refuses."""
    phase = config.phases[number]
    options = config.reducer_config(phase)
    name = options.pop("name")
    try:
        check_options(name, options)
    except (InvalidArgument, UnknownName) as error:
        option, _, rest = str(error).partition(": ")
        if option in phase.options_given:
            raise problem(rest, key=f"phases[{number}].{phase.place_of(option)}") from error
        if option in config.options_given:
            raise problem(rest, key=config.place_of(option)) from error
        if "wrappers" in options and option not in options:
            giver = phase if "wrappers" in phase.options_given else config
            place = f"phases[{number}]." if giver is phase else ""
            raise problem(str(error), key=f"{place}reducer.wrappers") from error
        raise problem(str(error), key=f"phases[{number}].reducer") from error
    except TypeError as error:  # such as a list where a name is expected
        raise problem(
            f"expected values that {name} takes, got {shown(options)}: {error}",
            key=f"phases[{number}].reducer",
        ) from error


def _momentum_is_not_counted_twice(config: "Config") -> None:
    """Refuse momentum correction where the optimizer has a momentum of its own."""
    for number, phase in enumerate(config.phases):
        wrappers = config.reducer_config(phase).get("wrappers", [])
        if not any(wrapper["name"] == "momentum_correction" for wrapper in wrappers):
            continue
        own = {"momentum": config.momentum_of(phase), "beta_1": getattr(config.optimizer, "beta_1", None)}
        for key, value in own.items():
            if value:
                raise problem(
                    f"expected an optimizer without {key}, which momentum_correction has in its place: "
                    f"{config.optimizer.name} with momentum 0; got {value}",
                    key=f"phases[{number}].momentum" if phase.momentum is not None else f"optimizer.{key}",
                )


def _phases_have_a_learning_rate(config: "Config") -> None:
    for number, phase in enumerate(config.phases):
        if phase.learning_rate is None and config.learning_rate is None:
            raise problem("missing, expected a value", key=f"phases[{number}].learning_rate")


def _nothing_is_given_that_auto_picks(config: "Config") -> None:
    if all(phase.reducer and phase.reducer.name for phase in config.phases) or config.reducer.name != AUTO:
        return
    for option in ("selector", "wire"):
        if (value := getattr(config, option)) is not None:
            raise problem(f"expected none, reducer=auto picks its own; got {value}", key=option)


def _there_is_something_to_resume(config: "Config") -> None:
    if config.resume != "never" and config.checkpoints is None:
        raise problem(f"expected never where there are no checkpoints, got {config.resume}", key="resume")


def _images_are_large_enough(config: "Config") -> None:
    least = smallest_side(config.model.name)
    for number, phase in enumerate(config.phases):
        if phase.input_size < least:
            expected = f"at least the {least} pixels that {config.model.name} needs"
            raise problem(f"expected {expected}, got {phase.input_size}", key=f"phases[{number}].input_size")


def _parts_are_whole(config: "Config") -> None:
    for number, phase in enumerate(config.phases):
        if phase.batch_size % config.accumulate:
            expected = f"a divisor of phases[{number}].batch_size = {phase.batch_size}"
            raise problem(f"expected {expected}, got {config.accumulate}", key="accumulate")


def _the_optimizer_has_what_is_given(config: "Config") -> None:
    for number, phase in enumerate(config.phases):
        if phase.momentum is not None and not hasattr(config.optimizer, "momentum"):
            raise problem(
                f"expected none, {config.optimizer.name} has no momentum; got {phase.momentum}",
                key=f"phases[{number}].momentum",
            )
    if config.optimizer.sharded and all(config.is_sparse(phase) for phase in config.phases):
        raise problem("expected false where no phase is dense, got true", key="optimizer.sharded")


def without_effect(config: "Config") -> Iterator[str]:
    """Yield a line for every setting that no phase takes."""
    phases, optimizer = config.phases, config.optimizer
    for option, value in config.options_given.items():
        if not any(_is_taken(config, phase, option) for phase in phases):
            yield f"{config.place_of(option)}={value} has no effect: no phase takes it from here"
    if config.profile is not None and not config.automatic:
        yield f"profile={config.profile} has no effect: no phase has reducer=auto"
    if "reducer" in config.model_fields_set and all(phase.reducer and phase.reducer.name for phase in phases):
        yield f"reducer={config.reducer.name} has no effect: every phase names its own"
    if config.learning_rate is not None and all(phase.learning_rate for phase in phases):
        yield "learning_rate has no effect: every phase names its own"
    if "momentum" in optimizer.model_fields_set and all(phase.momentum is not None for phase in phases):
        momentum = getattr(optimizer, "momentum", None)
        yield f"optimizer.momentum={momentum} has no effect: every phase names its own"


def _is_taken(config: "Config", phase: "Phase", option: str) -> bool:
    """Return whether a phase's reducer takes an option from the configuration, if that is known."""
    known = options_of(config.reducer_name(phase))
    return option not in phase.options_given and (known is None or option in known)
