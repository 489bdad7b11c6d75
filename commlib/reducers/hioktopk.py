"""Hierarchical Ok-Topk: dense inside the node, Ok-Topk on every stream between nodes."""

from typing import Any

from commlib.reducers.oktopk import OkTopK
from commlib.topology import Topology


class HiOkTopK(OkTopK):
    """HiTopKComm with Ok-Topk in place of its all-gather: the bytes between nodes do not grow with ``m``.

    1. The reduce-scatter in the node: ``Shards.collect``.
    2. The selection of ``ρ·d/n`` entries of the shard: ``SelectingReducer``.
    3. Ok-Topk among the nodes, on stream ``j`` over shard ``j``: ``OkTopK._combine``.
    4. The all-gather in the node of what was selected globally: ``Shards.spread``.
    """

    def __init__(self, topology: Topology, size: int, *, hierarchical: bool = True, **options: Any) -> None:
        super().__init__(topology, size, hierarchical=hierarchical, **options)
