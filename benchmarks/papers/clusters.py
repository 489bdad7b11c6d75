"""The papers' numbers, of ``papers.yaml``, and the messages of a step on their clusters by closed forms."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from commlib import REDUCERS, Network, Prediction, predict

PAPERS = yaml.safe_load(Path(__file__).with_name("papers.yaml").read_text())
HALF, FULL = "fp16", "fp32"


@dataclass(frozen=True)
class Cluster:
    """``nodes`` of equally many ranks, and the links inside and between them."""

    nodes: int
    ranks_per_node: int
    network: Network

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def layout(self) -> list[range]:
        """Return the world ranks of every node."""
        return [range(low, low + self.ranks_per_node) for low in range(0, self.size, self.ranks_per_node)]


@cache
def communication(
    reducer: str, cluster: Cluster, size: int, density: float, values: str = FULL
) -> Prediction:
    """Return the prediction of a step. Dense values of 2 bytes are half as many of the 4 that ours sends."""
    if REDUCERS[reducer].sparse:
        return predict(reducer, cluster.layout, size, density, cluster.network, wire=values)
    sent = size // 2 if values == HALF else size
    return predict(reducer, cluster.layout, sent, network=cluster.network)


@dataclass(frozen=True)
class Comparison:
    """One number of a paper and its prediction, in the same unit."""

    paper: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Return the prediction over the paper's."""
        return self.predicted / self.paper

    @property
    def factor(self) -> float:
        """Return by which factor the prediction is off, 1 or more."""
        return max(self.ratio, 1 / self.ratio)
