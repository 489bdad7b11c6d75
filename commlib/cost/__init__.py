"""What a step of a reducer costs, in closed form: the bytes that it sends, the seconds, and the computing.

Each reducer declares its own :class:`Cost` in its own file, put together from the pieces of this package.
:func:`commlib.predict` and :func:`commlib.bytes_sent` evaluate it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from commlib.cost.compute import Speeds, Work
from commlib.cost.step import Group, LinkSeconds, Step, union
from commlib.cost.traffic import (
    Nodes,
    by_link,
    other_messages_bytes,
    partition_lengths,
    ring_bytes,
    shards,
    sparse_bytes,
    sum_bytes,
)
from commlib.topology import LinkBytes

__all__ = [
    "Cost",
    "Group",
    "LinkSeconds",
    "Nodes",
    "Speeds",
    "Step",
    "Work",
    "by_link",
    "other_messages_bytes",
    "partition_lengths",
    "ring_bytes",
    "shards",
    "sparse_bytes",
    "sum_bytes",
    "union",
]


@dataclass(frozen=True)
class Cost:
    """What one step of a reducer costs.

    ``traffic(step, rank)``: payload bytes that a world rank sends: between nodes exact with ``is_exact``, as
    long as the selector returns ``k`` entries and the length of a message depends on their number alone; all
    others are upper bounds. ``seconds(step)``: of the messages of an average step. ``work(step)``: what one
    rank computes.
    """

    traffic: Callable[[Step, int], LinkBytes]
    seconds: Callable[[Step], LinkSeconds]
    work: Callable[[Step], Work]
    is_exact: bool
