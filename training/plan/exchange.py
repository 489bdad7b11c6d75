"""What the exchange of one gradient costs on a site: bytes on the slow link, and seconds of its messages.

In a step, messages of a bucket hide behind the layers that the backward pass computes later.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

from commlib import Link, LinkBytes, Network, bytes_of_nodes, predict_seconds
from commlib.reducers import reducer_class
from commlib.rounds import Schedule
from commlib.tuning.tuner import speeds_with
from training.plan.site import Site, nodes_of

FORWARD = 1 / 3  # of computing: the backward pass has two products for each of the forward pass
# Of ranks that share cores the last one ends its computing LAG times the computing later, and at most
# LONGEST_LAG_SECONDS: fitted to steps of four and of eight ranks on two cores, those of docs/validation.md.
LAG, LONGEST_LAG_SECONDS = 0.3, 60e-3
# Ranks on a core of which one computes while messages of another are on their way. Of four nothing was
# hidden: those that wait ask MPI again and again, and so take the core from the one that computes.
MOST_THAT_HIDE = 2


@dataclass(frozen=True)
class Exchange:
    """One exchange of a gradient whose buckets have ``sizes`` entries.

    ``options``: of the reducer, without wrappers, which cost no message.
    """

    site: Site
    sizes: Sequence[int]
    reducer: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        return reducer_class(self.reducer).cost is not None

    def at(self, density: float) -> "Exchange":
        return replace(self, options={**self.options, "density": density})

    def among(self, ranks: int) -> "Exchange":
        """Return the same among another number of ranks, on nodes of the same size."""
        return replace(self, site=replace(self.site, nodes=nodes_of(ranks, self.site.ranks_of_node)))

    def node_bytes(self) -> list[int]:
        """Return the bytes that all ranks of each node send over the slow link; of one node: inside it."""
        if self.site.ranks == 1:
            return [0]
        buckets = (bytes_of_nodes(self.reducer, self.site.nodes, size, **self.options) for size in self.sizes)
        sent = [sum(of_node, LinkBytes()) for of_node in zip(*buckets, strict=True)]
        return [each.inter if len(sent) > 1 else each.intra for each in sent]

    def rank_bytes(self) -> LinkBytes | None:
        """Return the bytes that a rank sends of the whole gradient, on average; ``None``: not known."""
        if not self.is_known:
            return None
        sent = bytes_of_nodes(self.reducer, self.site.nodes, sum(self.sizes), **self.options)
        total = sum(sent, LinkBytes())
        return LinkBytes(total.intra // self.site.ranks, total.inter // self.site.ranks)

    def seconds(self) -> list[float]:
        """Return the seconds of each bucket."""
        site, options = self.site, self.options
        if site.ranks == 1:
            return [0.0] * len(self.sizes)
        speeds = None if site.speeds is None else speeds_with(site.speeds, self.reducer, options)
        return [
            predict_seconds(self.reducer, site.nodes, size, network=site.network, speeds=speeds, **options)
            for size in self.sizes
        ]

    def messages_seconds(self, network: Network | None = None) -> float:
        """Return the seconds of the whole gradient's messages alone, over other links if they are given."""
        links = network or self.site.network
        return predict_seconds(self.reducer, self.site.nodes, sum(self.sizes), network=links, **self.options)

    def messages(self) -> int:
        """Estimate the messages of all ranks: each sends one for each latency of the cost model."""
        second = Link(1.0, 0.0)
        return round(self.site.ranks * self.messages_seconds(Network(second, second)))


