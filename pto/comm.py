"""The communicator that pto needs: any object with these members, such as commlib's."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pto.errors import RanksDisagree

Array = npt.NDArray[Any]


class Comm(Protocol):
    """An ordered group of ranks; all of them call each method together, except ``now``."""

    rank: int
    size: int

    def now(self) -> float:
        """Return the seconds of a monotonic clock."""

    def allgather_ints(self, values: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return every rank's ``values``, shape ``(size, len(values))``; with no values it is a barrier."""

    def allgather_objects(self, value: Any) -> list[Any]:
        """Return every rank's picklable ``value``, in rank order."""

    def allgather(self, own: Array, parts: Sequence[Array]) -> None:
        """Fill ``parts[r]`` with the ``own`` of every rank ``r``; all know the lengths, which may be zero."""


def agree_on(comm: Comm, what: str, facts: Mapping[str, str]) -> None:
    """Raise :class:`RanksDisagree` on every rank unless all have the same ``facts``.

    Its message names ``what`` they describe, and the first fact that differs with its value on each rank.
    Equal facts cost an exchange of eight bytes a rank.
    """
    digest = hashlib.blake2b(repr(list(facts.items())).encode(), digest_size=8).digest()
    digests = comm.allgather_ints([int.from_bytes(digest, "little", signed=True)])
    if (digests == digests[0]).all():
        return
    raise RanksDisagree(f"{what}: {first_difference(comm.allgather_objects(dict(facts)))}")


def first_difference(everywhere: Sequence[Mapping[str, str]]) -> str:
    """Return the first fact that differs between ranks 0, 1, …, with its values and their ranks.

    >>> first_difference([{"tensor 0": "float32 (2,)"}, {"tensor 0": "float32 (3,)"}, {}])
    'tensor 0 is float32 (2,) on ranks [0], float32 (3,) on ranks [1], missing on ranks [2]'
    """
    for key in dict.fromkeys(key for facts in everywhere for key in facts):
        ranks_with: dict[str, list[int]] = {}
        for rank, facts in enumerate(everywhere):
            ranks_with.setdefault(facts.get(key, "missing"), []).append(rank)
        if len(ranks_with) > 1:
            return f"{key} is {', '.join(f'{value} on ranks {ranks}' for value, ranks in ranks_with.items())}"
    return "the order differs"
