"""Whether ranks hold the same: compared by digests of eight bytes."""

import hashlib
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


def digest(parts: Iterable[bytes]) -> int:
    """Return a 64-bit signed digest of some bytes, as ``Communicator.agree`` takes it.

    >>> digest([b"ab", b"c"]) == digest([b"abc"]) != digest([b"abd"])
    True
    """
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        state.update(part)
    return int.from_bytes(state.digest(), "little", signed=True)


def differing(digests: npt.NDArray[np.int64]) -> list[int]:
    """Return the ranks whose digest is not that of rank 0.

    >>> differing(np.array([7, 7, 8]))
    [2]
    """
    ranks: list[int] = np.flatnonzero(digests != digests[0]).tolist()
    return ranks
