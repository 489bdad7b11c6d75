"""Checks across the settings of a configuration, and warnings for settings without effect."""

from collections.abc import Iterator
from pathlib import Path

from commlib.errors import shown, suggestion
from training.config.records import AnyConfig, Phase
from training.config.reducers import AUTO, check_options, check_takes, options_of
from training.config.schema import ConfigurationError, imported, reported
from training.models import MODELS, check_model


def check(config: AnyConfig) -> None:
    """Raise a problem for settings that exclude each other: the key, the value and what was expected."""
    output = Path(config.output)
    if output.exists() and not output.is_dir():
        raise _wrong("output", "a folder, or a path that does not exist yet", config.output)
    if config.reducer.name is not None:
        check_takes(config.reducer.name, config.reducer, "reducer")
    for number, phase in enumerate(config.phases):
        place = f"phases[{number}]"
        _the_reducer_takes_what_it_is_given(config, phase, place)
        _wrappers_go_with_what_is_given(config, phase, place)
        if phase.learning_rate is None and config.learning_rate is None:
            raise ConfigurationError("missing, expected a value", key=f"{place}.learning_rate")
        if phase.momentum is not None and not hasattr(config.optimizer, "momentum"):
            expected = f"none, {config.optimizer.name} has no momentum"
            raise _wrong(f"{place}.momentum", expected, phase.momentum)
    if config.resume != "never" and config.checkpoints is None:
        raise ConfigurationError(
            f"expected never where there are no checkpoints, got {config.resume}", key="resume"
        )
    _the_task_has_what_is_given(config)
    if config.optimizer.sharded and all(config.is_sparse(phase) for phase in config.phases):
        raise ConfigurationError("expected false where no phase is dense, got true", key="optimizer.sharded")
    for number, phase in enumerate(config.phases):
        _local_steps_go_with_what_is_given(config, phase, f"phases[{number}]")


def _wrong(key: str, expected: str, got: object) -> ConfigurationError:
    return ConfigurationError(f"expected {expected}; got {got}", key=key)


def _the_reducer_takes_what_it_is_given(config: AnyConfig, phase: Phase, place: str) -> None:
    name = config.reducer_name(phase)
    check_takes(name, phase.reducer, f"{place}.reducer")
    if (known := options_of(name)) is None:  # not imported yet
        return
    if phase.density_warmup is not None and "density" not in known:
        expected = f"none, the reducer of this phase ({name}) takes no density"
        raise _wrong(f"{place}.density_warmup", expected, phase.density_warmup)
    options = config.reducer_config(phase)
    del options["name"]
    with reported(f"{place}.reducer"):  # an option without a default that nobody gives
        check_options(name, options)


def _wrappers_go_with_what_is_given(config: AnyConfig, phase: Phase, place: str) -> None:
    """Refuse momentum with momentum correction, and sparse tables, which travel apart, with any wrapper."""
    wrappers = [wrapper["name"] for wrapper in config.reducer_config(phase).get("wrappers", [])]
    if "momentum_correction" in wrappers:
        own = {"momentum": config.momentum_of(phase), "beta_1": getattr(config.optimizer, "beta_1", None)}
        for key, value in own.items():
            if value:
                key_of = f"{place}.momentum" if phase.momentum is not None else f"optimizer.{key}"
                expected = f"an optimizer without {key}, which momentum_correction has in its place"
                raise _wrong(key_of, f"{expected}: {config.optimizer.name} with momentum 0", value)
    if wrappers and config.sparse_tables:
        raise _wrong("sparse_tables", f"false where a reducer is wrapped, {place} has {wrappers[0]}", "true")


