"""The schema of ``configs/*.yaml``, and how a file and ``key=value`` words become a checked configuration.

Everything wrong is a :class:`ConfigurationError` of one line that names the key, the value and what was
expected. Command line comes before file comes before default.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    model_validator,
)

from commlib import REDUCERS, SELECTORS
from commlib.errors import InvalidArgument, UnknownName
from commlib.reducers import reducer_options
from commlib.tuner import Choice
from commlib.wire import make_codec
from training.datasets import Dataset, check_dataset, make_dataset
from training.includes import INCLUDE, read
from training.models import MODELS
from training.optimizers import AnyOptimizer, Sgd
from training.schedules import DensityWarmup, LearningRate, MomentumLine, MomentumSchedule
from training.schema import (
    ConfigurationError,
    Count,
    Density,
    Positive,
    Rate,
    Record,
    describe,
    expect,
    is_number,
    is_whole,
    name_in,
    problem,
)

AUTO = "auto"  # the reducer that is chosen when the run begins, from the profile of its ranks
DEFAULT_DENSITY = reducer_options("allgather")["density"]  # all sparse ones have the same


def _options_of(reducer: str) -> dict[str, Any]:
    """Return the options of a reducer with their defaults; of ``auto`` those that it does not pick."""
    return {"density": DEFAULT_DENSITY} if reducer == AUTO else reducer_options(reducer)


def _check_codec(name: str) -> str:
    """Accept what ``make_codec`` accepts: the names of ``CODECS``, and two of them joined by ``+``."""
    try:
        make_codec(name)
    except (UnknownName, InvalidArgument) as error:
        raise problem(str(error).removeprefix("wire: ")) from error
    return name


def _is_layout(value: Any) -> bool:
    counts = value if isinstance(value, list) else [value]
    return value is None or (len(counts) > 0 and all(is_whole(count, 1) for count in counts))


Seed = Annotated[
    int, expect("a whole number from 0 to 2³¹ − 1", lambda value: is_whole(value, 0) and value < 1 << 31)
]
Layout = Annotated[
    int | list[int] | None, expect("a number of ranks, or a list of them, one a node", _is_layout)
]
FileName = Annotated[
    str,
    expect(
        "letters, digits, '_', '.' and '-'",
        lambda value: isinstance(value, str) and re.fullmatch(r"\w[\w.-]*", value, re.ASCII) is not None,
    ),
]
ModelName = Annotated[str, name_in(MODELS, "model")]
ReducerName = Annotated[str, name_in({**REDUCERS, AUTO: None}, "reducer")]
SelectorName = Annotated[str, name_in(SELECTORS, "selector")]
CodecName = Annotated[str, AfterValidator(_check_codec)]
Level = Annotated[
    float, expect("a number from 0 to 255", lambda value: is_number(value) and 0 <= value <= 255)
]
Part = Annotated[float, expect("a number in [0, 1)", lambda value: is_number(value) and 0 <= value < 1)]
CropShare = Annotated[float, expect("a number in (0, 1]", lambda value: is_number(value) and 0 < value <= 1)]


REDUCER_KEYS = ("density", "selector", "wire")  # of a phase, or of the configuration for its phases


class DatasetRecord(BaseModel):
    """A data set: its name, the path of its files where it has any, and its own options."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str
    """A name of ``training.datasets.DATASETS``."""
    path: str | None = None
    """A folder or URL."""

    @model_validator(mode="after")
    def _takes_what_is_given(self) -> "DatasetRecord":
        try:
            check_dataset(self.name, self.path, self.options)
        except ValueError as error:
            raise problem(str(error)) from error
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of this data set alone."""
        return dict(self.model_extra or {})

    def make(self) -> Dataset:
        """Return the data set; a ``ValueError`` of one line says what is wrong with it."""
        return make_dataset(self.name, self.path, **self.options)


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class Cache(Record):
    """Where the ranks of a node keep samples: ``auto``, a folder, or none."""

    disk: str | None = None
    """As they are in central storage. ``auto``: below ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    memory: str | None = None
    """Pre-processed for a phase. ``auto``: a folder of the user in ``/dev/shm``."""
    shards: Count = 1
    """Parts of the samples, of which each node keeps those that its ranks read; 1: every node keeps all."""
    exchange: Part = 0.0
    """Share of every part, others in each epoch, that change places with those of other parts."""

    @model_validator(mode="after")
    def _there_are_parts_to_exchange(self) -> "Cache":
        if self.exchange and self.shards == 1:
            raise problem(f"expected 0 where shards is 1, got {self.exchange}", key="exchange")
        return self


