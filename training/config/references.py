"""References in configurations: ``${phases[0].epochs}`` to a value, ``${oc.env:NAME}`` to the environment.

``${.key}`` is a value of the same record, ``${..key}`` of the one around it. ``${oc.env:NAME,default}`` has a
default, and ``${oc.decode:${oc.env:NAME}}`` is the text parsed as YAML. The result is bounded as YAML is.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from commlib.errors import shown
from datacache.urls import MASK, is_secret
from training.config.bounded_yaml import DEEPEST, LONGEST_TEXT, MOST_NODES, Unreadable, parse
from training.config.schema import written
from training.config.secrets import REFERENCE, mask

KeyPath = tuple[str | int, ...]

_ENVIRONMENT, _DECODED = "oc.env:", "oc.decode:"
_REFERENCE = re.compile(r"\$\{(?:\s*oc\.decode:\s*\$\{(oc\.env:[^${}]*)\}\s*|([^${}]*))\}")
_KEYS = re.compile(r"[^.\[\]:,\s]+(?:\.[^.\[\]:,\s]+|\[[^.\[\]:,\s]+\])*")
_EXPECTED = "${key}, ${oc.env:NAME} or ${oc.decode:${oc.env:NAME}}"
MOST_CHARACTERS = 1 << 20  # of all values of references inside of texts
_LARGEST = 1 << 63  # of integers
_CONTROLS = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\ud800-\\udfff]")  # except tabs and newlines


def keys_of(text: str) -> list[str] | None:
    """Return the keys that ``a.b[0].c`` names, one below the other; ``None`` where it names none.

    >>> keys_of("phases[0].epochs"), keys_of("phases..epochs")
    (['phases', '0', 'epochs'], None)
    """
    return re.split(r"\]?[.\[]", text.removesuffix("]")) if _KEYS.fullmatch(text) else None


def resolve(content: Any) -> Any:
    """Return the content of a configuration with values in place of its references.

    Those to the environment that stand for a secret stay: see :mod:`training.config.secrets`. Raises
    :class:`~training.config.bounded_yaml.Unreadable`, which begins with the key, for a dangling or circular
    reference, and for values that no configuration has.
    """
    return _Resolver(content).at(()).value


@dataclass(frozen=True)
class _Resolved:
    """A value, the number of values in it, and their nesting depth."""

    value: Any
    nodes: int = 1
    depth: int = 1


class _Resolver:
    """Resolves each path once, however often it is referred to."""

    def __init__(self, content: Any) -> None:
        self._content = content
        self._resolved: dict[KeyPath, _Resolved] = {}
        self._open: set[KeyPath] = set()
        self._characters = 0

    def at(self, path: KeyPath) -> _Resolved:
        """Return the value at an existing path."""
        if path in self._resolved:
            return self._resolved[path]
        if path in self._open or len(self._open) > 2 * DEEPEST:
            raise _wrong(path, "expected no reference to what holds it, and no long chain of them")
        raw = self._raw(path)
        self._open.add(path)
        resolved = self._resolved[path] = self._of(path, raw)
        self._open.discard(path)
        if resolved.nodes > MOST_NODES:
            raise _wrong(path, f"expected at most {MOST_NODES:,} values, got more")
        if resolved.depth > DEEPEST:
            raise _wrong(path, f"expected at most {DEEPEST} lists and records in each other, got more")
        return resolved

    def _of(self, path: KeyPath, raw: Any) -> _Resolved:
        if isinstance(raw, dict):
            for key in raw:
                _check(path, key, isinstance(key, str), "keys that are text")
            parts = {key: self.at((*path, key)) for key in raw}
            return _Resolved({key: part.value for key, part in parts.items()}, *_sums(list(parts.values())))
        if isinstance(raw, list):
            members = [self.at((*path, number)) for number in range(len(raw))]
            return _Resolved([member.value for member in members], *_sums(members))
        resolved = self._of_text(path, raw) if isinstance(raw, str) and "${" in raw else _Resolved(raw)
        _check_scalar(path, resolved.value)
        return resolved

    def _of_text(self, path: KeyPath, text: str) -> _Resolved:
        found = list(_REFERENCE.finditer(text))
        if "${" in _REFERENCE.sub("", text):
            raise _wrong(path, f"expected {_EXPECTED}, got {shown(text)}")
        if len(found) == 1 and found[0][0] == text:
            whole = self._referred(path, found[0])
            return _Resolved(text) if _is_retained(path, text, whole.value) else whole
        full = self._joined(path, text, lambda each: True)
        if _is_retained(path, text, full):
            full = self._joined(path, text, lambda each: not REFERENCE.fullmatch(each))
        return _Resolved(full)

    def _joined(self, path: KeyPath, text: str, is_replaced: Callable[[str], bool]) -> str:
        """Return a text with values in place of those references for which ``is_replaced``."""
        parts, end, length = [], 0, 0
        for each in _REFERENCE.finditer(text):
            value = self._referred(path, each).value if is_replaced(each[0]) else each[0]
            if isinstance(value, dict | list):
                raise _wrong(path, f"expected references to text or numbers inside of a text, got {each[0]}")
            parts += [text[end : each.start()], str(value)]
            end, length = each.end(), length + len(parts[-1])
            self._characters += len(parts[-1])
            if length > LONGEST_TEXT or self._characters > MOST_CHARACTERS:
                raise _wrong(path, f"expected at most {LONGEST_TEXT:,} characters, got more")
        return "".join([*parts, text[end:]])

    def _referred(self, path: KeyPath, reference: re.Match[str]) -> _Resolved:
        """Return the value of a reference at ``path``."""
        if reference[1] is not None:
            text = _from_environment(path, reference[1])
            try:
                return _Resolver(None if text is None else parse(text)).at(())
            except Unreadable as error:
                raise _wrong(path, f"{reference[0]}: {error}") from error
        body = reference[2].strip()
        if body.startswith(_ENVIRONMENT):
            return _Resolved(_from_environment(path, body))
        try:
            target = self._target(path, body)
        except (KeyError, IndexError, TypeError):
            got = shown(reference[0])
            raise _wrong(path, f"expected a reference to a key that is there, got {got}") from None
        if target is None:
            raise _wrong(path, f"expected {_EXPECTED}, got {shown(reference[0])}")
        return self.at(target)

    def _target(self, path: KeyPath, body: str) -> KeyPath | None:
        """Return the path that ``key``, ``.key`` or ``..key`` names; ``None`` for anything else."""
        dots = len(body) - len(body.lstrip("."))
        keys = keys_of(body[dots:])
        if keys is None or dots > len(path):
            return None
        target, value = (path[:-dots], self._raw(path[:-dots])) if dots else ((), self._content)
        for key in keys:
            step = int(key) if isinstance(value, list) and key.isdecimal() else key
            target, value = (*target, step), value[step]
        return target

    def _raw(self, path: KeyPath) -> Any:
        value = self._content
        for key in path:
            value = value[key]
        return value


def _sums(parts: Sequence[_Resolved]) -> tuple[int, int]:
    """Return the number of nodes and the depth of a value with these parts."""
    return 1 + sum(part.nodes for part in parts), 1 + max((part.depth for part in parts), default=0)


def _from_environment(path: KeyPath, body: str) -> str | None:
    name, comma, default = body.removeprefix(_ENVIRONMENT).partition(",")
    if (value := os.environ.get(name.strip())) is not None:
        return value
    if not comma:
        raise _wrong(path, f"expected the environment to have {shown(name.strip())[1:-1]}")
    default = default.strip()
    is_quoted = len(default) > 1 and default[0] in "'\"" and default[0] == default[-1]
    return default[1:-1] if is_quoted else None if default == "null" else default


def _is_retained(path: KeyPath, text: str, value: Any) -> bool:
    """Return whether a text has a reference to a secret, which stays until it is used."""
    if REFERENCE.search(text) is None:
        return False
    is_in_storage = path[:3] == ("dataset", "storage", "options")
    probe = REFERENCE.sub("x", text)
    is_in_url = mask(probe) != probe or (isinstance(value, str) and mask(value) != value)
    return is_in_storage or is_in_url or any(map(is_secret, path))


def _check_scalar(path: KeyPath, value: Any) -> None:
    if isinstance(value, str):
        _check(path, value, len(value) <= LONGEST_TEXT, f"at most {LONGEST_TEXT:,} characters")
        _check(path, value, not _CONTROLS.search(value), "no control characters")
        if MASK in value and any(map(is_secret, path)):
            raise _wrong(path, f"expected a reference such as ${{oc.env:NAME}}: {MASK} stands for a secret")
    elif isinstance(value, int):
        _check(path, value, abs(value) < _LARGEST, "a number of at most 64 bits")


def _check(path: KeyPath, value: Any, holds: bool, expected: str) -> None:
    if not holds:
        raise _wrong(path, f"expected {expected}, got {shown(value)}")


def _wrong(path: KeyPath, problem: str) -> Unreadable:
    return Unreadable(f"{written(path)}: {problem}" if path else problem)
