"""The communicator that pto needs, such as commlib's, and the choice between computing in parts and locally.

Any object with ``Comm``'s members will do. The choice is measured when planning, the same on all ranks.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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


RUNS, WARM_UP_RUNS = 7, 2


@dataclass(frozen=True)
class Seconds:
    """Seconds of a call on the slowest rank: computing everything, computing a part, the exchange."""

    whole: float
    part: float
    exchange: float


@dataclass(frozen=True)
class Choice:
    """Whether the ranks compute in parts, the reason in one line, and the times (``None``: not measured)."""

    in_parts: bool
    reason: str
    seconds: Seconds | None = None


def choose(name: str, seconds: Seconds, way: str = "in parts") -> Choice:
    """Return the faster of computing everything and computing parts with their exchange.

    >>> choose("norms", Seconds(whole=1.2e-3, part=4e-4, exchange=1e-4)).reason
    'norms in parts: 1.2 ms of computing becomes 0.4 ms, and their exchange takes 0.1 ms'
    >>> choose("norms", Seconds(whole=1.2e-3, part=4e-4, exchange=1e-3)).reason
    'norms locally: 1.2 ms of computing would become 0.4 ms, but their exchange takes 1 ms'
    """
    whole, part, exchange = map(_text, (seconds.whole, seconds.part, seconds.exchange))
    if seconds.part + seconds.exchange < seconds.whole:
        reason = f"{name} {way}: {whole} of computing becomes {part}, and their exchange takes {exchange}"
        return Choice(True, reason, seconds)
    reason = f"{name} locally: {whole} of computing would become {part}, but their exchange takes {exchange}"
    return Choice(False, reason, seconds)


def rounds(comm: Comm, action: Callable[[], object]) -> npt.NDArray[np.float64]:
    """Return the seconds that every rank took in each of several runs, shape ``(size, runs)``.

    All ranks call it together and get the same result; a barrier precedes each run.
    """
    nanoseconds = []
    for _ in range(WARM_UP_RUNS + RUNS):
        comm.allgather_ints([])
        start = comm.now()
        action()
        nanoseconds.append(round(1e9 * (comm.now() - start)))
    return comm.allgather_ints(nanoseconds[WARM_UP_RUNS:]) / 1e9


def slowest(seconds: npt.NDArray[np.float64]) -> float:
    """Return the median over the runs of the slowest rank's seconds."""
    return float(np.median(seconds.max(axis=0)))


def _text(seconds: float) -> str:
    return f"{np.format_float_positional(1e3 * seconds, precision=3, fractional=False, trim='-')} ms"
