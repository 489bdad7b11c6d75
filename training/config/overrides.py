"""``key=value`` arguments of a command line, which override a configuration."""

from typing import Any

from commlib.errors import shown
from training.config.bounded_yaml import DEEPEST, Unreadable, parse
from training.config.includes import INCLUDE
from training.config.references import keys_of
from training.config.schema import ConfigurationError
from training.config.secrets import in_clear


def put(content: dict[str, Any], word: str) -> None:
    """Override ``content`` by ``a.b.0.c=value``, in place; values are YAML.

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
        value = parse(f"value: {text}")["value"]
    except Unreadable as error:
        raise ConfigurationError(f"{word}: expected a YAML value, got {shown(text)}: {error}") from error
    for place in in_clear({key: value}):
        raise ConfigurationError(
            f"{place}: expected a reference such as ${{oc.env:NAME}}, as others can read a command line; "
            "got a secret in clear"
        )
    keys = keys_of(key)
    if keys is None or len(keys) > DEEPEST or not _is_put(content, keys, value):
        raise ConfigurationError(f"{word}: the configuration has no place {shown(key)[1:-1]}")


def _is_put(content: Any, keys: list[str], value: Any) -> bool:
    """Set a value below ``content``; return whether there is such a path."""
    key, *below = keys
    step: Any = key
    if isinstance(content, list):
        if not key.isdecimal() or int(key) >= len(content):
            return False
        step = int(key)
    elif not isinstance(content, dict):
        return False
    if not below:
        content[step] = value
        return True
    there = content[step] if isinstance(content, list) else content.get(step)
    if there is None or isinstance(there, str):
        there = content[step] = {} if there is None else {"name": there}
    return _is_put(there, below, value)
