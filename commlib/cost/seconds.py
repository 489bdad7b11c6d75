"""Seconds of one step of each reducer, by the α-β model, on nodes of equally many ranks.

The papers' equations count what one rank sends over one kind of link; here the ranks of a node share its
card, and every message of ours is counted, also those that only announce lengths. How many entries a sum
holds follows from uniformly random selections (SparCML, appendix B.1); real ones overlap and crowd together.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from commlib.cost.compute import WORK, Speeds
from commlib.cost.step import HEADER_BYTES, Group, Step, union
from commlib.cost.traffic import FORMULAS, Nodes, sparse_bytes
from commlib.density import check_density, entries
from commlib.errors import InvalidArgument, look_up
from commlib.network import Network
from commlib.topology import LinkBytes
from commlib.vectors import VALUE_BYTES, index_dtype
from commlib.wire import VALUE_CODECS, make_codec

# Ok-Topk's periods τ and τ′, over which the steps that re-evaluate are spread.
REPARTITION_EVERY, REEVALUATE_EVERY = 64, 32


@dataclass(frozen=True)
class Prediction:
    """One step: seconds inside the node, between nodes and of computing, and the most that one rank sends."""

    intra: float
    inter: float
    sent: LinkBytes
    computing: float = 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds of the whole step."""
        return self.intra + self.inter + self.computing


Stages = tuple[float, float]  # seconds inside the node, and between nodes


def _flat(step: Step, seconds: float) -> Stages:
    return (0.0, seconds) if step.world.nodes > 1 else (seconds, 0.0)


def dense(step: Step) -> Stages:
    """``2·(P − 1)·(α + d/P·β)``, the ring (gTop-k, equation 5), at the pace of its slowest link."""
    hops = 2 * (step.world.size - 1)
    part = VALUE_BYTES * step.size / step.world.size
    return _flat(step, hops * step.world.slowest.seconds(part) + step.synchronize_step())


def torus2d(step: Step) -> Stages:
    """``(n − 1)·(α + d/n·β)`` twice inside, ``(m − 1)·(α + d/(n·m)·β)`` twice between (HiTopKComm, 5.3)."""
    inside = step.node.exchange(VALUE_BYTES * step.shard) + step.node.ring(VALUE_BYTES * step.shard)
    between = step.stream.ring(VALUE_BYTES * step.shard / step.world.nodes)
    intra, inter = _flat(step, step.synchronize_step())
    return intra + inside, inter + 2 * between


def allgather(step: Step) -> Stages:
    """``(P − 1)·(α + 2k·β)``; HiTopKComm's equation 3 and gTop-k's 6 have ``α·log P`` for the latency."""
    return _flat(step, step.synchronize_step(1) + step.world.ring(step.message(step.k, step.size)))


def gtopk(step: Step) -> Stages:
    """``2·log₂ P·(α + 2k·β)`` (gTop-k, equation 7), with a header before each message.

    Where ``P`` is no power of two, a rank that sat a round out has sent before it is waited for.
    """
    world = step.world
    upwards, downwards = step.message(step.k, step.size), sparse_bytes(step.k, step.size)
    done = [0.0] * world.size  # when each rank has merged, and later when it has passed on
    distances = [1 << exponent for exponent in range((world.size - 1).bit_length())]
    for distance in distances:
        hop = world.hop(distance, upwards)
        for rank in range(0, world.size - distance, 2 * distance):
            done[rank] = max(done[rank], done[rank + distance] + hop)
    for distance in reversed(distances):
        hop = world.hop(distance, downwards)
        for rank in range(0, world.size - distance, 2 * distance):
            done[rank] += hop
            done[rank + distance] = done[rank]
    return _flat(step, step.synchronize_step() + max(done))


def ssar_doubling(step: Step) -> Stages:
    """``log₂ P·α + Σₜ 2·|Kₜ|·β``, ``|Kₜ|`` entries of ``2ᵗ`` ranks (SparCML, 5.3.1).

    Beyond a power of two, one hop before and one after, with the whole sum.
    """
    world = step.world
    within = 1 << (world.size.bit_length() - 1)
    seconds = step.synchronize_step()
    beyond = world.size - within
    for exponent in range(within.bit_length() - 1):
        ranks = (1 << exponent) + min(1 << exponent, beyond)
        held = union(ranks, step.k, step.size)
        seconds += _side_by_side(world, 1 << exponent, world.ranks, step.message(held, step.size))
    if beyond:
        whole = round(union(world.size, step.k, step.size))
        for message_bytes in (step.message(step.k, step.size), sparse_bytes(whole, step.size)):
            seconds += _side_by_side(world, within, min(beyond, world.ranks), message_bytes)
    return _flat(step, seconds)


def _side_by_side(world: Group, distance: int, senders: int, message_bytes: float) -> float:
    """Return the seconds of a hop that ``senders`` of every node make at the same time, through one card."""
    alone = world.hop(distance, message_bytes)
    if distance < world.ranks or world.nodes == 1:
        return alone
    return alone + (senders - 1) * (HEADER_BYTES + message_bytes) * world.network.inter.beta


def _split(step: Step) -> float:
    """Agree, swap lengths, and send each range's ``k/P`` entries to its owner."""
    world = step.world
    part = step.message(step.k / world.size, step.size / world.size)
    return step.synchronize_step() + world.allgather_ints(1) + world.exchange(part)


def ssar_split(step: Step) -> Stages:
    """``2·(P − 1)·α`` and ``(P − 1)/P·2k·β``, then the sums (SparCML, 5.3.2)."""
    own = step.size / step.world.size
    sums = step.message(union(step.world.size, step.k, step.size) / step.world.size, own)
    return _flat(step, _split(step) + step.world.allgather_ints(1) + step.world.ring(sums))


