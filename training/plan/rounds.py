"""What a step exchanges in the mean over the steps of rounds of local steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from training.config.records import Phase
from training.plan.exchange import Exchange


def exchanges_per_step(counts: Sequence[int], local_steps: int | None) -> list[float]:
    """Return the mean exchanges of a step in each run of ``counts`` steps of a phase; its last step has one.

    >>> exchanges_per_step([10, 5], 4)  # after the steps 4, 8, 12 and 15
    [0.2, 0.4]
    >>> exchanges_per_step([10, 5], None)
    [1.0, 1.0]
    """
    length, steps = local_steps or 1, sum(counts)
    ended = [-(-end // length) if end == steps else end // length for end in accumulate(counts, initial=0)]
    return [(after - before) / count for (before, after), count in zip(pairwise(ended), counts, strict=True)]


@dataclass(frozen=True)
class StepExchange:
    """The share of an ``exchange`` between replicas that a step has, and what it exchanges within one.

    ``inside``: the exchange of the ranks of a node that is one replica, if there is one.
    """

    exchange: Exchange
    share: float
    inside: Exchange | None

    @classmethod
    def of(cls, phase: Phase, exchange: Exchange, share: float) -> "StepExchange":
        """Return that of a phase."""
        ranks, size = exchange.site.ranks_of_node, sum(exchange.sizes)
        averages = phase.replica_is_node and ranks > 1
        inside = Exchange(exchange.site, [size], "dense").among(ranks) if averages else None
        return cls(exchange, share, inside)

    def node_bytes(self) -> list[float] | None:
        """Return what each node sends, as :meth:`Exchange.node_bytes`; ``None`` where that is not known."""
        if not self.exchange.is_known:
            return None
        sent = [self.share * each for each in self.exchange.node_bytes()]
        if self.inside is None or len(sent) > 1:
            return sent
        return [sent[0] + self.inside.node_bytes()[0]]

    def seconds(self) -> float:
        """Return the seconds of its messages, where no computing hides any of them."""
        inside = 0.0 if self.inside is None else self.inside.seconds()[0]
        return inside + self.share * sum(self.exchange.seconds()[1])
