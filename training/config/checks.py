"""Checks across the settings of a configuration, and warnings for settings without effect."""

from collections.abc import Callable, Iterator, Mapping

from pydantic_core import PydanticCustomError

from commlib.errors import InvalidArgument, shown, suggestion
from training.config.parts import imported
from training.config.records import AnyConfig, Phase, Target
from training.config.reducers import (
    AUTO,
    check_options,
    check_takes,
    options_of,
)
from training.config.schema import problem
from training.models import MODELS, check_model
from training.tasks.task import Metric


def check(config: AnyConfig) -> None:
    """Raise a problem for settings that exclude each other: the key, the value and what was expected."""
    _reducers_take_what_they_are_given(config)
    _momentum_is_not_counted_twice(config)
    _wrappers_have_the_whole_gradient(config)
    _phases_have_a_learning_rate(config)
    _there_is_something_to_resume(config)
    _the_task_has_what_is_given(config)
    _the_optimizer_has_what_is_given(config)
    check_local_steps(config)


def _reducers_take_what_they_are_given(config: AnyConfig) -> None:
    if config.reducer.name is not None:
        check_takes(config.reducer.name, config.reducer, "reducer")
    for number, phase in enumerate(config.phases):
        name, place = config.reducer_name(phase), f"phases[{number}]"
        known = options_of(name)
        check_takes(name, phase.reducer, f"{place}.reducer")
        if known is None:  # not imported yet
            continue
        if phase.density_warmup is not None and "density" not in known:
            expected = f"expected none, the reducer of this phase ({name}) takes no density"
            raise problem(f"{expected}; got {phase.density_warmup}", key=f"{place}.density_warmup")
        options = config.reducer_config(phase)
        del options["name"]
        try:
            check_options(name, options)
        except InvalidArgument as error:  # an option without a default that nobody gives
            raise problem(str(error), key=f"{place}.reducer") from error


def _momentum_is_not_counted_twice(config: AnyConfig) -> None:
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


def _wrappers_have_the_whole_gradient(config: AnyConfig) -> None:
    """Refuse sparse tables, which travel apart, where a wrapper takes the place of momentum or clipping."""
    for number, phase in enumerate(config.phases):
        if config.sparse_tables and (wrappers := config.reducer_config(phase).get("wrappers")):
            name = wrappers[0]["name"]
            expected = f"expected false where a reducer is wrapped, phases[{number}] has {name}"
            raise problem(f"{expected}; got true", key="sparse_tables")


def _phases_have_a_learning_rate(config: AnyConfig) -> None:
    for number, phase in enumerate(config.phases):
        if phase.learning_rate is None and config.learning_rate is None:
            raise problem("missing, expected a value", key=f"phases[{number}].learning_rate")


def _there_is_something_to_resume(config: AnyConfig) -> None:
    if config.resume != "never" and config.checkpoints is None:
        raise problem(f"expected never where there are no checkpoints, got {config.resume}", key="resume")


def _the_task_has_what_is_given(config: AnyConfig) -> None:
    """Check what depends on the task, unless it is not imported yet."""
    task = config.task.kind
    if task is None:
        return
    if config.normalise is not None and "normalise" not in task.takes:
        raise problem(f"expected none, {config.task.name} takes none; got one", key="normalise")
    if config.cache.shards > 1 and "cache.shards" not in task.takes:
        expected = f"expected 1, {config.task.name} takes no parts of the samples"
        raise problem(f"{expected}; got {config.cache.shards}", key="cache.shards")
    if config.target is not None:
        _the_target_is_a_metric(config.target, config.task.name, task.metrics)
    if imported(MODELS, "model", config.model.name) is not None:
        _raise_with_key("model", lambda: check_model(config.model.name, config.model.options, task.signature))
    _raise_with_key("", lambda: config.task.make().check(config))


def _the_target_is_a_metric(target: Target, task: str, metrics: Mapping[str, Metric]) -> None:
    if (metric := metrics.get(target.metric)) is None:
        near = suggestion(target.metric, metrics)
        expected = f"expected one of {', '.join(metrics)}, the metrics of {task}"
        raise problem(f"{expected}; got {shown(target.metric)}{near}", key="target.metric")
    right, wrong = ("at_least", "at_most") if metric.better == "higher" else ("at_most", "at_least")
    if (value := getattr(target, wrong)) is not None:
        expected = f"expected {right}, since a {metric.better} {target.metric} is better"
        raise problem(f"{expected}; got {wrong} {value}", key="target")
    if metric.share and not 0 < target.goal <= 1:
        raise problem(f"expected a number in (0, 1], got {target.goal}", key=f"target.{right}")


def _raise_with_key(key: str, function: Callable[[], None]) -> None:
    """Raise a ``ValueError`` of ``function`` as a problem of ``key``; without one, its line has the key."""
    try:
        function()
    except PydanticCustomError:
        raise
    except ValueError as error:
        raise problem(str(error), key=key) from error


def _the_optimizer_has_what_is_given(config: AnyConfig) -> None:
    for number, phase in enumerate(config.phases):
        if phase.momentum is not None and not hasattr(config.optimizer, "momentum"):
            raise problem(
                f"expected none, {config.optimizer.name} has no momentum; got {phase.momentum}",
                key=f"phases[{number}].momentum",
            )
    if config.optimizer.sharded and all(config.is_sparse(phase) for phase in config.phases):
        raise problem("expected false where no phase is dense, got true", key="optimizer.sharded")


def without_effect(config: AnyConfig) -> Iterator[str]:
    """Yield a line for every setting that no phase takes."""
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
        momentum = getattr(optimizer, "momentum", None)
        yield f"optimizer.momentum={momentum} has no effect: every phase names its own"
    yield from local_steps_without_effect(config)


def _is_taken(config: AnyConfig, phase: Phase, option: str) -> bool:
    """Return whether a phase's reducer takes an option from the configuration, if that is known."""
    known = options_of(config.reducer_name(phase))
    own = phase.reducer.options if phase.reducer is not None else {}
    return option not in own and (known is None or option in known)


def check_local_steps(config: AnyConfig) -> None:
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


def _the_budget_is_for_auto(config: AnyConfig, phase: Phase, place: str) -> None:
    if (name := config.reducer_name(phase)) != AUTO:
        raise problem(
            f"expected none, the reducer of this phase is {name}, not auto; got one", key=f"{place}.budget"
        )
    if phase.local_steps is not None:
        expected = "expected none beside budget, for which auto chooses them"
        raise problem(f"{expected}; got {phase.local_steps}", key=f"{place}.local_steps")


def _excluded(config: AnyConfig) -> dict[str, bool | float | None]:
    """Return the settings that do not go with local steps, by key."""
    return {
        "optimizer.sharded": config.optimizer.sharded,  # replicas have weights of their own
        "sparse_tables": config.sparse_tables,  # a difference of weights has all rows
        "average": config.average,
    }


def local_steps_without_effect(config: AnyConfig) -> Iterator[str]:
    """Yield a line for what local steps leave without an effect."""
    if "overlap" in config.model_fields_set and config.overlap and all(p.local_steps for p in config.phases):
        yield "overlap=True has no effect: every phase has local_steps, whose exchange is after the last one"
