"""YAML that may be damaged or malicious: the time and memory to read it are bounded.

Values are those of YAML 1.1 with two exceptions: ``1e-3`` is a number, a date is text. Keys are unique.
"""

import os
import re
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from commlib.errors import shown

MOST_BYTES = 1 << 18  # of a file
MOST_NODES = 10_000  # values, with each alias and each reference counted as its expansion
DEEPEST = 32  # nesting of lists and records
LONGEST_TEXT = 10_000  # characters

_TAG = "tag:yaml.org,2002:"
_KINDS = frozenset(f"{_TAG}{kind}" for kind in ("map", "seq", "str", "int", "float", "bool", "null", "merge"))
_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")  # YAML 1.1 requires a point and a sign
# Raised by YAML's constructors for a value that does not match its tag, such as `!!int x`.
_NO_VALUE = (ValueError, KeyError, TypeError, AttributeError, OverflowError)


class Unreadable(ValueError):
    """A text that is not YAML, or exceeds the bounds; the message is one line."""


def read_text(path: Path) -> str:
    """Return the text of a regular file of at most ``MOST_BYTES``.

    Raises ``FileNotFoundError``, and :class:`Unreadable` for all other read errors.
    """
    try:
        # Non-blocking: opening a pipe without a writer would wait.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            content = file.read(MOST_BYTES + 1) if is_regular else b""
        text = content.decode() if len(content) <= MOST_BYTES else ""
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # a path that no file can have, text that is not UTF-8
        raise Unreadable(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not is_regular:
        raise Unreadable("cannot be read: expected a regular file")
    if len(content) > MOST_BYTES:
        raise Unreadable(f"cannot be read: expected at most {MOST_BYTES:,} bytes, got more")
    return text


def parse(text: str) -> Any:
    """Return the value of a YAML text: records, lists, text, numbers, truth values and ``None``.

    Raises :class:`Unreadable`. Aliases of YAML are objects that the result holds more than once.
    """
    try:
        return _Loader(text).get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        kind = "" if isinstance(error, _Refused) else "not YAML: "
        raise Unreadable(f"{line}{kind}{what}") from error
    except _NO_VALUE as error:
        raise Unreadable(f"not YAML: a value is not of the kind that it is said to be: {error}") from error


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which checks each node before it constructs a value."""

    yaml_implicit_resolvers = {
        first: [each for each in resolvers if each[0] in _KINDS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._level = self._nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        self._level, self._nodes = self._level + 1, self._nodes + 1
        _check_bounds(mark, nodes=self._nodes, level=self._level)
        node = super().compose_node(parent, index)
        self._level -= 1
        return node

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            _measure(node, 1, {})
        return node


_Loader.add_implicit_resolver(f"{_TAG}float", _EXPONENT, list("-+0123456789"))


class _Refused(yaml.MarkedYAMLError):
    """YAML that exceeds the bounds or is not allowed here."""

    def __init__(self, mark: yaml.Mark, expected: str) -> None:
        super().__init__(problem=f"expected {expected}", problem_mark=mark)


def _check_bounds(mark: yaml.Mark, *, nodes: int = 0, level: int = 0, characters: int = 0) -> None:
    if nodes > MOST_NODES:
        raise _Refused(mark, f"at most {MOST_NODES:,} values, got more")
    if level > DEEPEST:
        raise _Refused(mark, f"at most {DEEPEST} lists and records in each other, got more")
    if characters > LONGEST_TEXT:
        raise _Refused(mark, f"at most {LONGEST_TEXT:,} characters, got {characters:,}")


def _measure(node: Any, level: int, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return how many values a node stands for, and their nesting depth.

    ``known``: those of nodes, by identity, which aliases may stand for again. ``level``: of this one.
    """
    if id(node) not in known:
        _check_bounds(node.start_mark, level=level)  # refuses an alias inside of what it stands for, too
        parts = [_measure(each, level + 1, known) for each in _parts(node)]
        known[id(node)] = (
            1 + sum(nodes for nodes, _ in parts),
            1 + max((deep for _, deep in parts), default=0),
        )
    nodes, deep = known[id(node)]
    _check_bounds(node.start_mark, nodes=nodes, level=level + deep - 1)
    return nodes, deep


def _parts(node: Any) -> list[Any]:
    """Return the value of a node, after a check of the node itself."""
    if node.tag not in _KINDS:
        kind = node.tag.replace(_TAG, "!!")
        expected = "text, a number, true, false, null, a list or a record"
        raise _Refused(node.start_mark, f"{expected}, got {shown(kind)}")
    if isinstance(node, yaml.ScalarNode):
        _check_bounds(node.start_mark, characters=len(node.value))
        return []
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
    for name in [name for name, count in names.items() if count > 1]:
        raise _Refused(node.start_mark, f"every key once, got {shown(name)} twice")
    return [each for pair in node.value for each in pair]