class Normalise(Record):
    """Levels of 0 to 255, one a channel, that inputs are normalised with: ``(level − mean)/std``."""

    mean: list[Level]
    std: list[Positive]

    @model_validator(mode="after")
    def _has_as_many(self) -> "Normalise":
        if len(self.mean) != len(self.std):
            raise problem(f"expected as many as the {len(self.mean)} of mean, got {len(self.std)}", key="std")
        return self


class Augmentation(Record):
    """A random box of each image, another in every epoch, resized to the input."""

    area: tuple[CropShare, CropShare] = (0.08, 1.0)
    """Smallest and largest share of the image's area."""
    aspect: tuple[Positive, Positive] = (3 / 4, 4 / 3)
    """Smallest and largest width over height."""
    mirror: bool = True
    """Exchange left and right in half of them."""

    @model_validator(mode="before")
    @classmethod
    def _lists_are_pairs(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: tuple(each) if isinstance(each, list) else each for key, each in value.items()}

    @model_validator(mode="after")
    def _smallest_first(self) -> "Augmentation":
        for key in ("area", "aspect"):
            smallest, largest = getattr(self, key)
            if smallest > largest:
                raise problem(f"expected the smaller one first, got {[smallest, largest]}", key=key)
        return self


class Phase(Record):
    """A run of epochs with one input size, batch size and reducer."""

    epochs: Count | None = None
    """Passes over the training samples."""
    steps: Count | None = None
    """In place of epochs."""
    input_size: Count
    """Images are resized to so many pixels square."""
    batch_size: Count
    """Samples in a step of one rank."""
    learning_rate: LearningRate
    momentum: MomentumSchedule | None = None
    """A number, or ``start`` and ``end`` of a straight line over the phase; else the optimizer's."""
    label_smoothing: Part = 0.0
    """Share of the weight of each label that goes to all classes alike."""
    augmentation: Augmentation | None = None
    """Without it, the largest square in the centre of each image."""
    validation_crop: CropShare = 1.0
    """Side of the square in the centre that is tested on, of the image's shorter side."""
    kept_size: Count | None = None
    """Shorter side at which images are kept, in pixels; else the input's, over 0.875 if it is a crop."""
    reducer: ReducerName | None = None
    """A name of ``commlib.REDUCERS``, or ``auto``; the configuration's without it, as for the three below."""
    density: Density | None = None
    """Share of the entries that a sparse reducer selects."""
    density_warmup: DensityWarmup | None = None
    """Larger densities in the first epochs of the phase."""
    selector: SelectorName | None = None
    """A name of ``commlib.SELECTORS``."""
    wire: CodecName | None = None
    """A name of ``commlib.CODECS``, or an index and a value codec joined by ``+``."""

    @model_validator(mode="after")
    def _has_one_length(self) -> "Phase":
        if (self.epochs is None) == (self.steps is None):
            given = "none" if self.epochs is None else "both"
            raise problem(f"expected epochs or steps, got {given}")
        return self

    @property
    def kept_side(self) -> int:
        """Return the shorter side at which images are kept, in pixels."""
        if self.kept_size is not None:
            return self.kept_size
        crops = self.augmentation is not None or self.validation_crop < 1
        return math.ceil(self.input_size / 0.875) if crops else self.input_size


Phases = Annotated[
    list[Phase], expect("a list of one phase or more", lambda value: isinstance(value, list) and value != [])
]


class Checkpointing(Record):
    """When checkpoints are made, and how many are kept."""

    every_epochs: Count | None = 1
    every_steps: Count | None = None
    """Besides the epochs'."""
    keep: Count = 3
    """The last so many; the best is kept as well."""


