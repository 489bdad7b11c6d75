"""The schema of ``configs/*.yaml``, and how a file and ``key=value`` words become a checked configuration.

Everything wrong is a :class:`ConfigurationError` of one line that names the key, the value and what was
expected. Command line comes before file comes before default.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

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
from pydantic_core import ErrorDetails, PydanticCustomError

from commlib import REDUCERS, SELECTORS
from commlib.errors import InvalidArgument, UnknownName, look_up, suggestion
from commlib.reducers import reducer_options
from commlib.tuner import Choice
from commlib.wire import make_codec
from training.datasets import DATASETS
from training.models import MODELS

AUTO = "auto"  # the reducer that is chosen when the run begins, from the profile of its ranks
DEFAULT_DENSITY = reducer_options("allgather")["density"]  # all sparse ones have the same


class ConfigurationError(ValueError):
    """A configuration that cannot be run; one line says why."""


def _problem(text: str, key: str = "") -> PydanticCustomError:
    return PydanticCustomError("problem", "{problem}", {"problem": text, "key": key})


def _expect(expected: str, holds: Callable[[Any], bool]) -> BeforeValidator:
    """Accept the values for which ``holds``; say of any other what was expected."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise _problem(f"expected {expected}, got {value!r}")
        return value

    return BeforeValidator(check)


def _name_in(table: Mapping[str, Any], kind: str) -> AfterValidator:
    """Accept the names of a table; list them, and the nearest, for any other."""

    def check(name: str) -> str:
        try:
            look_up(table, kind, name)
        except UnknownName as error:
            raise _problem(str(error)) from error
        return name

    return AfterValidator(check)


def _options_of(reducer: str) -> dict[str, Any]:
    """Return the options of a reducer with their defaults; of ``auto`` those that it does not pick."""
    return {"density": DEFAULT_DENSITY} if reducer == AUTO else reducer_options(reducer)


def _check_codec(name: str) -> str:
    """Accept what ``make_codec`` accepts: the names of ``CODECS``, and two of them joined by ``+``."""
    try:
        make_codec(name)
    except (UnknownName, InvalidArgument) as error:
        raise _problem(str(error).removeprefix("wire: ")) from error
    return name


def _is_whole(value: Any, least: int) -> bool:
    return type(value) is int and value >= least  # True is an int to Python, and never what was meant


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_layout(value: Any) -> bool:
    counts = value if isinstance(value, list) else [value]
    return value is None or (len(counts) > 0 and all(_is_whole(count, 1) for count in counts))


Count = Annotated[int, _expect("a whole number from 1", lambda value: _is_whole(value, 1))]
Seed = Annotated[
    int, _expect("a whole number from 0 to 2³¹ − 1", lambda value: _is_whole(value, 0) and value < 1 << 31)
]
Rate = Annotated[float, _expect("a number from 0", lambda value: _is_number(value) and value >= 0)]
Momentum = Annotated[float, _expect("a number in [0, 1)", lambda value: _is_number(value) and 0 <= value < 1)]
Density = Annotated[float, _expect("a number in (0, 1]", lambda value: _is_number(value) and 0 < value <= 1)]
Layout = Annotated[
    int | list[int] | None, _expect("a number of ranks, or a list of them, one a node", _is_layout)
]
FileName = Annotated[
    str,
    _expect(
        "letters, digits, '_', '.' and '-'",
        lambda value: isinstance(value, str) and re.fullmatch(r"\w[\w.-]*", value, re.ASCII) is not None,
    ),
]
DatasetName = Annotated[str, _name_in(DATASETS, "dataset")]
ModelName = Annotated[str, _name_in(MODELS, "model")]
ReducerName = Annotated[str, _name_in({**REDUCERS, AUTO: None}, "reducer")]
SelectorName = Annotated[str, _name_in(SELECTORS, "selector")]
CodecName = Annotated[str, AfterValidator(_check_codec)]


class Record(BaseModel):
    """Unknown keys and wrong types are refused; records do not change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class LearningRate(Record):
    """From ``start`` to ``end`` in a straight line over the steps of the phase."""

    start: Rate
    end: Rate

    def at(self, step: int, steps: int) -> float:
        """Return the learning rate of step ``step`` of ``steps``."""
        return self.start + (self.end - self.start) * step / max(1, steps - 1)


REDUCER_KEYS = ("density", "selector", "wire")  # of a phase, or of the configuration for its phases


class Cache(Record):
    """Where the ranks of a node keep samples: ``auto``, a folder, or none."""

    disk: str | None = None
    """As they are in central storage. ``auto``: below ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    memory: str | None = None
    """Pre-processed for a phase. ``auto``: a folder of the user in ``/dev/shm``."""
    shards: Count = 1
    """Parts of the samples, of which each node keeps those that its ranks read; 1: every node keeps all."""


