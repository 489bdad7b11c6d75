"""A cluster's nodes, and the α-β model of its two links, as the virtual clock and the cost model use it."""

from collections.abc import Sequence
from dataclasses import dataclass

from commlib.errors import InvalidArgument

# The eager limit: Open MPI sends longer messages after a rendezvous with the receiver (TCP default: 64 KiB).
# On a slow link the receiver's answer queues behind its own messages; meanwhile the sender's link is idle.
EAGER_BYTES = 256 << 10
PIECES = 4  # long messages travel in pieces of the eager limit divided by this
_INTEGER_BYTES = 8


@dataclass(frozen=True)
class Link:
    """A message of ``b`` bytes takes ``alpha + b·beta`` seconds.

    ``alpha``: seconds until the first byte arrives; ``beta``: seconds a byte. ``incast``: the factor by
    which a byte takes longer where the cards of several nodes send to one card, which then drops packets.

    ``gap``: seconds after which a rank can begin its next message, while the one before is on its way. The
    default is the α-β model of the papers, where a message occupies its sender until it has left. ``busy``:
    the part of ``alpha`` in which messages wait for processors that ranks share: bytes travel meanwhile.

    >>> Link.of(microseconds=30, gbit_per_second=25).seconds(3_125_000)
    0.00103
    """

    alpha: float
    beta: float
    incast: float = 1.0
    gap: float | None = None
    busy: float = 0.0

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidArgument(f"{name}: expected seconds from 0, got {getattr(self, name)!r}")
        if not 1 <= self.incast < float("inf"):
            raise InvalidArgument(f"incast: expected a factor from 1, got {self.incast!r}")
        for name in ("gap", "busy"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= self.alpha:
                raise InvalidArgument(f"{name}: expected 0 to alpha, {self.alpha!r}, got {value!r}")

    @classmethod
    def of(cls, *, microseconds: float, gbit_per_second: float) -> "Link":
        if not gbit_per_second > 0:
            raise InvalidArgument(f"gbit_per_second: expected more than 0, got {gbit_per_second!r}")
        return cls(microseconds * 1e-6, 8e-9 / gbit_per_second)

    def seconds(self, payload_bytes: float) -> float:
        """Return the seconds of one message on the idle link."""
        return self.alpha + max(0.0, payload_bytes * self.beta - self.busy)

    def seconds_at_once(self, messages: int, payload_bytes: float) -> float:
        """Return the seconds of so many messages of one rank, each to another one."""
        turn = payload_bytes * self.beta
        if self.gap is None:
            return messages * self.seconds(payload_bytes)
        last = max(messages * turn, (messages - 1) * self.gap + turn)
        return self.alpha + max(last - self.busy, (messages - 1) * self.gap)

    def agreement_seconds(self, ranks: int, integers: int) -> float:
        """Return the seconds to all-gather some integers: ``α·⌈log₂ P⌉ + 8·i·(P − 1)·β``.

        Where the ``gap`` is known, each rank sends its own to all others at once, as Open MPI does.
        """
        if self.gap is not None and ranks > 1:
            return self.seconds_at_once(ranks - 1, _INTEGER_BYTES * integers)
        return (ranks - 1).bit_length() * self.alpha + _INTEGER_BYTES * integers * (ranks - 1) * self.beta


@dataclass(frozen=True)
class Network:
    """Links inside a node, one between each two ranks, and between nodes, where a node has one card.

    A rank sends one message at a time over each kind of link. The ranks of a node share its card: messages
    leave the node one after the other, and arrive one after the other.

    The default is HiTopKComm's cluster: NVLink (its V100 takes in 150 GB/s) and 25 Gbit/s Ethernet.
    """

    intra: Link = Link.of(microseconds=10, gbit_per_second=1200)
    inter: Link = Link.of(microseconds=30, gbit_per_second=25)

    def link(self, *, is_inter: bool) -> Link:
        return self.inter if is_inter else self.intra


def node_of_ranks(world_size: int, ranks_per_node: int | Sequence[int]) -> list[int]:
    """Return the node of every rank: a number fills node after node, a sequence gives each node's count.

    >>> node_of_ranks(5, 2), node_of_ranks(4, [3, 1])
    ([0, 0, 1, 1, 2], [0, 0, 0, 1])
    """
    if isinstance(ranks_per_node, int):
        if ranks_per_node < 1:
            raise InvalidArgument(f"ranks_per_node: expected at least 1, got {ranks_per_node}")
        return [rank // ranks_per_node for rank in range(world_size)]
    if min(ranks_per_node, default=0) < 1 or sum(ranks_per_node) != world_size:
        counts = list(ranks_per_node)
        raise InvalidArgument(f"ranks_per_node: expected counts that add to {world_size} ranks, got {counts}")
    return [node for node, count in enumerate(ranks_per_node) for _ in range(count)]