def exchanges_per_step(counts: Sequence[int], schedule: Schedule) -> list[list[float]]:
    """Return the mean exchanges of each fragment in a step, for each run of ``counts`` steps of a phase.

    After its last step a phase exchanges all fragments, in place of what would arrive then or later.

    >>> exchanges_per_step([10, 5], Schedule(4))  # after the steps 4, 8, 12 and 15
    [[0.2], [0.4]]
    >>> exchanges_per_step([10, 6], Schedule(8, fragments=2, delay=1))  # 8, 16 and 4, 12, 16
    [[0.1, 0.1], [0.16666666666666666, 0.3333333333333333]]
    >>> exchanges_per_step([10, 5], Schedule(1))  # no steps are local
    [[1.0], [1.0]]
    """
    steps, last = sum(counts), sum(counts) - schedule.delay - 1

    def until(step: int, fragment: int) -> int:
        left = (min(step, last) - fragment * schedule.interval) // schedule.steps + (fragment > 0)
        return max(0, left) + (step == steps)

    runs = pairwise(accumulate(counts, initial=0))
    numbers = range(schedule.fragments)
    return [[(until(high, each) - until(low, each)) / (high - low) for each in numbers] for low, high in runs]


@dataclass(frozen=True)
class StepExchange:
    """An average step's exchanges: fragment ``parts[i]`` goes between replicas ``shares[i]`` times a step.

    In each step the ranks of a replica, which may be one, exchange their gradients ``inside``. ``delay``:
    steps that replicas take beside an exchange. ``unhidden``: the part of each share that nothing hides,
    since replicas wait for it at the end of the phase.
    """

    parts: Sequence[Exchange]
    shares: Sequence[float]
    inside: Exchange
    delay: int
    unhidden: float = 0.0

    def node_bytes(self) -> list[float] | None:
        """Return the bytes of each node, as :meth:`Exchange.node_bytes`; ``None`` if they are not known."""
        if not self.parts[0].is_known:
            return None
        of_parts = [part.node_bytes() for part in self.parts]
        sent = [
            sum(share * each for share, each in zip(self.shares, of_node, strict=True))
            for of_node in zip(*of_parts, strict=True)
        ]
        return sent if len(sent) > 1 else [sent[0] + self.inside.node_bytes()[0]]

    @property
    def peak_bytes(self) -> int | None:
        """Return the bytes of the busiest node in one exchange, that of the largest fragment."""
        return max(max(part.node_bytes()) for part in self.parts) if self.parts[0].is_known else None

    def seconds_of_parts(self) -> list[float]:
        return [sum(part.seconds()) for part in self.parts]

    def room(self, computing: float) -> float:
        """Return the seconds in which replicas take the steps of a delay."""
        return self.delay * (computing + self.inside.seconds()[0])

    def seconds(self, computing: float) -> tuple[float, float]:
        """Return the seconds of the messages, and those of them that ``computing`` of a delay hides."""
        whole, hidden, room = self.inside.seconds()[0], 0.0, self.room(computing)
        for seconds, share in zip(self.seconds_of_parts(), self.shares, strict=True):
            whole += share * seconds
            hidden += (share - self.unhidden) * min(seconds, room)
        return whole, hidden


def lag_seconds(computing: float, ranks_per_core: float) -> float:
    """Return how much later the last of the ranks ends its ``computing`` seconds, if they share cores.

    >>> lag_seconds(0.1, 2.0), lag_seconds(0.1, 1.0)
    (0.03, 0.0)
    """
    return min(LAG * computing, LONGEST_LAG_SECONDS) if ranks_per_core > 1 else 0.0


def overlapped_seconds(computing: float, sizes: Sequence[int], messages: Sequence[float]) -> float:
    """Return the seconds of a step in which messages of a bucket begin once its gradients are computed.

    ``sizes``: entries of each bucket, in the order of the layers, the last of which is ready first. A layer
    is assumed to compute for a time in proportion to its weights. ``messages``: seconds of each bucket's
    messages; buckets are sent one after the other.

    >>> overlapped_seconds(9.0, [10, 20], [1.0, 5.0])  # forward to 3, layers to 7 and 9
    13.0
    """
    shares = [size / sum(sizes) for size in sizes]
    ready, end = FORWARD * computing, 0.0
    for share, seconds in zip(reversed(shares), reversed(messages), strict=True):
        ready += (1 - FORWARD) * computing * share
        end = max(end, ready) + seconds
    return end
