"""Predictions of the seconds and bytes of a reducer's step, from its :class:`commlib.cost.Cost`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from commlib.cost import Cost, Nodes, Step
from commlib.density import check_density
from commlib.errors import InvalidArgument
from commlib.network import Link, Network
from commlib.reducers import check_reducer_options, reducer_class, reducer_options
from commlib.topology import LinkBytes
from commlib.work import Speeds


@dataclass(frozen=True)
class Prediction:
    """One step: seconds inside the node, between nodes and of computing, and the most that one rank sends."""

    intra: float
    inter: float
    sent: LinkBytes
    computing: float = 0.0

    @property
    def seconds(self) -> float:
        return self.intra + self.inter + self.computing


def predict(
    reducer: str,
    nodes: Nodes,
    size: int,
    density: float | None = None,
    network: Network | None = None,
    *,
    speeds: Speeds | None = None,
    **options: Any,
) -> Prediction:
    """Return the predicted cost of one step of a reducer; without ``speeds`` computing takes no time.

    ``nodes``: the world ranks of every node, as in ``Topology.nodes``; where they are uneven, the largest
    counts for all. ``size``: entries of the gradient. ``reducer``, ``density`` and ``options``: as for
    ``make_reducer``. Bytes are those that the busiest rank sends, seconds those of an average step.

    A reducer that declares no cost raises ``InvalidArgument``.

    >>> round(predict("hitopk", [range(8), range(8, 16)], 1_000_000, density=0.01).seconds * 1e6)
    220
    """
    if density is not None:
        options["density"] = density
    cost, step = _step(reducer, nodes, size, options, network or Network())
    ranks = [rank for node in nodes for rank in node]
    sent = (cost.traffic(step, rank) for rank in ranks)
    busiest = max(sent, key=lambda each: (each.inter, each.intra))
    intra, inter, computing = _seconds(cost, step, speeds)
    return Prediction(intra, inter, busiest, computing)


def predict_seconds(
    reducer: str,
    nodes: Nodes,
    size: int,
    *,
    network: Network | None = None,
    speeds: Speeds | None = None,
    settled: bool = True,
    **options: Any,
) -> float:
    """Return the seconds of :func:`predict` alone, which is quick for thousands of ranks, too.

    ``settled``: as of :class:`commlib.cost.Step`.
    """
    cost, step = _step(reducer, nodes, size, options, network or Network())
    return sum(_seconds(cost, replace(step, settled=settled), speeds))


def _seconds(cost: Cost, step: Step, speeds: Speeds | None) -> tuple[float, float, float]:
    """Return the seconds inside the node, between nodes and of computing; a single rank takes no time."""
    if step.ranks == 1:
        return 0.0, 0.0, 0.0
    intra, inter = cost.seconds(step)
    more_intra, more_inter = step.rest_of_comparison(intra + inter)
    computing = 0.0
    if speeds:
        computing = speeds.with_waits(cost.work(step).seconds(speeds, step.options.get("wire", "fp32")))
    return intra + more_intra, inter + more_inter, computing


def bytes_sent(reducer: str, nodes: Nodes, rank: int, size: int, **options: Any) -> LinkBytes:
    """Return the payload bytes that a world rank sends in one step, exact or at most: see ``Cost``.

    >>> bytes_sent("dense", [[0, 1], [2, 3]], rank=1, size=1000)
    LinkBytes(intra=0, inter=6000)
    """
    cost, step = _step(reducer, nodes, size, options, Network())
    return cost.traffic(step, rank)


def bytes_of_nodes(reducer: str, nodes: Nodes, size: int, **options: Any) -> list[LinkBytes]:
    """Return the payload bytes that the ranks of each node send together in an average step.

    Where a reducer's traffic is only a bound, the bytes are derived from its predicted seconds: entries are
    spread evenly, the few integers that ranks compare are included, and all nodes count as the largest.

    >>> bytes_of_nodes("dense", [[0, 1], [2, 3]], size=1000)
    [LinkBytes(intra=6000, inter=6000), LinkBytes(intra=6000, inter=6000)]
    """
    cost, step = _step(reducer, nodes, size, options, Network())
    step = replace(step, clustered=False)
    if cost.is_exact or step.ranks == 1:
        return [sum((cost.traffic(step, rank) for rank in node), LinkBytes()) for node in nodes]
    free, byte_a_second = Link(0.0, 0.0), Link(0.0, 1.0)
    intra, _ = cost.seconds(replace(step, network=Network(byte_a_second, free)))  # of each rank's own link
    _, inter = cost.seconds(replace(step, network=Network(free, byte_a_second)))  # of the node's card
    return [LinkBytes(round(len(node) * intra), round(inter)) for node in nodes]


def _step(
    reducer: str, nodes: Nodes, size: int, options: Mapping[str, Any], network: Network
) -> tuple[Cost, Step]:
    cost = reducer_class(reducer).cost
    if cost is None:
        raise InvalidArgument(f"reducer: expected one that declares what it costs, {reducer} does not")
    check_reducer_options(reducer, options)
    if not nodes or not all(nodes):
        raise InvalidArgument(f"nodes: expected the ranks of one node or more, got {nodes!r}")
    if size < 1:
        raise InvalidArgument(f"size: expected at least 1 entry, got {size!r}")
    complete = reducer_options(reducer) | dict(options)
    if "density" in complete:
        check_density(complete["density"])
    if complete.get("hierarchical"):
        cost = cost.hierarchical()
    return cost, Step(nodes, size, complete, network)
