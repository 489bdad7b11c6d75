"""Every exception that commlib raises on purpose.

::

    CommlibError
    ├── UnknownName      a reducer, selector or codec that no table holds   (also a ValueError)
    ├── InvalidArgument  a value outside what its argument allows            (also a ValueError)
    ├── NonFiniteInput   a NaN or an infinity where numbers are compared     (also a ValueError)
    ├── RanksDisagree    ranks that should hold equal state do not          (also a ValueError)
    ├── GpuUnavailable, OutOfDeviceMemory    of commlib.gpu.errors
    └── PeerFailed       another rank stopped, so this one cannot go on
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

Member = TypeVar("Member")


class CommlibError(Exception):
    """Base of all exceptions of commlib."""


class UnknownName(CommlibError, ValueError):
    """A name that the table it was looked up in does not hold."""


class InvalidArgument(CommlibError, ValueError):
    """A value outside what its argument allows; the message names both and what was expected."""


class NonFiniteInput(CommlibError, ValueError):
    """A NaN or an infinity in a vector whose magnitudes were to be compared."""


class RanksDisagree(CommlibError, ValueError):
    """Ranks that should hold equal state, or should be at the same step, are not."""


class PeerFailed(CommlibError):
    """Another rank raised an exception or never answered."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``', did you mean "…"?'`` for the nearest known name, or nothing.

    >>> suggestion("hitopkk", ["dense", "hitopk"])
    ', did you mean "hitopk"?'
    """
    nearest = difflib.get_close_matches(str(name), list(known), n=1)
    return f', did you mean "{nearest[0]}"?' if nearest else ""


def look_up(table: Mapping[str, Member], kind: str, name: str) -> Member:
    """Return ``table[name]``; an unknown name raises ``UnknownName`` listing the known ones.

    >>> look_up({"dense": 1, "hitopk": 2}, "reducer", "hitopk")
    2
    """
    try:
        return table[name]
    except (KeyError, TypeError):  # not in it, or nothing that a table can hold
        known = ", ".join(table)
        raise UnknownName(f'unknown {kind} "{name}" (known: {known}){suggestion(name, table)}') from None
