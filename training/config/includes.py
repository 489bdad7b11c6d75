"""YAML files that include others: ``include: presets/lars.yaml``, or a list of files.

The file's own keys override included ones: a key of the file replaces that of an included one, records
are merged key by key, lists are replaced as a whole. Of several files the later one wins. Paths are relative
to the file that names them, else to the configurations that ship; included files may include others.
"""

import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from commlib.errors import shown
from training.config.bounded_yaml import Unreadable, parse, read_text
from training.config.schema import ConfigurationError
from training.config.shipped import included

INCLUDE = "include"
MOST_FILES = 64  # in one configuration, each counted as often as it is included


def read(path: Path) -> dict[str, Any]:
    """Return the keys and values of a YAML file with those of all that it includes."""
    return _read(path, (), itertools.count(1))


def merged(below: Any, above: Any) -> Any:
    """Return ``above`` with the keys of ``below`` that its records lack.

    >>> merged({"a": 1, "b": {"c": 2, "d": [3, 4]}}, {"b": {"d": [5]}})
    {'a': 1, 'b': {'c': 2, 'd': [5]}}
    """
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    both = {key: merged(below[key], value) for key, value in above.items() if key in below}
    return {**below, **above, **both}


def _read(path: Path, including: Sequence[Path], counter: Iterator[int]) -> dict[str, Any]:
    """``including``: the files that led here, the first one first; ``counter``: of all files."""
    if next(counter) > MOST_FILES:
        raise ConfigurationError(f"{including[0]}: {INCLUDE}: expected at most {MOST_FILES} files, got more")
    content = _load(path, including)
    names = _names_in(content.pop(INCLUDE, []), path)
    chain = (*including, path)
    parts = [_read(_checked(included(path, name), chain), chain, counter) for name in names]
    return functools.reduce(merged, [*parts, content])


def _names_in(given: Any, path: Path) -> list[str]:
    names = given if isinstance(given, list) else [given]
    if not all(isinstance(name, str) and name and "\0" not in name for name in names):
        raise ConfigurationError(f"{path}: {INCLUDE}: expected a file or a list of files, got {shown(given)}")
    return names


def _checked(path: Path, chain: Sequence[Path]) -> Path:
    """Reject a file that includes itself: merging it would never end."""
    if os.path.realpath(path) in [os.path.realpath(each) for each in chain]:  # which ends where links do not
        way = " → ".join(map(str, (*chain, path)))
        raise ConfigurationError(f"{chain[-1]}: {INCLUDE}: expected no file that includes itself, got {way}")
    return path


def _load(path: Path, including: Sequence[Path]) -> dict[str, Any]:
    """Return the contents of one file; every error is one line."""
    by = f" (included by {including[-1]})" if including else ""
    try:
        content = parse(read_text(path))
    except FileNotFoundError:
        raise ConfigurationError(f"{path}: no such file, expected a YAML configuration{by}") from None
    except Unreadable as error:
        raise ConfigurationError(f"{path}: {error}{by}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path}: expected keys and values, got {shown(content)}{by}")
    return dict(content)
