"""Configurations are YAML files, which may include others, with ``key=value`` overrides and references.

``include: presets/lars.yaml``, or a list of files: a key of the file replaces the included one, records are
merged key by key, lists are replaced as a whole. Of several files the later one wins. Paths are relative to
the file that names them, else to the configurations that ship; included files may include others.

``${phases[0].epochs}`` is another value, ``${.key}`` one of the same record; ``${oc.env:NAME}`` is a variable
of the environment, ``${oc.env:NAME,default}`` one with a default, ``${oc.decode:${oc.env:NAME}}`` its text as
a number, truth value, list or record. OmegaConf resolves all but secrets (:mod:`training.config.secrets`).
"""

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from commlib.errors import UnknownName, look_up, shown
from datacache.escaping import MASK, is_secret
from training.config.schema import ConfigurationError, located_problem, written
from training.config.secrets import REFERENCE, in_clear, mask

INCLUDE = "include"
LINEAR = "linear"  # the task whose configurations are those of training.linear.config

_TAG = "tag:yaml.org,2002:"
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")  # YAML 1.1 requires a point and a sign


class _Loader(yaml.SafeLoader):
    """YAML 1.1, except that ``1e-3`` is a number, a date is text, and keys are unique."""

    yaml_implicit_resolvers = {
        first: [each for each in resolvers if each[0] != f"{_TAG}timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for name in {name for name in names if names.count(name) > 1}:
            expected = f"expected every key once, got {shown(name)} twice"
            raise yaml.MarkedYAMLError(problem=expected, problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(f"{_TAG}float", _EXPONENT, list("-+0123456789"))


def parsed(text: str) -> Any:
    """Return the value of a YAML text; raises ``ConfigurationError``."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a safe loader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        raise ConfigurationError(f"{line}not YAML: {what}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigurationError(f"not YAML: a value does not have its type: {error}") from error


def parsed_file(path: Path) -> Any:
    """Return the value of a YAML file; raises ``ConfigurationError`` where it is missing or damaged."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise ConfigurationError("no such file, expected a YAML configuration") from None
    except (OSError, ValueError) as error:  # a path that no file can have, text that is not UTF-8
        raise ConfigurationError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return parsed(text)


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a record, an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}


def mappings(value: Any) -> list[Mapping[str, Any]]:
    """Return the records of a list."""
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


# ---------------------------------------------------------------------------------------------- files


def folder_of(name: str) -> Path:
    """Return a folder of files that ship: in the package where it is installed, else in the clone."""
    package = Path(__file__).parents[1]
    installed = package / name  # see setup.py
    return installed if installed.is_dir() else package.parent / name


FOLDER = folder_of("configs")


def located(given: str | Path, kind: str = "configuration", folder: Path = FOLDER) -> Path:
    """Return the file of a path or a name: an existing file, else the one of that name in ``folder``.

    Raises ``ConfigurationError`` for an unknown name. A path with a suffix or a folder is returned unchanged.
    """
    path = Path(given)
    if path.suffix or len(path.parts) != 1 or (os.path.exists(path) and not os.path.isdir(path)):
        return path
    try:
        return look_up({each.stem: each for each in sorted(folder.glob("*.yaml"))}, kind, str(path))
    except UnknownName as error:
        raise ConfigurationError(f"expected a YAML file or the name of one that ships: {error}") from None


def read(path: Path, including: Sequence[Path] = ()) -> dict[str, Any]:
    """Return the keys and values of a YAML file with all that it includes; ``including``: those above."""
    by = f" (included by {including[-1]})" if including else ""
    try:
        content = parsed_file(path)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}{by}") from error
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path}: expected keys and values, got {shown(content)}{by}")
    names = content.pop(INCLUDE, [])
    names = names if isinstance(names, list) else [names]
    if not all(isinstance(name, str) and name for name in names):
        raise ConfigurationError(f"{path}: {INCLUDE}: expected a file or a list of files, got {shown(names)}")
    chain, parts = (*including, path), []
    for name in names:
        included, shipped = path.parent / name, FOLDER / name
        if os.path.isfile(shipped) and not os.path.exists(included):
            included = shipped
        if os.path.realpath(included) in map(os.path.realpath, chain):
            way = " → ".join(map(str, (*chain, included)))
            raise ConfigurationError(f"{path}: {INCLUDE}: expected no file that includes itself, got {way}")
        parts.append(read(included, chain))
    return functools.reduce(merged, [*parts, content])


def merged(below: Any, above: Any) -> Any:
    """Return ``above`` with the keys of ``below`` that its records lack.

    >>> merged({"a": 1, "b": {"c": 2, "d": [3, 4]}}, {"b": {"d": [5]}})
    {'a': 1, 'b': {'c': 2, 'd': [5]}}
    """
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return below | {key: merged(below.get(key), value) for key, value in above.items()}


# ------------------------------------------------------------------------------------------ references

# Quoted for OmegaConf, whose grammar refuses ~ in a default without quotes.
_DEFAULT = re.compile(r"""\$\{\s*oc\.env:([^${},]+),\s*(?!null\s*\}|["'])([^${}]*?)\s*\}""")
_UNRESOLVED = (OmegaConfBaseException, TypeError, ValueError, RecursionError)


