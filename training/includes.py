"""YAML files that include others: ``include: presets/lars.yaml``, or a list of files.

What is included lies below the file's own keys: a key of the file replaces that of an included one, records
are merged key by key, lists are replaced as a whole. Of several files the later one wins. Paths are relative
to the file that names them, and included files may include others.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from training.schema import ConfigurationError

INCLUDE = "include"


def read(path: Path) -> DictConfig:
    """Return the keys and values of a YAML file with those of all that it includes."""
    return OmegaConf.create(_read(path, ()))


def merged(below: Any, above: Any) -> Any:
    """Return ``above`` with the keys of ``below`` that its records lack.

    >>> merged({"a": 1, "b": {"c": 2, "d": [3, 4]}}, {"b": {"d": [5]}})
    {'a': 1, 'b': {'c': 2, 'd': [5]}}
    """
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    both = {key: merged(below[key], value) for key, value in above.items() if key in below}
    return {**below, **above, **both}


def _read(path: Path, including: Sequence[Path]) -> dict[str, Any]:
    """``including``: the files that led here, the first one first."""
    content = _load(path, including)
    names = _names_in(content.pop(INCLUDE, []), path)
    chain = (*including, path)
    parts = [_read(_checked(path.parent / name, chain), chain) for name in names]
    return functools.reduce(merged, [*parts, content])


def _names_in(given: Any, path: Path) -> list[str]:
    names = given if isinstance(given, list) else [given]
    if not all(isinstance(name, str) and name for name in names):
        raise ConfigurationError(f"{path}: {INCLUDE}: expected a file or a list of files, got {given!r}")
    return names


def _checked(path: Path, chain: Sequence[Path]) -> Path:
    """Refuse a file that leads to itself: merging it would never end."""
    if path.resolve() in [each.resolve() for each in chain]:
        way = " → ".join(map(str, (*chain, path)))
        raise ConfigurationError(f"{chain[-1]}: {INCLUDE}: expected no file that includes itself, got {way}")
    return path


def _load(path: Path, including: Sequence[Path]) -> dict[str, Any]:
    """Return one file as it is; all that can be wrong with it is one line."""
    by = f" (included by {including[-1]})" if including else ""
    try:
        content = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigurationError(f"{path}: no such file, expected a YAML configuration{by}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}{by}") from error
    except yaml.YAMLError as error:
        place = getattr(error, "problem_mark", None)
        line = f" line {place.line + 1}:" if place else ""
        raise ConfigurationError(f"{path}:{line} not YAML: {getattr(error, 'problem', error)}{by}") from error
    except OmegaConfBaseException as error:
        raise ConfigurationError(f"{path}: {str(error).splitlines()[0]}{by}") from error
    plain: Any = OmegaConf.to_container(content)
    if not isinstance(plain, dict):
        raise ConfigurationError(f"{path}: expected keys and values, got {plain!r}{by}")
    return plain
