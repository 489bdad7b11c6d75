"""HiTopKComm: dense inside the node, a share of each shard between nodes (its section 3.2, algorithm 2)."""

from commlib.reducers.allgather import AllGather
from commlib.reducers.hierarchical import Shards


class HiTopK(AllGather):
    """The all-gather of selections, among the owners of each shard.

    1. ``g_ij = Σ_q g_iq``, the reduce-scatter in the node (equation 4): ``Shards.collect``.
    2. ``κ, ι = MSTopK(g_ij, ρ·d/n)`` (equation 5): ``SelectingReducer``, with the shard's residual added.
    3. The all-gather on stream ``j`` and ``g_ij = Σ_p TopK(g_pj)`` (equation 6): ``AllGather._combine``.
    4. The all-gather of the shards in the node: ``Shards.spread``.
    """

    layout_type = Shards