def resolve(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with its references resolved, but for those to secrets."""
    with _unresolved_in_one_line():
        return OmegaConf.to_container(OmegaConf.create(_prepared(content)), resolve=True)  # type: ignore


@contextmanager
def _unresolved_in_one_line(source: str = "") -> Iterator[None]:
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(error.text, key=error.key, source=source) from error
    except _UNRESOLVED as error:
        text = f"expected a value or a reference to one: {str(error).splitlines()[0]}"
        key = getattr(error, "full_key", None) or ""
        raise ConfigurationError(text, key=key, source=source) from error


def _prepared(value: Any, path: tuple[str | int, ...] = ()) -> Any:
    """Return a value for OmegaConf, with references to secrets escaped: OmegaConf leaves them as they are."""
    if isinstance(value, dict):
        return {key: _prepared(each, (*path, key)) for key, each in value.items()}
    if isinstance(value, list):
        return [_prepared(each, (*path, number)) for number, each in enumerate(value)]
    if not isinstance(value, str):
        return value
    if MASK in value and any(map(is_secret, path)):
        expected = f"expected a reference such as ${{oc.env:NAME}}: {MASK} stands for a secret"
        raise ConfigurationError(expected, key=written(path))
    if REFERENCE.search(value) and _is_secret_reference(value, path):
        if "oc.decode" in value:
            raise ConfigurationError(f"expected ${{oc.env:NAME}}, got {shown(value)}", key=written(path))
        value = REFERENCE.sub(r"\\\g<0>", value)
    return _DEFAULT.sub(lambda found: f"${{oc.env:{found[1]},{_quoted(found[2])}}}", value)


def _is_secret_reference(text: str, path: tuple[str | int, ...]) -> bool:
    probes = (REFERENCE.sub("x", text), REFERENCE.sub(lambda found: os.environ.get(found[1], ""), text))
    is_in_url = any(mask(probe) != probe for probe in probes)
    is_in_storage = path[:3] == ("dataset", "storage", "options")
    return is_in_storage or is_in_url or any(map(is_secret, path))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", r"\'") + "'"


# ------------------------------------------------------------------------------------------- overrides


def put(config: DictConfig, word: str) -> None:
    """Override ``config`` by ``a.b.0.c=value``, in place; values are YAML.

    Missing records on the path are created; one that is given by its name alone becomes a record.
    Raises :class:`ConfigurationError`, also for a secret in clear: others can read a command line.
    """
    key, equals, text = word.partition("=")
    word = shown(word)[1:-1]  # from here on it is for messages
    if not equals or not key:
        raise ConfigurationError(f"{word}: expected key=value")
    if key == INCLUDE:
        raise ConfigurationError(f"{word}: expected in a file, whose own keys come before what it includes")
    try:
        value = parsed(f"value: {text}")["value"]
    except ConfigurationError as error:
        raise ConfigurationError(f"{word}: expected a YAML value, got {shown(text)}: {error}") from error
    for place in in_clear({key: value}):
        raise ConfigurationError(
            f"{place}: expected a reference such as ${{oc.env:NAME}}, as others can read a command line; "
            "got a secret in clear"
        )
    keys = re.split(r"\]?[.\[]", key.removesuffix("]"))
    value = _prepared(value, tuple(keys))
    try:
        for count in range(1, len(keys)):
            above = ".".join(keys[:count])
            if isinstance(name := OmegaConf.select(config, above), str):
                OmegaConf.update(config, above, {"name": name})
        OmegaConf.update(config, key, value, merge=False, force_add=True)
    except _UNRESOLVED as error:
        raise ConfigurationError(f"{word}: the configuration has no place {shown(key)[1:-1]}") from error


# ------------------------------------------------------------------------------------- what is checked


@dataclass(frozen=True)
class Given:
    """The keys and values of a configuration before any check, and the path that messages name."""

    path: str | Path
    keys: dict[str, Any]


def read_given(path: str | Path | Given, overrides: Sequence[str] = ()) -> Given:
    """Return the keys and values of a YAML file or a name that ships, with ``key=value`` overrides.

    Keys of nested values are joined by dots, indices of lists are numbers: ``phases.0.epochs=3``.
    A record given as a whole, ``cache={disk: auto}``, replaces the file's. A ``Given`` is returned as it is.
    """
    if isinstance(path, Given):
        return path
    content = read(located(path))
    with _unresolved_in_one_line(str(path)):
        config = OmegaConf.create(_prepared(content))
    for word in overrides:
        put(config, word)
    with _unresolved_in_one_line(str(path)):
        return Given(path, OmegaConf.to_container(config, resolve=True))  # type: ignore[arg-type]


@contextmanager
def problems_in_one_line(path: str | Path, *inside: str) -> Iterator[None]:
    """Raise ``ConfigurationError`` for the first wrong value that the block finds, ``inside`` these keys."""
    try:
        yield
    except ValidationError as error:
        first, *others = error.errors()
        key, text = located_problem(first | {"loc": (*inside, *first["loc"])})
        more = f" (and {len(others)} more)" if others else ""
        raise ConfigurationError(f"{text}{more}", key=key, source=str(path)) from error
