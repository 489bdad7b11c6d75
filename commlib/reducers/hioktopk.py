"""Hierarchical Ok-Topk: dense inside the node, Ok-Topk on every stream between nodes."""

from commlib.reducers.hierarchical import Shards
from commlib.reducers.oktopk import OkTopK


class HiOkTopK(OkTopK):
    """HiTopKComm with Ok-Topk in place of its all-gather: what goes between nodes does not grow with ``m``.

    1. The reduce-scatter in the node: ``Shards.collect``.
    2. The selection of ``ρ·d/n`` entries of the shard: ``SelectingReducer``.
    3. Ok-Topk among the nodes, on stream ``j`` over shard ``j``: ``OkTopK._combine``.
    4. The all-gather in the node of what was selected globally: ``Shards.spread``.
    """

    layout_type = Shards