def dsar_split(step: Step) -> Stages:
    """``2·(P − 1)·α``, ``(P − 1)/P·2k·β`` and ``(P − 1)/P·d·β`` (SparCML, 5.3.3)."""
    sums = step.sums.message_bytes(round(step.size / step.world.size))
    return _flat(step, _split(step) + step.world.ring(sums))


def oktopk(step: Step) -> Stages:
    """``6k·(P − 1)/P`` words at most (Ok-Topk, equation 3), on average over the steps of its periods."""
    return _flat(step, step.synchronize_step() + _oktopk(step, step.world, step.k, step.size))


def _oktopk(step: Step, group: Group, k: float, size: float) -> float:
    """Split and reduce, then balance and gather, among the ranks of ``group``."""
    parts = k / group.size
    split = group.allgather_ints(1) + group.exchange(step.message(parts, size / group.size))
    indices, values = index_dtype(round(size)).itemsize * parts, VALUE_BYTES * parts
    gather = 3 * group.allgather_ints(1) + group.ring(indices) + group.ring(values)
    magnitudes = VALUE_BYTES * union(group.size, k, size) / group.size
    regions = 2 * group.allgather_ints(1) / REPARTITION_EVERY
    threshold = group.ring(magnitudes) / REEVALUATE_EVERY
    return split + gather + regions + threshold


def hitopk(step: Step) -> Stages:
    """HiTopKComm's equations 7, 9 and 10, with ``(m − 1)·α`` for the gather between nodes."""
    k = entries(step.density, round(step.shard))
    between = step.stream.ring(step.message(k, step.shard))
    return _hierarchical(step, step.synchronize_step(1), between, union(step.world.nodes, k, step.shard))


def hioktopk(step: Step) -> Stages:
    """HiTopKComm's equations 7 and 10 inside the node, Ok-Topk's 3 between nodes."""
    k = entries(step.density, round(step.shard))
    return _hierarchical(step, step.synchronize_step(), _oktopk(step, step.stream, k, step.shard), k)


def _hierarchical(step: Step, agreement: float, between: float, applied: float) -> Stages:
    """Reduce-scatter inside, ``between``, and all-gather the ``applied`` entries of each shard inside."""
    node = step.node
    scatter = node.exchange(VALUE_BYTES * step.shard)
    gather = node.allgather_ints(3) + node.ring(sparse_bytes(round(applied), round(step.shard)))
    intra, inter = _flat(step, agreement)
    return intra + scatter + gather, inter + between


SECONDS: dict[str, Callable[[Step], Stages]] = {
    "dense": dense,
    "torus2d": torus2d,
    "allgather": allgather,
    "gtopk": gtopk,
    "ssar_doubling": ssar_doubling,
    "ssar_split": ssar_split,
    "dsar_split": dsar_split,
    "oktopk": oktopk,
    "hitopk": hitopk,
    "hioktopk": hioktopk,
}


def predict(
    name: str,
    nodes: Nodes,
    size: int,
    density: float | None = None,
    network: Network | None = None,
    *,
    wire: str = "fp32",
    sums: str = "fp32",
    speeds: Speeds | None = None,
) -> Prediction:
    """Return what one step of a reducer of ``REDUCERS`` takes; without ``speeds`` computing takes no time.

    ``nodes``: the world ranks of every node, as in ``Topology.nodes``; where they are uneven, the largest
    counts for all. ``size``: entries of the gradient. Of sparse reducers: ``density``, ``wire``, and ``sums``
    of ``dsar_split``. What is sent is that of the busiest rank, the seconds are those of an average step.

    >>> round(predict("hitopk", [range(8), range(8, 16)], 1_000_000, density=0.01).seconds * 1e6)
    370
    """
    seconds = look_up(SECONDS, "reducer", name)
    if not nodes or not all(nodes):
        raise InvalidArgument(f"nodes: expected the ranks of one node or more, got {nodes!r}")
    if size < 1:
        raise InvalidArgument(f"size: expected at least 1 entry, got {size!r}")
    settings = _settings(name, density, wire, sums)
    world = Group(len(nodes), max(map(len, nodes)), network or Network())
    ranks = [rank for node in nodes for rank in node]
    sent = [FORMULAS[name].sent(nodes, rank, size, **settings) for rank in ranks]
    busiest = max(sent, key=lambda each: (each.inter, each.intra))
    if len(ranks) == 1:
        return Prediction(0.0, 0.0, busiest)
    values = look_up(VALUE_CODECS, "codec", sums)()
    streams = min(map(len, nodes))
    share = settings.get("density", 1.0)
    step = Step(world, size, share, streams, make_codec(wire), values)
    intra, inter = seconds(step)
    computing = WORK[name](step).seconds(speeds, wire) if speeds else 0.0
    return Prediction(intra, inter, busiest, computing)


def _settings(name: str, density: float | None, wire: str, sums: str) -> dict[str, Any]:
    """Return what the byte formula of the reducer takes; refuse what would have no effect."""
    takes = inspect.signature(FORMULAS[name].sent).parameters
    given = {"density": density, "wire": wire, "sums": sums}
    defaults = {"density": None, "wire": "fp32", "sums": "fp32"}
    for option, value in given.items():
        if option not in takes and value != defaults[option]:
            raise InvalidArgument(f"{option}: {name} has no such option, got {value!r}")
    if "density" in takes:
        given["density"] = check_density(density)
    return {option: value for option, value in given.items() if option in takes}
