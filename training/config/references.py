"""References in configurations: ``${phases[0].epochs}`` to a value, ``${oc.env:NAME}`` to the environment.

``${.key}`` is a value of the same record, ``${..key}`` of the one around it. ``${oc.env:NAME,default}`` has a
default, and ``${oc.decode:${oc.env:NAME}}`` is what YAML makes of the text. The result is bounded as YAML is.
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

LocalRank = tuple[str | int, ...]

_ENVIRONMENT, _DECODED = "oc.env:", "oc.decode:"
_REFERENCE = re.compile(r"\$\{(?:\s*oc\.decode:\s*\$\{(oc\.env:[^${}]*)\}\s*|([^${}]*))\}")
_KEYS = re.compile(r"[^.\[\]:,\s]+(?:\.[^.\[\]:,\s]+|\[[^.\[\]:,\s]+\])*")
_EXPECTED = "${key}, ${oc.env:NAME} or ${oc.decode:${oc.env:NAME}}"
MOST_CHARACTERS = 1 << 20  # that stand in the place of references
_LARGEST = 1 << 63  # of whole numbers
_CONTROLS = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\ud800-\\udfff]")  # but for tabs and ends of lines


def keys_of(text: str) -> list[str] | None:
    """Return the keys that ``a.b[0].c`` names, one below the other; ``None`` where it names none.

    >>> keys_of("phases[0].epochs"), keys_of("phases..epochs")
    (['phases', '0', 'epochs'], None)
    """
    return re.split(r"\]?[.\[]", text.removesuffix("]")) if _KEYS.fullmatch(text) else None


def resolve(content: Any) -> Any:
    """Return the content of a configuration with values in place of its references.

    Those to the environment that stand for a secret stay: see :mod:`training.config.secrets`. Raises
    :class:`~training.config.bounded_yaml.Unreadable`, which begins with the place, for a reference to nothing
    or to what holds it, and for values that no configuration has.
    """
    return _Resolver(content).at(()).value


@dataclass(frozen=True)
class _Resolved:
    """A value, how many values it is made of, and how many of them lie in each other, at most."""

    value: Any
    nodes: int = 1
    depth: int = 1


class _Resolver:
    """Resolves each place once, however often it is referred to."""

    def __init__(self, content: Any) -> None:
        self._content = content
        self._resolved: dict[LocalRank, _Resolved] = {}
        self._open: set[LocalRank] = set()
        self._characters = 0

    def at(self, place: LocalRank) -> _Resolved:
        """Return what is at a place that is there."""
        if place in self._resolved:
            return self._resolved[place]
        if place in self._open or len(self._open) > 2 * DEEPEST:
            raise _wrong(place, "expected no reference to what holds it, and no long chain of them")
        raw = self._raw(place)
        self._open.add(place)
        resolved = self._resolved[place] = self._of(place, raw)
        self._open.discard(place)
        if resolved.nodes > MOST_NODES:
            raise _wrong(place, f"expected at most {MOST_NODES:,} values, got more")
        if resolved.depth > DEEPEST:
            raise _wrong(place, f"expected at most {DEEPEST} lists and records in each other, got more")
        return resolved

    def _of(self, place: LocalRank, raw: Any) -> _Resolved:
        if isinstance(raw, dict):
            for key in raw:
                _check(place, key, isinstance(key, str), "keys that are text")
            parts = {key: self.at((*place, key)) for key in raw}
            return _Resolved({key: part.value for key, part in parts.items()}, *_sums(list(parts.values())))
        if isinstance(raw, list):
            members = [self.at((*place, number)) for number in range(len(raw))]
            return _Resolved([member.value for member in members], *_sums(members))
        resolved = self._of_text(place, raw) if isinstance(raw, str) and "${" in raw else _Resolved(raw)
        _check_scalar(place, resolved.value)
        return resolved

    def _of_text(self, place: LocalRank, text: str) -> _Resolved:
        found = list(_REFERENCE.finditer(text))
        if "${" in _REFERENCE.sub("", text):
            raise _wrong(place, f"expected {_EXPECTED}, got {shown(text)}")
        if len(found) == 1 and found[0][0] == text:
            whole = self._referred(place, found[0])
            return _Resolved(text) if _is_kept(place, text, whole.value) else whole
        full = self._joined(place, text, lambda each: True)
        if _is_kept(place, text, full):
            full = self._joined(place, text, lambda each: not REFERENCE.fullmatch(each))
        return _Resolved(full)

    def _joined(self, place: LocalRank, text: str, is_replaced: Callable[[str], bool]) -> str:
        """Return a text with values in place of those references for which ``is_replaced``."""
        parts, end, length = [], 0, 0
        for each in _REFERENCE.finditer(text):
            value = self._referred(place, each).value if is_replaced(each[0]) else each[0]
            if isinstance(value, dict | list):
                raise _wrong(place, f"expected references to text or numbers inside of a text, got {each[0]}")
            parts += [text[end : each.start()], str(value)]
            end, length = each.end(), length + len(parts[-1])
            self._characters += len(parts[-1])
            if length > LONGEST_TEXT or self._characters > MOST_CHARACTERS:
                raise _wrong(place, f"expected at most {LONGEST_TEXT:,} characters, got more")
        return "".join([*parts, text[end:]])

    def _referred(self, place: LocalRank, reference: re.Match[str]) -> _Resolved:
        """Return what a reference at ``place`` stands for."""
        if reference[1] is not None:
            text = _from_environment(place, reference[1])
            try:
                return _Resolver(None if text is None else parse(text)).at(())
            except Unreadable as error:
                raise _wrong(place, f"{reference[0]}: {error}") from error
        body = reference[2].strip()
        if body.startswith(_ENVIRONMENT):
            return _Resolved(_from_environment(place, body))
        try:
            target = self._target(place, body)
        except (KeyError, IndexError, TypeError):
            got = shown(reference[0])
            raise _wrong(place, f"expected a reference to a key that is there, got {got}") from None
        if target is None:
            raise _wrong(place, f"expected {_EXPECTED}, got {shown(reference[0])}")
        return self.at(target)

    def _target(self, place: LocalRank, body: str) -> LocalRank | None:
        """Return the place that ``key``, ``.key`` or ``..key`` names; ``None`` where it is no such thing."""
        dots = len(body) - len(body.lstrip("."))
        keys = keys_of(body[dots:])
        if keys is None or dots > len(place):
            return None
        target, value = (place[:-dots], self._raw(place[:-dots])) if dots else ((), self._content)
        for key in keys:
            step = int(key) if isinstance(value, list) and key.isdecimal() else key
            target, value = (*target, step), value[step]
        return target

    def _raw(self, place: LocalRank) -> Any:
        value = self._content
        for key in place:
            value = value[key]
        return value


def _sums(parts: Sequence[_Resolved]) -> tuple[int, int]:
    """Return the nodes and the depth of what is made of these parts."""
    return 1 + sum(part.nodes for part in parts), 1 + max((part.depth for part in parts), default=0)


def _from_environment(place: LocalRank, body: str) -> str | None:
    name, comma, default = body.removeprefix(_ENVIRONMENT).partition(",")
    if (value := os.environ.get(name.strip())) is not None:
        return value
    if not comma:
        raise _wrong(place, f"expected the environment to have {shown(name.strip())[1:-1]}")
    default = default.strip()
    is_quoted = len(default) > 1 and default[0] in "'\"" and default[0] == default[-1]
    return default[1:-1] if is_quoted else None if default == "null" else default


def _is_kept(place: LocalRank, text: str, value: Any) -> bool:
    """Return whether a text has a reference to a secret, which stays until it is used."""
    if REFERENCE.search(text) is None:
        return False
    is_in_storage = place[:3] == ("dataset", "storage", "options")
    probe = REFERENCE.sub("x", text)
    is_in_url = mask(probe) != probe or (isinstance(value, str) and mask(value) != value)
    return is_in_storage or is_in_url or any(map(is_secret, place))


def _check_scalar(place: LocalRank, value: Any) -> None:
    if isinstance(value, str):
        _check(place, value, len(value) <= LONGEST_TEXT, f"at most {LONGEST_TEXT:,} characters")
        _check(place, value, not _CONTROLS.search(value), "no control characters")
        if MASK in value and any(map(is_secret, place)):
            raise _wrong(place, f"expected a reference such as ${{oc.env:NAME}}: {MASK} stands for a secret")
    elif isinstance(value, int):
        _check(place, value, abs(value) < _LARGEST, "a number of at most 64 bits")


def _check(place: LocalRank, value: Any, holds: bool, expected: str) -> None:
    if not holds:
        raise _wrong(place, f"expected {expected}, got {shown(value)}")


def _wrong(place: LocalRank, problem: str) -> Unreadable:
    return Unreadable(f"{written(place)}: {problem}" if place else problem)
