"""The schema of ``configs/*.yaml``, and how a file and ``key=value`` words become a checked configuration.

Everything wrong is a :class:`ConfigurationError` of one line that names the key, the value and what was
expected. Command line comes before file comes before default.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BeforeValidator,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from commlib import REDUCERS
from commlib.errors import one_line
from commlib.reducers import reducer_options
from commlib.tuning.tuner import Choice
from training.config.bounded_yaml import Unreadable
from training.config.includes import read
from training.config.optimizers import AnyOptimizer, Sgd
from training.config.overrides import put
from training.config.records import (
    AUTO,
    DEFAULT_DENSITY,
    REDUCER_KEYS,
    Cache,
    Checkpointing,
    CodecName,
    DatasetRecord,
    DawnBenchEntry,
    FileName,
    Layout,
    ModelName,
    Normalise,
    Part,
    Phase,
    Phases,
    ReducerName,
    Seed,
    SelectorName,
    Target,
    Transport,
    named,
    options_of,
)
from training.config.references import resolve
from training.config.schedules import LearningRate, MomentumLine
from training.config.schema import (
    ConfigurationError,
    Count,
    Density,
    Positive,
    Record,
    describe,
    problem,
)
from training.config.secrets import in_clear, mask
from training.config.shipped import located
from training.models import MODELS


class Config(Record):
    """A training run."""

    name: FileName
    """What the run's folder is called, before its time."""
    dataset: Annotated[DatasetRecord, BeforeValidator(named)]
    """A name of ``training.datasets.DATASETS``; where more is to be said, ``name``, ``path`` and options."""
    model: ModelName
    """A name of ``training.models.MODELS``."""
    phases: Phases
    """One after the other; what a reducer holds back goes into the next one's first step."""
    learning_rate: LearningRate | None = None
    """For the phases that name none."""
    seed: Seed = 1
    """Of the first weights and of the order of samples."""
    optimizer: AnyOptimizer = Sgd()
    """A name of ``training.config.optimizers.OPTIMIZERS``, or ``name`` and its settings."""
    precision: Literal["float32", "float16", "bfloat16"] = "float32"
    """What the model computes in; weights and gradients are float32. float16 scales the loss."""
    normalise: Normalise | None = None
    """Without it inputs are levels, and the model brings them to −1 … 1."""
    accumulate: Count = 1
    """Parts in which a rank computes the gradient of a batch, one after the other."""
    clip_norm: Positive | None = None
    """Norm that the mean gradient is scaled down to where it is larger."""
    average: Part | None = None
    """Momentum of a moving average of the weights, which is what is tested."""
    evaluate_every: Count = 1
    """Epochs; the last one of a phase is always tested."""
    checkpoints: Checkpointing | None = None
    deterministic: bool = True
    """Only operations that give the same bits each time; without it a resumed run is another to the bit."""
    resume: str = "never"
    """``auto``: go on with the last run of this name that did not end; a run's folder: with that one."""
    target: Target | None = None
    """What ends the run when it is reached; ``dawnbench.tsv`` and ``dawnbench.json`` are written then."""
    dawnbench: DawnBenchEntry = DawnBenchEntry()
    ranks_per_node: Layout = None
    """Emulates nodes: ranks on each, or a list of them. Without it, nodes are told apart by host name."""
    reducer: ReducerName = "dense"
    """For the phases that name none, as the three below; where nobody names those, a reducer has its own."""
    density: Density | None = None
    selector: SelectorName | None = None
    wire: CodecName | None = None
    transport: Transport = "auto"
    """``nccl``: gradients stay on GPUs; ``nccl+mpi``: but go through host memory between nodes; ``mpi``:
    always through host memory. ``auto``: ``nccl`` where each rank has a GPU for it, else ``mpi``."""
    verify: bool = False
    """Whether a 64-bit digest checks every message between ranks, to find hardware that alters data."""
    cache: Cache = Cache()
    profile: str | None = None
    """The file from which ``auto`` chooses; without it, where ``cloudtrain tune`` puts that of such ranks."""
    log_every: Count = 10
    """Steps between two lines of ``metrics.jsonl``."""
    output: str = "runs"
    """The folder in which the run makes its own."""

    @model_validator(mode="after")
    def _phase_settings_have_an_effect(self) -> "Config":
        for number, phase in enumerate(self.phases):
            name = phase.reducer or self.reducer
            for option in (*REDUCER_KEYS, "density_warmup"):
                value, needed = getattr(phase, option), option.removesuffix("_warmup")
                if value is not None and needed not in options_of(name):
                    does = "picks its own" if name == AUTO else f"takes no {needed}"
                    raise problem(
                        f"expected none, the reducer of this phase ({name}) {does}; got {value}",
                        key=f"phases[{number}].{option}",
                    )
        return self

    @model_validator(mode="after")
    def _phases_have_a_learning_rate(self) -> "Config":
        for number, phase in enumerate(self.phases):
            if phase.learning_rate is None and self.learning_rate is None:
                raise problem("missing, expected a value", key=f"phases[{number}].learning_rate")
        return self

    @model_validator(mode="after")
    def _nothing_is_given_that_auto_picks(self) -> "Config":
        if self.reducer != AUTO or all(phase.reducer for phase in self.phases):
            return self
        for option in ("selector", "wire"):
            if (value := getattr(self, option)) is not None:
                raise problem(f"expected none, reducer=auto picks its own; got {value}", key=option)
        return self

    @model_validator(mode="after")
    def _there_is_something_to_resume(self) -> "Config":
        if self.resume != "never" and self.checkpoints is None:
            raise problem(f"expected never where there are no checkpoints, got {self.resume}", key="resume")
        return self

    @model_validator(mode="after")
    def _images_are_large_enough(self) -> "Config":
        least = MODELS[self.model].smallest_side
        for number, phase in enumerate(self.phases):
            if phase.input_size < least:
                expected = f"at least the {least} pixels that {self.model} needs"
                raise problem(
                    f"expected {expected}, got {phase.input_size}", key=f"phases[{number}].input_size"
                )
        return self

    @model_validator(mode="after")
    def _parts_are_whole(self) -> "Config":
        for number, phase in enumerate(self.phases):
            if phase.batch_size % self.accumulate:
                expected = f"a divisor of phases[{number}].batch_size = {phase.batch_size}"
                raise problem(f"expected {expected}, got {self.accumulate}", key="accumulate")
        return self

    @model_validator(mode="after")
    def _the_optimizer_has_what_is_given(self) -> "Config":
        for number, phase in enumerate(self.phases):
            if phase.momentum is not None and not hasattr(self.optimizer, "momentum"):
                raise problem(
                    f"expected none, {self.optimizer.name} has no momentum; got {phase.momentum}",
                    key=f"phases[{number}].momentum",
                )
        if self.optimizer.sharded and not any(self.is_dense(phase) for phase in self.phases):
            raise problem("expected false where no phase is dense, got true", key="optimizer.sharded")
        return self

    def is_dense(self, phase: Phase) -> bool:
        """Return whether a phase's reducer sends all of the gradient."""
        name = phase.reducer or self.reducer
        return name != AUTO and not REDUCERS[name].sparse

    @property
    def automatic(self) -> list[int]:
        """Return the numbers of the phases whose reducer is to be chosen."""
        return [number for number, phase in enumerate(self.phases) if (phase.reducer or self.reducer) == AUTO]

    def density_of(self, phase: Phase) -> float:
        """Return the density at which a phase's reducer selects, if it does."""
        given = (phase.density, self.density, DEFAULT_DENSITY)
        return next(density for density in given if density is not None)

    def momentum_of(self, phase: Phase) -> float | MomentumLine | None:
        """Return the momentum of a phase; :func:`training.config.schedules.momentum_at` gives that of a step.

        ``None`` where the optimizer has none.
        """
        return getattr(self.optimizer, "momentum", None) if phase.momentum is None else phase.momentum

    def with_choices(self, choices: Mapping[int, Choice]) -> "Config":
        """Return the configuration with the reducers written out that were chosen for phases, by number."""
        phases = list(self.phases)
        for number, choice in choices.items():
            assert choice.options.keys() <= set(REDUCER_KEYS)
            options = reducer_options(choice.reducer) | choice.options
            if "density" in options:
                options["density"] = self.density_of(phases[number])
            written = {option: options.get(option) for option in REDUCER_KEYS}
            phases[number] = phases[number].model_copy(update={"reducer": choice.reducer, **written})
        return self.model_copy(update={"phases": phases})

    def reducer_config(self, phase: Phase) -> dict[str, Any]:
        """Return the reducer of a phase and its options, as :func:`commlib.make_reducer` takes them.

        It takes no ``auto``: see ``with_choices``.
        """
        name = phase.reducer or self.reducer
        chosen: dict[str, Any] = {"name": name}
        for option, default in options_of(name).items():
            given = (getattr(record, option, None) for record in (phase, self))
            chosen[option] = next((value for value in given if value is not None), default)
        return chosen

    def resolved(self) -> "Config":
        """Return the configuration with every phase's learning rate, reducer and options written out."""
        phases = []
        for phase in self.phases:
            options = self.reducer_config(phase)
            written = {option: value for option, value in options.items() if option in REDUCER_KEYS}
            written |= {
                "reducer": options["name"],
                "learning_rate": phase.learning_rate or self.learning_rate,
            }
            phases.append(phase.model_copy(update=written))
        return self.model_copy(update={"phases": phases})

    @model_serializer(mode="wrap")
    def _without_secrets(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Mask what is secret and no reference, wherever a configuration is written."""
        masked: dict[str, Any] = mask(dump(self))
        return masked

    def to_yaml(self) -> str:
        """Return the configuration as YAML that ``load`` reads back, unless a secret was given in clear."""
        text: str = yaml.safe_dump(self.model_dump(exclude_none=True), sort_keys=False)
        return text


@dataclass(frozen=True)
class Loaded:
    """A configuration with every phase's reducer written out, and a line for each setting without effect."""

    config: Config
    warnings: list[str]


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return what ``load_with_warnings`` does, without the warnings."""
    return load_with_warnings(path, overrides).config


def load_with_warnings(
    path: str | Path,
    overrides: Sequence[str] = (),
    change: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> Loaded:
    """Return the checked configuration of a YAML file or a name that ships, with ``key=value`` words on top.

    Keys of nested values are joined by dots, places in lists are numbers: ``phases.0.epochs=3``.
    A record that is given as a whole, ``cache={disk: auto}``, replaces the file's. ``change`` returns the
    keys and values that are checked, of those that were given.
    """
    content = read(located(path))
    for word in overrides:
        put(content, word)
    try:
        given = resolve(content)
        config = Config.model_validate(change(given))
        warnings = [*_secrets_in_clear(given), *_without_effect(config)]
        return Loaded(config.resolved(), [one_line(mask(line)) for line in warnings])
    except ValidationError as error:
        problems = [describe(detail) for detail in error.errors()]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigurationError(f"{path}: {problems[0]}{more}") from error
    except Unreadable as error:
        raise ConfigurationError(f"{path}: {error}") from error


def _secrets_in_clear(given: dict[str, Any]) -> list[str]:
    """Return a line for every secret that is no reference."""
    return [
        f"{place}: expected a reference such as ${{oc.env:NAME}}, got a secret in clear"
        for place in in_clear(given)
    ]


def _without_effect(config: Config) -> list[str]:
    """Return a line for every setting that no phase takes."""
    given = [option for option in REDUCER_KEYS if getattr(config, option) is not None]
    taken = {
        option
        for phase in config.phases
        for option in options_of(phase.reducer or config.reducer)
        if getattr(phase, option, None) is None
    }
    lines = [
        f"{option}={getattr(config, option)} has no effect: no phase takes it from here"
        for option in given
        if option not in taken
    ]
    if config.profile is not None and not config.automatic:
        lines.append(f"profile={config.profile} has no effect: no phase has reducer=auto")
    if "reducer" in config.model_fields_set and all(phase.reducer for phase in config.phases):
        lines.append(f"reducer={config.reducer} has no effect: every phase names its own")
    if config.learning_rate is not None and all(phase.learning_rate for phase in config.phases):
        lines.append("learning_rate has no effect: every phase names its own")
    optimizer = config.optimizer
    if "momentum" in optimizer.model_fields_set and all(
        phase.momentum is not None for phase in config.phases
    ):
        momentum = getattr(optimizer, "momentum", None)
        lines.append(f"optimizer.momentum={momentum} has no effect: every phase names its own")
    return lines
