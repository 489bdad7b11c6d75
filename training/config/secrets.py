"""Secrets in configurations: references to the environment, masked wherever a configuration is written.

A secret is the value of a key that is named like one (``secret``, ``token``, ``account_key``, …), the
password in a URL, and what signs one. ``${oc.env:NAME}`` is a reference, which may be written and printed.

>>> mask({"path": "ftp://me:1234@host/x", "options": {"key": "AKIA", "token": "${oc.env:TOKEN}"}})
{'path': 'ftp://me:***@host/x', 'options': {'key': '***', 'token': '${oc.env:TOKEN}'}}
>>> mask("dataset.storage.options.secret=1234")
'dataset.storage.options.secret=***'
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from datacache.escaping import MASK, is_secret, without_secrets

REFERENCE = re.compile(r"\$\{oc\.env:([A-Za-z_]\w*)\}", re.ASCII)
_COUNT = re.compile(r"\d{1,9}", re.ASCII)  # how many tokens of text there are
_NOT_SECRET = {"token": ("anon", "google_default", "cloud", "cache", "browser")}  # values of gcsfs

_NAME = r"(?P<name>[A-Za-z_][\w.\[\]-]{0,500})"  # bounded, as is the time that a text of brackets takes
# A reference, and texts in quotes; where a backslash is none of the quoting, the shorter one.
_QUOTED = r"""\$\{[^}\s]*\}|"(?:[^"\\\n]|\\.)*"|"[^"\n]*"|'(?:[^'\\\n]|\\.|'')*'|'[^'\n]*'"""
_WORD = re.compile(rf"{_NAME}=(?P<value>.*)", re.DOTALL)
_ASSIGNED = re.compile(rf"(?<![\w.-]){_NAME}=(?P<value>{_QUOTED}|[^\s,;&#{{}}\[\]()'\"]+)")
_ENTRY = re.compile(rf"([{{,]\s*|(?=[\"']))[\"']?{_NAME}[\"']?\s*:\s*(?P<value>{_QUOTED}|[^,{{}}\[\]\n'\"]+)")


def mask(value: Any) -> Any:
    """Return a copy of records, lists, lines and ``key=value`` words in which secrets are ``***``.

    References to the environment stay. What is no string, list, tuple or mapping is returned as it is.
    """
    if isinstance(value, Mapping):
        return {key: _hidden(key, each) if is_secret(key) else mask(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(mask, value))
    return _masked(value) if isinstance(value, str) else value


def in_clear(value: Any, path: str = "") -> Iterator[str]:
    """Yield the keys, as ``options.secret``, of all secrets below ``value`` that are no references."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            inside = f"{path}.{key}".lstrip(".")
            if is_secret(key) and _hidden(key, each) != each:
                yield inside
            elif not is_secret(key):
                yield from in_clear(each, inside)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from in_clear(each, f"{path}[{number}]")
    elif isinstance(value, str) and mask(value) != value:
        yield path


def resolved(value: Any) -> Any:
    """Return a copy with the environment's values for references; ``ValueError`` names a missing one."""
    return with_texts(value, lambda text: REFERENCE.sub(_from_environment, text))


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of records, lists and tuples with their texts changed, but not their keys."""
    if isinstance(value, Mapping):
        return {key: with_texts(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return (tuple if isinstance(value, tuple) else list)(with_texts(each, change) for each in value)
    return change(value) if isinstance(value, str) else value


def _from_environment(reference: re.Match[str]) -> str:
    name = reference[1]
    if name not in os.environ:
        raise ValueError(f"expected the environment to have {name}, which {reference[0]} names")
    return os.environ[name]


def _hidden(key: object, value: Any) -> Any:
    """Return the mask of a secret; references, and values that mean no secret, are unchanged."""
    if isinstance(value, Mapping):
        return {name: _hidden(key, each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_hidden(key, each) for each in value)
    if value is None or isinstance(value, bool) or value in ("", *_NOT_SECRET.get(str(key).lower(), ())):
        return value
    if str(key).lower().endswith("tokens") and _COUNT.fullmatch(str(value)):
        return value
    return value if isinstance(value, str) and REFERENCE.search(value) else MASK


def _masked(text: str) -> str:
    text = without_secrets(text)
    if (word := _WORD.fullmatch(text)) and "." in word["name"]:  # of a command line: all of it is the value
        text = _masked_pair(word)
    return _ENTRY.sub(_masked_pair, _ASSIGNED.sub(_masked_pair, text))


def _masked_pair(found: re.Match[str]) -> str:
    """Mask the value of a name, which a pair ends with; ``key=…`` alone is the placeholder in help texts."""
    pair, name, value = found.group(0, "name", "value")
    if not is_secret(name) or pair.startswith("key="):
        return pair
    return f"{pair.removesuffix(value)}{_hidden(name, value)}"
