"""Spans of the work of a rank's threads, and the offset of its clock from rank 0's.

>>> recorder = Recorder()
>>> recorder.add("select", start=2.0, end=2.5)
>>> recorder.spans
[Span(thread='loop', name='select', start=2.0, end=2.5)]
"""

import threading
from dataclasses import dataclass

from commlib.transport.base import Communicator

LOOP, ENGINE = "loop", "engine"

ROUNDS = 64  # of an exchange of a few bytes: the fastest of them bounds a clock's offset best


@dataclass(frozen=True)
class Span:
    """The work ``name`` of a thread from ``start`` to ``end``, in seconds of its rank's clock."""

    thread: str
    name: str
    start: float
    end: float


class Recorder:
    """The spans of one rank, by its transport's clock (``Communicator.now``), in the order of their ends.

    Spans of the thread that makes the recorder belong to the loop, all others to the engine. See
    :meth:`commlib.Reducer.record`.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._loop = threading.get_ident()

    def add(self, name: str, start: float, end: float) -> None:
        """Add a span of the thread that calls it."""
        thread = LOOP if threading.get_ident() == self._loop else ENGINE
        self.spans.append(Span(thread, name, start, end))


@dataclass(frozen=True)
class ClockOffset:
    """By how many ``seconds`` a rank's clock is ahead of rank 0's, to within ``error`` seconds."""

    seconds: float
    error: float


def clock_offset(comm: Communicator) -> ClockOffset:
    """Return the offset of this rank's clock; collective, with nothing else under way on ``comm``.

    No rank leaves an exchange before every rank has entered it. So this rank enters it before rank 0 leaves
    it, and leaves it after rank 0 has entered it: two bounds of the offset, whatever the network does.
    """
    entered, left = [], []
    for _ in range(ROUNDS):
        entered.append(comm.now())
        comm.allgather_ints([0])
        left.append(comm.now())
    entered_by_first, left_by_first = comm.allgather_objects((entered, left))[0]
    least = max(own - first for own, first in zip(entered, left_by_first, strict=True))
    most = min(own - first for own, first in zip(left, entered_by_first, strict=True))
    return ClockOffset((least + most) / 2, (most - least) / 2)
