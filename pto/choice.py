"""The choice between computing in parts and locally: measured when planning, the same on all ranks."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pto.comm import Comm

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
