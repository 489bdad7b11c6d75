"""The transcriptions of the authors' code compute what the reducers do."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.authors import PEERS, ExDyna
from commlib import Topology, make_reducer
from commlib.transport import simulated
from commlib.tuning.probe import Gradients

BLOCK = 32  # entries, of 1024 blocks that a partition of exdyna is made of
# Of each, a size that the authors' code cuts as ours does on 4 and on 5 ranks.
SIZES = {"exdyna": 1024 * BLOCK, "spardl": 20_000, "arctopk": 512 * 100, "powersgd": 10_005}
THRESHOLD = 16.0  # which between k/2 and 2k entries of these gradients reach: exdyna sends all of them


def same_threshold(peer, reducer):
    """Let ``exdyna`` select by the threshold and in the partitions of its authors' code."""
    if isinstance(peer, ExDyna) and not peer.counted:
        peer.threshold = THRESHOLD
        bounds = np.array([*peer.first, peer.BLOCKS])
        found = np.full(peer.comm.size, reducer.k // peer.comm.size)
        reducer.state = replace(reducer.state, threshold=THRESHOLD, bounds=bounds, found=found)


@pytest.mark.parametrize("count", [4, 5])
@pytest.mark.parametrize(("name", "steps"), [("exdyna", 1), ("spardl", 3), ("arctopk", 3), ("powersgd", 3)])
def test_reducers_apply_and_keep_what_their_authors_code_does(name, steps, count):
    gradients = Gradients(SIZES[name])

    def body(comm):
        peer = PEERS[name](comm, gradients.size, 0.05)
        reducer = make_reducer(name, Topology(comm, ranks_per_node=1), gradients.size, density=0.05)
        means, others = [], []
        for step in range(steps):
            same_threshold(peer, reducer)
            others.append(reducer.reduce(gradients.of(comm.rank, step)).copy())
            means.append(peer.step(gradients.of(comm.rank, step)).copy())
        return means, peer.memory, others, reducer.residual

    for means, memory, others, residual in simulated.run(body, count):
        for mean, other in zip(means, others, strict=True):
            if name != "powersgd":
                np.testing.assert_array_equal(np.flatnonzero(mean), np.flatnonzero(other))
            # sums of so many values in other orders; of powersgd, of factors with another basis
            np.testing.assert_allclose(mean, other, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(memory, residual, rtol=1e-4, atol=1e-3)