class DawnBenchEntry(Record):
    """What DAWNBench wants to know besides the run."""

    author: str = ""
    author_email: str = ""
    code_url: str = ""
    hardware: str | None = None
    """Else the nodes and what they have, as they are found."""
    cost_per_hour: Rate | None = None
    """In dollars, of all nodes."""


class Target(Record):
    """What ends a run before its last epoch."""

    metric: Literal["top1", "top5"]
    at_least: CropShare
    """Share of the test samples that are answered right."""


class Config(Record):
    """A training run."""

    name: FileName
    """What the run's folder is called, before its time."""
    dataset: Annotated[DatasetRecord, BeforeValidator(_named)]
    """A name of ``training.datasets.DATASETS``; where more is to be said, ``name``, ``path`` and options."""
    model: ModelName
    """A name of ``training.models.MODELS``."""
    phases: Phases
    """One after the other; what a reducer holds back goes into the next one's first step."""
    seed: Seed = 1
    """Of the first weights and of the order of samples."""
    optimizer: AnyOptimizer = Sgd()
    """A name of ``training.optimizers.OPTIMIZERS``, or ``name`` and its settings."""
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
                if value is not None and needed not in _options_of(name):
                    does = "picks its own" if name == AUTO else f"takes no {needed}"
                    raise problem(
                        f"expected none, the reducer of this phase ({name}) {does}; got {value}",
                        key=f"phases[{number}].{option}",
                    )
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
        """Return the momentum of a phase; :func:`training.schedules.momentum_at` gives that of a step.

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
        for option, default in _options_of(name).items():
            given = (getattr(record, option, None) for record in (phase, self))
            chosen[option] = next((value for value in given if value is not None), default)
        return chosen

    def resolved(self) -> "Config":
        """Return the configuration with every phase's reducer and options written out."""
        phases = []
        for phase in self.phases:
            options = self.reducer_config(phase)
            written = {option: value for option, value in options.items() if option in REDUCER_KEYS}
            phases.append(phase.model_copy(update={"reducer": options["name"], **written}))
        return self.model_copy(update={"phases": phases})

    def to_yaml(self) -> str:
        """Return the configuration as YAML that ``load`` reads back."""
        return yaml.safe_dump(self.model_dump(exclude_none=True), sort_keys=False)


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
    """Return the checked configuration of a YAML file, with ``key=value`` words put on top.

    Keys of nested values are joined by dots, places in lists are numbers: ``phases.0.epochs=3``.
    A record that is given as a whole, ``cache={disk: auto}``, replaces the file's. ``change`` returns the
    keys and values that are checked, of those that were given.
    """
    content = read(Path(path))
    for word in overrides:
        _put(content, word)
    try:
        plain = OmegaConf.to_container(content, resolve=True)
        config = Config.model_validate(change(plain))
        return Loaded(config.resolved(), _without_effect(config))
    except ValidationError as error:
        problems = [describe(detail) for detail in error.errors()]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigurationError(f"{path}: {problems[0]}{more}") from error
    except OmegaConfBaseException as error:
        raise ConfigurationError(f"{path}: {str(error).splitlines()[0]}") from error


def _without_effect(config: Config) -> list[str]:
    """Return a line for every setting that no phase takes."""
    given = [option for option in REDUCER_KEYS if getattr(config, option) is not None]
    taken = {
        option
        for phase in config.phases
        for option in _options_of(phase.reducer or config.reducer)
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
    optimizer = config.optimizer
    if "momentum" in optimizer.model_fields_set and all(
        phase.momentum is not None for phase in config.phases
    ):
        momentum = getattr(optimizer, "momentum", None)
        lines.append(f"optimizer.momentum={momentum} has no effect: every phase names its own")
    return lines


def _put(content: Any, word: str) -> None:
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ConfigurationError(f"{word}: expected key=value")
    if key == INCLUDE:
        raise ConfigurationError(f"{word}: expected in a file, whose own keys come before what it includes")
    try:
        value = OmegaConf.to_container(OmegaConf.create(f"value: {text}"))["value"]  # type: ignore[index,call-overload]
        OmegaConf.update(content, key, value, merge=False, force_add=True)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{word}: expected a YAML value, got {text!r}") from error
    except (OmegaConfBaseException, IndexError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{word}: the configuration has no place {key}") from error