class Phase(Record):
    """A run of epochs with one input size, batch size and reducer."""

    epochs: Count
    """Passes over the training samples."""
    input_size: Count
    """Images are resized to so many pixels square."""
    batch_size: Count
    """Samples in a step of one rank."""
    learning_rate: LearningRate
    reducer: ReducerName | None = None
    """A name of ``commlib.REDUCERS``, or ``auto``; the configuration's without it, as for the three below."""
    density: Density | None = None
    """Share of the entries that a sparse reducer selects."""
    selector: SelectorName | None = None
    """A name of ``commlib.SELECTORS``."""
    wire: CodecName | None = None
    """A name of ``commlib.CODECS``, or an index and a value codec joined by ``+``."""


Phases = Annotated[
    list[Phase], _expect("a list of one phase or more", lambda value: isinstance(value, list) and value != [])
]


class Config(Record):
    """A training run."""

    name: FileName
    """What the run's folder is called, before its time."""
    dataset: DatasetName
    """A name of ``training.datasets.DATASETS``."""
    model: ModelName
    """A name of ``training.models.MODELS``."""
    phases: Phases
    """One after the other; what a reducer holds back goes into the next one's first step."""
    seed: Seed = 1
    """Of the first weights and of the order of samples."""
    momentum: Momentum = 0.9
    """Of SGD: the share of the last update that is added to the next."""
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
            for option in REDUCER_KEYS:
                value = getattr(phase, option)
                if value is not None and option not in _options_of(name):
                    does = "picks its own" if name == AUTO else f"takes no {option}"
                    raise _problem(
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
                raise _problem(f"expected none, reducer=auto picks its own; got {value}", key=option)
        return self

    @property
    def automatic(self) -> list[int]:
        """Return the numbers of the phases whose reducer is to be chosen."""
        return [number for number, phase in enumerate(self.phases) if (phase.reducer or self.reducer) == AUTO]

    def density_of(self, phase: Phase) -> float:
        """Return the density at which a phase's reducer selects, if it does."""
        given = (phase.density, self.density, DEFAULT_DENSITY)
        return next(density for density in given if density is not None)

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


def load_with_warnings(path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """Return the checked configuration of a YAML file, with ``key=value`` words put on top.

    Keys of nested values are joined by dots, places in lists are numbers: ``phases.0.epochs=3``.
    """
    content = _read(Path(path))
    for word in overrides:
        _put(content, word)
    try:
        plain = OmegaConf.to_container(content, resolve=True)
        config = Config.model_validate(plain)
        return Loaded(config.resolved(), _without_effect(config))
    except ValidationError as error:
        problems = [_describe(detail) for detail in error.errors()]
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
    return lines


def _read(path: Path) -> Any:
    try:
        content = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigurationError(f"{path}: no such file, expected a YAML configuration") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        line = f" line {place.line + 1}:" if place else ""
        raise ConfigurationError(f"{path}:{line} not YAML: {getattr(error, 'problem', error)}") from error
    if not OmegaConf.is_dict(content):
        raise ConfigurationError(f"{path}: expected keys and values, got {OmegaConf.to_container(content)!r}")
    return content


def _put(content: Any, word: str) -> None:
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ConfigurationError(f"{word}: expected key=value")
    try:
        value = OmegaConf.to_container(OmegaConf.create(f"value: {text}"))["value"]  # type: ignore[index,call-overload]
        OmegaConf.update(content, key, value, force_add=True)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{word}: expected a YAML value, got {text!r}") from error
    except (OmegaConfBaseException, IndexError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{word}: the configuration has no place {key}") from error


def _describe(detail: ErrorDetails) -> str:
    """Return ``key: what is wrong`` for one finding of pydantic."""
    place = detail["loc"]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")
    if detail["type"] == "problem":
        context = detail["ctx"]
        return f"{context['key'] or key}: {context['problem']}"
    if detail["type"] == "extra_forbidden":
        known = _fields_at(place[:-1])
        return f"{key}: unknown key{suggestion(str(place[-1]), known)} (known here: {', '.join(known)})"
    if detail["type"] == "missing":
        return f"{key}: missing, expected a value"
    if detail["type"] == "model_type":
        known = _fields_at(place)
        return f"{key}: expected the keys {', '.join(known)}, got {detail['input']!r}"
    return f"{key}: expected {detail['msg'].removeprefix('Input should be ')}, got {detail['input']!r}"


def _fields_at(place: Sequence[str | int]) -> list[str]:
    """Return the known keys of the record at a place in the configuration."""
    record: type[BaseModel] = Config
    if place and place[0] == "phases":
        record = LearningRate if "learning_rate" in place else Phase
    return list(record.model_fields)