def _the_task_has_what_is_given(config: AnyConfig) -> None:
    """Check what depends on the task, unless it is not imported yet."""
    task = config.task.kind
    if task is None:
        return
    if config.normalise is not None and "normalise" not in task.takes:
        raise _wrong("normalise", f"none, {config.task.name} takes none", "one")
    if config.cache.shards > 1 and "cache.shards" not in task.takes:
        expected = f"1, {config.task.name} takes no parts of the samples"
        raise _wrong("cache.shards", expected, config.cache.shards)
    if (target := config.target) is not None:
        if (metric := task.metrics.get(target.metric)) is None:
            got = shown(target.metric) + suggestion(target.metric, task.metrics)
            known = f"one of {', '.join(task.metrics)}, the metrics of {config.task.name}"
            raise _wrong("target.metric", known, got)
        right, wrong = ("at_least", "at_most") if metric.better == "higher" else ("at_most", "at_least")
        if (value := getattr(target, wrong)) is not None:
            expected = f"{right}, since a {metric.better} {target.metric} is better"
            raise _wrong("target", expected, f"{wrong} {value}")
        if metric.share and not 0 < target.goal <= 1:
            raise ConfigurationError(f"expected a number in (0, 1], got {target.goal}", key=f"target.{right}")
    if imported(MODELS, "model", config.model.name) is not None:
        with reported("model"):
            check_model(config.model.name, config.model.options, task.signature)
    config.task.make().check(config)


def without_effect(config: AnyConfig) -> Iterator[str]:
    """Yield a warning for every setting that has no effect."""
    phases, optimizer = config.phases, config.optimizer
    for option, value in config.reducer.options.items():
        if not any(_is_taken(config, phase, option) for phase in phases):
            yield f"reducer.{option}={value} has no effect: no phase takes it from here"
    if config.profile is not None and not config.automatic:
        yield f"profile={config.profile} has no effect: no phase has reducer=auto"
    if config.reducer.name is not None and all(phase.reducer and phase.reducer.name for phase in phases):
        yield f"reducer={config.reducer.name} has no effect: every phase names its own"
    if config.learning_rate is not None and all(phase.learning_rate for phase in phases):
        yield "learning_rate has no effect: every phase names its own"
    if "momentum" in optimizer.model_fields_set and all(phase.momentum is not None for phase in phases):
        yield f"optimizer.momentum={optimizer.momentum} has no effect: every phase names its own"
    alone = all(each.local_steps and not (each.outer and each.outer.delay) for each in phases)
    if "overlap" in config.model_fields_set and config.overlap and alone:
        why = "every phase has local_steps without a delay: its exchange is after the last one"
        yield f"overlap=True has no effect: {why}"

    for number, phase in enumerate(phases):
        if phase.round_seconds is not None and phase.schedule is not None and phase.schedule.interval == 1:
            why = "the one step to an exchange is always taken"
            yield f"phases[{number}].round_seconds={phase.round_seconds} has no effect: {why}"


def _is_taken(config: AnyConfig, phase: Phase, option: str) -> bool:
    """Return whether a phase's reducer takes an option from the configuration, if that is known."""
    known = options_of(config.reducer_name(phase))
    own = phase.reducer.options if phase.reducer is not None else {}
    return option not in own and (known is None or option in known)


def _local_steps_go_with_what_is_given(config: AnyConfig, phase: Phase, place: str) -> None:
    if phase.budget is not None:
        if (name := config.reducer_name(phase)) != AUTO:
            raise _wrong(f"{place}.budget", f"none, the reducer of this phase is {name}, not auto", "one")
        if phase.local_steps is not None:
            expected = "none beside budget, for which auto chooses them"
            raise _wrong(f"{place}.local_steps", expected, phase.local_steps)
    elif phase.local_steps is None:
        for key in ("outer", "local", "round_seconds"):
            if getattr(phase, key) is not None:
                raise ConfigurationError("expected none without local_steps, got one", key=f"{place}.{key}")
        return
    with reported(f"{place}.outer"):
        _ = phase.schedule
    given = f"{place} has " + ("a budget" if phase.budget else f"local_steps={phase.local_steps}")
    if wrappers := config.reducer_config(phase).get("wrappers"):
        expected = f"none, {given} and exchanges no gradients"
        raise _wrong(f"{place}.reducer.wrappers", expected, wrappers[0]["name"])
    excluded = {
        "optimizer.sharded": config.optimizer.sharded,  # replicas have weights of their own
        "sparse_tables": config.sparse_tables,  # a difference of weights has all rows
        "average": config.average,
    }
    for key, value in excluded.items():
        if value:
            none = "false" if value is True else "none"
            raise _wrong(key, f"{none}, {given}", str(value).lower())
