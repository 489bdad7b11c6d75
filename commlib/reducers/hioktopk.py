"""Hierarchical Ok-Topk: dense inside the node, Ok-Topk on every stream between nodes."""

from commlib.cost import Cost, LinkSeconds, Step, Work, other_messages_bytes, shards, sparse_bytes
from commlib.density import entries
from commlib.reducers.hierarchical import Shards
from commlib.reducers.oktopk import OkTopK, most_sent, seconds_among, summing
from commlib.topology import LinkBytes
from commlib.vectors import VALUE_BYTES


def _traffic(step: Step, rank: int) -> LinkBytes:
    """At most the bytes of Ok-Topk on the stream; in the node the bytes of ``hitopk``."""
    local_rank, lengths, stream = shards(step.nodes, rank, step.size)
    own, density = lengths[local_rank], step.density
    nodes = [[place] for place in range(len(stream))]
    inter = most_sent(nodes, stream.index(rank), entries(density, own), own).inter
    gathered = other_messages_bytes(
        lengths, local_rank, lambda each: sparse_bytes(2 * entries(density, each), each)
    )
    return LinkBytes(VALUE_BYTES * (step.size - own) + gathered, inter)


def _seconds(step: Step) -> LinkSeconds:
    """HiTopKComm's equations 7 and 10 inside the node, Ok-Topk's 3 between nodes."""
    k = entries(step.density, round(step.shard))
    intra, inter = step.hierarchical(seconds_among(step, step.stream, k, step.shard), k)
    compared_intra, compared_inter = step.rest_of_comparison(step.scatter)
    return intra + compared_intra, inter + compared_inter


def _work(step: Step) -> Work:
    """Add up the node's shards and select; Ok-Topk among the nodes; gather the shards."""
    k = step.shard * step.density
    applied = step.placing(k * step.streams)
    return step.summing_shards() + step.selecting(step.shard, k) + summing(step, k) + applied


class HiOkTopK(OkTopK):
    """HiTopKComm with Ok-Topk in place of its all-gather: the bytes between nodes do not grow with ``m``.

    1. The reduce-scatter in the node: ``Shards.collect``.
    2. The selection of ``ρ·d/n`` entries of the shard: ``SelectingReducer``.
    3. Ok-Topk among the nodes, on stream ``j`` over shard ``j``: ``OkTopK._combine``.
    4. The all-gather in the node of what was selected globally: ``Shards.spread``.
    """

    layout_type = Shards
    cost = Cost(_traffic, _seconds, _work, is_exact=False)
