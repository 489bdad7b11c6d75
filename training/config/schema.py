"""Building blocks of the records of a configuration: checked values, parts by name, errors of one line.

A problem names the key, the value and what was expected; pydantic carries it to :func:`describe`.

A part of a run is named in a built-in table, by an entry point (groups ``cloudtrain.reducers``, and so for
models, datasets, tasks and callbacks), or by an import path, ``package.module:Name``. Nothing is imported
here: what is not imported yet is checked when a run begins, by :mod:`training.run.parts`.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic_core import ErrorDetails

from commlib.errors import look_up, one_line, shown, suggestion
from commlib.registry import import_path
from pto.rules import is_expression
from training.config.secrets import mask


class ConfigurationError(ValueError):
    """A configuration that cannot be run; the reason is one line of bounded length, without secrets.

    ``key``: the wrong key, empty where there is none; ``text``: the reason; ``source``: the file.
    """

    def __init__(self, text: str, *, key: str = "", source: str = "") -> None:
        super().__init__(one_line(mask(": ".join(filter(None, (source, key, text))))))
        self.key, self.text = key, text


@contextmanager
def reported(key: str) -> Iterator[None]:
    """Turn a ``ValueError`` of the block into a ``ConfigurationError`` of ``key``, or of a key inside it."""
    try:
        yield
    except ValueError as error:
        inside, text = _problem(key, error)
        raise ConfigurationError(text, key=inside) from error


def _problem(key: str, error: ValueError) -> tuple[str, str]:
    """Return the key that an error names, below ``key``, and what is wrong with it."""
    return ".".join(filter(None, (key, getattr(error, "key", "")))), getattr(error, "text", str(error))


def expect(expected: str, holds: Callable[[Any], bool]) -> BeforeValidator:
    """Accept the values for which ``holds``; report for any other what was expected."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise ConfigurationError(f"expected {expected}, got {shown(value)}")
        return value

    return BeforeValidator(check)


def name_in(table: Mapping[str, Any], kind: str) -> AfterValidator:
    """Accept the names of a table; list them, and the nearest, for any other."""

    def check(name: str) -> str:
        look_up(table, kind, name)
        return name

    return AfterValidator(check)


def named(value: Any) -> Any:
    """Return the record of what is given by its name alone."""
    if not isinstance(value, str | Mapping | BaseModel):
        raise ConfigurationError(f"expected a name, or the key name and options, got {shown(value)}")
    return {"name": value} if isinstance(value, str) else value


def record_in(
    table: Mapping[str, type[Any]],
    kind: str,
    default: str,
    expected: str,
    *,
    key: str = "name",
    short: Callable[[Any], Any] = lambda value: value,
) -> BeforeValidator:
    """Accept the record of ``table`` that the key ``key`` names; ``short`` expands a value's short form."""

    def check(value: Any) -> Any:
        given = short(value)
        if isinstance(given, Record):
            return given
        if not isinstance(given, dict):
            raise ConfigurationError(f"expected {expected}, got {shown(given)}")
        with reported(key):
            record = look_up(table, kind, given.get(key, default))
        return record.model_validate(given)

    return BeforeValidator(check)


def is_whole(value: Any, least: int) -> bool:
    """Return whether ``value`` is a whole number from ``least``."""
    return type(value) is int and least <= value < 1 << 63  # True is an int in Python, and never intended


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a finite number."""
    return type(value) in (int, float) and -math.inf < value < math.inf  # of any number of digits


Expression = Annotated[str, expect("a regular expression", is_expression)]
Count = Annotated[int, expect("a whole number from 1", lambda value: is_whole(value, 1))]
WholeNumber = Annotated[int, expect("a whole number from 0", lambda value: is_whole(value, 0))]
Rate = Annotated[float, expect("a number from 0", lambda value: is_number(value) and value >= 0)]
Positive = Annotated[float, expect("a number above 0", lambda value: is_number(value) and value > 0)]
Share = Annotated[float, expect("a number in (0, 1)", lambda value: is_number(value) and 0 < value < 1)]
Momentum = Annotated[float, expect("a number in [0, 1)", lambda value: is_number(value) and 0 <= value < 1)]
Density = Annotated[float, expect("a number in (0, 1]", lambda value: is_number(value) and 0 < value <= 1)]


class Record(BaseModel):
    """Wrong types are rejected, and unknown keys unless ``extra`` is ``allow``; records are immutable.

    Neither the ``repr`` of a record nor the errors of pydantic that are about it show secrets.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        masked: dict[str | None, Any] = mask(dict(super().__repr_args__()))
        return masked.items()

    @model_validator(mode="before")
    @classmethod
    def _keys_are_known(cls, value: Any) -> Any:
        """Report what pydantic does not: the keys of this record, and the nearest one."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            needed = [name for name, field in cls.model_fields.items() if field.is_required()]
            raise ConfigurationError(
                f"expected the keys {', '.join(needed or cls.model_fields)}, got {shown(value)}"
            )
        known = list(cls.model_fields)
        for key in value if cls.model_config["extra"] == "forbid" else ():
            if key not in known:
                text = f"unknown key{suggestion(str(key), known)} (known here: {', '.join(known)})"
                raise ConfigurationError(text, key=shown(str(key))[1:-1])
        return value


# ---------------------------------------------------------------------------------------- parts by name


class PartRecord(Record):
    """A part of a run: its name, and its own options."""

    model_config = ConfigDict(extra="allow")

    name: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def part_in(table: Mapping[str, Any], kind: str) -> AfterValidator:
    """Accept names of a table and of entry points, and import paths; list the names for any other."""

    def check(name: str) -> str:
        if name not in table:
            import_path(table, kind, name)
        return name

    return AfterValidator(check)


def imported(table: Mapping[str, Any], kind: str, name: str) -> Any:
    """Return the part of that name, or ``None`` where its module would have to be imported for it."""
    if name in table:
        return table[name]
    module, _, attributes = import_path(table, kind, name).partition(":")
    found: Any = sys.modules.get(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute, None)
    return found


# ----------------------------------------------------------------------------------------------- errors


def one_of(record: Record, keys: Sequence[str]) -> tuple[str, Any]:
    """Return the only one of ``keys`` that is given, and its value."""
    given = [key for key in keys if getattr(record, key) is not None]
    if len(given) != 1:
        raise ConfigurationError(f"expected one of {', '.join(keys)}, got {' and '.join(given) or 'none'}")
    return given[0], getattr(record, given[0])


def written(path: Sequence[str | int]) -> str:
    """Return a path of keys as messages show it.

    >>> written(("phases", 0, "epochs"))
    'phases[0].epochs'
    """
    parts = (f"[{key}]" if isinstance(key, int) else f".{shown(key)[1:-1]}" for key in path)
    return "".join(parts).lstrip(".")


def located_problem(detail: ErrorDetails) -> tuple[str, str]:
    """Return the key and what is wrong with it, for one finding of pydantic."""
    key = written(detail["loc"])
    if detail["type"] == "value_error":
        return _problem(key, detail["ctx"]["error"])
    if detail["type"] == "missing":
        return key, "missing, expected a value"
    return key, f"expected {detail['msg'].removeprefix('Input should be ')}, got {shown(detail['input'])}"


def describe(detail: ErrorDetails) -> str:
    """Return ``key: what is wrong`` for one finding of pydantic."""
    return ": ".join(filter(None, located_problem(detail)))
