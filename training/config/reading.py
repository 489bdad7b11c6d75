"""The keys and values that a configuration gives, and what is wrong with them as one line."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from training.config.bounded_yaml import Unreadable
from training.config.includes import read
from training.config.overrides import put
from training.config.references import resolve
from training.config.schema import ConfigurationError, describe
from training.config.shipped import located


def read_keys(path: str | Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the keys and values of a YAML file or a name that ships, with ``key=value`` overrides.

    Keys of nested values are joined by dots, indices of lists are numbers: ``phases.0.epochs=3``.
    A record that is given as a whole, ``cache={disk: auto}``, replaces the file's.
    """
    content = read(located(path))
    for word in overrides:
        put(content, word)
    try:
        given: dict[str, Any] = resolve(content)
    except Unreadable as error:
        raise ConfigurationError(f"{path}: {error}") from error
    return given


@contextmanager
def problems_in_one_line(path: str | Path) -> Iterator[None]:
    """Raise ``ConfigurationError`` for the first thing that the block finds wrong with the values."""
    try:
        yield
    except ValidationError as error:
        problems = [describe(detail) for detail in error.errors()]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigurationError(f"{path}: {problems[0]}{more}") from error
