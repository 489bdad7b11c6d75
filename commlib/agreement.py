"""Comparison of settings and state among ranks, by digests of eight bytes."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from commlib.errors import InvalidArgument

FLAG_BITS = 8


def digest(parts: Iterable[bytes]) -> int:
    """Return a 64-bit signed digest of some bytes, as ``Communicator.allgather_ints`` takes it.

    >>> digest([b"ab", b"c"]) == digest([b"abc"]) != digest([b"abd"])
    True
    """
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        state.update(part)
    return int.from_bytes(state.digest(), "little", signed=True)


def differing(digests: npt.NDArray[np.int64]) -> list[int]:
    """Return the ranks whose digest differs from rank 0's.

    >>> differing(np.array([7, 7, 8]))
    [2]
    """
    return np.flatnonzero(digests != digests[0]).tolist()


def with_flags(value: int, flags: int) -> int:
    """Return a digest with some flags in place of its lowest ``FLAG_BITS`` bits.

    >>> with_flags(0x7FFF, 2) == 0x7F02
    True
    """
    if not 0 <= flags < 1 << FLAG_BITS:
        raise InvalidArgument(f"flags: expected {FLAG_BITS} bits, got {flags!r}")
    return value >> FLAG_BITS << FLAG_BITS | flags


def without_flags(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the digests without the flags that :func:`with_flags` added.

    >>> without_flags(np.array([0x7F02, 0x7F01])).tolist()
    [127, 127]
    """
    return values >> FLAG_BITS


def flags_of(values: npt.NDArray[np.int64]) -> int:
    """Return the union of the flags of values that :func:`with_flags` returned.

    >>> flags_of(np.array([0x7F02, -0x7F00, 0x7F05]))
    7
    """
    return int(np.bitwise_or.reduce(values)) & (1 << FLAG_BITS) - 1


# Equal settings with different digests: the ranks compared messages of different exchanges.
CROSSED = (
    "their settings are equal, so ranks met in exchanges that do not belong together, as where two threads "
    "share a topology; give each loop a topology of its own: Topology(transport.mpi.world())"
)


def differences(settings: Sequence[Mapping[str, Any]]) -> str:
    """Return one line that names each setting that differs between ranks, with its value on each rank.

    >>> differences([{"size": 8, "density": 0.1}, {"size": 8, "density": 0.2}, {"size": 8, "density": 0.2}])
    'density is 0.1 on ranks [0], 0.2 on ranks [1, 2]'
    """
    lines = []
    for key in dict.fromkeys(key for each in settings for key in each):
        ranks_with: dict[str, list[int]] = {}
        for rank, each in enumerate(settings):
            ranks_with.setdefault(repr(each.get(key)), []).append(rank)
        if len(ranks_with) > 1:
            values = ", ".join(f"{value} on ranks {ranks}" for value, ranks in ranks_with.items())
            lines.append(f"{key} is {values}")
    return "; ".join(lines)


def check_settings(there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgument`` that names what differs between the settings of a state and those here."""
    others = [
        f"{key} is {there.get(key)!r} there and {here.get(key)!r} here"
        for key in {**here, **there}
        if there.get(key) != here.get(key)
    ]
    if others:
        raise InvalidArgument(f"state: expected one of equal settings, got another: {'; '.join(others)}")
