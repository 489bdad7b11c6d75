"""Which ranks share a node, and the communicators that follow from it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from commlib.errors import InvalidArgument
from commlib.network import node_of_ranks
from commlib.transport.base import Closing, Communicator
from commlib.vectors import partition

Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LinkBytes:
    """Payload bytes over the fast links inside nodes and the slow ones between them."""

    intra: int = 0
    inter: int = 0

    def __add__(self, other: "LinkBytes") -> "LinkBytes":
        return LinkBytes(self.intra + other.intra, self.inter + other.inter)

    def __sub__(self, other: "LinkBytes") -> "LinkBytes":
        return LinkBytes(self.intra - other.intra, self.inter - other.inter)


@dataclass(frozen=True)
class Traffic:
    """What one rank sent and received, by link."""

    sent: LinkBytes = LinkBytes()
    received: LinkBytes = LinkBytes()

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.sent + other.sent, self.received + other.received)

    def __sub__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.sent - other.sent, self.received - other.received)


class Topology(Closing):
    """The ranks of ``world`` by node, and the communicators of this rank.

    Nodes are discovered by host name, or emulated with ``ranks_per_node``: the arguments of
    :func:`commlib.network.node_of_ranks`.

    ``nodes``: the world ranks of every node. ``node_index`` i and ``local_rank`` j: this rank's node and
    number in it. ``node``: communicator of the ranks of this node. ``stream``: of the ranks whose local rank
    is j, across nodes, in the order of their ranks. ``streams``: how many of these reach every node: with
    uneven nodes as many as the smallest node has ranks, and a rank with ``local_rank >= streams`` takes no
    part between the nodes.

    ``flags``: a function that returns eight bits, which reducers send in each step with the digest of their
    settings; ``flags`` of :class:`commlib.Report` is the union over all ranks. So ranks can agree on
    something, such as to stop after this step, without an additional exchange.

    ``world`` and ``stream`` send long messages in pieces where there are several nodes.

    A context manager: ``close()`` frees ``node`` and ``stream``, and leaves the caller's ``world`` open.
    """

    def __init__(self, world: Communicator, ranks_per_node: int | Sequence[int] | None = None) -> None:
        hosts = world.allgather_objects(world.host)
        order = {host: node for node, host in enumerate(dict.fromkeys(hosts))}
        found = [order[host] for host in hosts]
        node_of_rank = found if ranks_per_node is None else _emulate(hosts, ranks_per_node)
        self.world, self.ranks_per_node = world, ranks_per_node
        self.nodes = tuple(
            tuple(rank for rank in range(world.size) if node_of_rank[rank] == node)
            for node in range(max(node_of_rank) + 1)
        )
        self.node_index = node_of_rank[world.rank]
        self.local_rank = self.nodes[self.node_index].index(world.rank)
        self.streams = min(map(len, self.nodes))
        self.node = world.split(self.node_index)
        self.stream = world.split(self.local_rank)
        world.in_pieces = self.stream.in_pieces = len(self.nodes) > 1
        self.flags: Callable[[], int] = lambda: 0
        is_neighbour = np.array([node == self.node_index for node in node_of_rank])
        self._links = np.array([is_neighbour, ~is_neighbour], np.int64)  # of each rank: intra, inter

    def copy(self) -> "Topology":
        """Return the same ranks with communicators of their own, also ``world``; all ranks call it together.

        For exchanges that a thread makes while the caller makes others. The flags are those of this topology.
        """
        copy = Topology(self.world.split(0), self.ranks_per_node)
        copy.flags = lambda: self.flags()  # which is set later
        return copy

    def close(self) -> None:
        """Free the communicators of the node and of the stream, on all ranks together; not ``world``."""
        self.stream.close()
        self.node.close()

    @property
    def slowest_link(self) -> str:
        """Return ``inter``, or ``intra`` where all ranks share one node."""
        return "inter" if len(self.nodes) > 1 else "intra"

    def shard_bounds(self, size: int) -> npt.NDArray[np.int64]:
        """Return the bounds of this node's shards: one per stream, and empty ones for ranks without one."""
        beyond = self.node.size - self.streams
        return np.pad(partition(size, self.streams), (0, beyond), mode="edge")

    @property
    def traffic(self) -> Traffic:
        """The rank's payload over ``world``, ``node`` and ``stream`` since they were made."""
        return Traffic(
            self._by_link(self.world.sent_bytes, self.node.sent_bytes, self.stream.sent_bytes),
            self._by_link(self.world.received_bytes, self.node.received_bytes, self.stream.received_bytes),
        )

    def _by_link(self, world: Bytes, node: Bytes, stream: Bytes) -> LinkBytes:
        intra, inter = (self._links @ world).tolist()
        return LinkBytes(intra + sum(node.tolist()), inter + sum(stream.tolist()))


def _emulate(hosts: Sequence[str], ranks_per_node: int | Sequence[int]) -> list[int]:
    """Return the node of every rank for ``ranks_per_node``; no node may span machines."""
    nodes = node_of_ranks(len(hosts), ranks_per_node)
    for node in sorted(set(nodes)):
        machines = list(dict.fromkeys(host for host, own in zip(hosts, nodes, strict=True) if own == node))
        if len(machines) > 1:
            raise InvalidArgument(
                f"ranks_per_node: expected nodes within one machine, got {ranks_per_node}, "
                f"which makes node {node} of ranks on {' and '.join(machines)}"
            )
    return nodes
