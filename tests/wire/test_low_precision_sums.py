"""The second half of ``dsar_split`` in few bits: what is sent and applied, and which rank keeps the error."""

import numpy as np
import pytest

from commlib import Topology, make_reducer, transport
from commlib.vectors import partition
from commlib.wire import VALUE_CODECS

WORLD_SIZE, SIZE = 4, 4099  # no range is a multiple of the bucket of 512


def gradient(rank):
    return np.random.default_rng(rank).standard_t(2, SIZE).astype(np.float32)


@pytest.mark.parametrize("sums", VALUE_CODECS)
def test_all_apply_what_was_decoded_and_the_owner_of_the_range_keeps_the_rest(sums):
    """One step in which everything is selected."""

    def step(comm):
        topology = Topology(comm, ranks_per_node=1)
        reducer = make_reducer("dsar_split", topology, size=SIZE, density=1.0, sums=sums)
        return reducer.reduce(gradient(comm.rank)), reducer.residual

    codec, bounds = VALUE_CODECS[sums](), partition(SIZE, WORLD_SIZE)
    total = np.zeros(SIZE, np.float32)
    for rank in range(WORLD_SIZE):
        total += gradient(rank)
    ranges = np.split(total, bounds[1:-1])
    applied = np.concatenate([codec.decode(codec.encode(each), len(each)) for each in ranges])
    for rank, (mean, residual) in enumerate(transport.simulated.run(step, WORLD_SIZE)):
        own = slice(bounds[rank], bounds[rank + 1])
        assert mean.tobytes() == (applied / np.float32(WORLD_SIZE)).tobytes()
        assert (residual[own] == total[own] - applied[own]).all()
        residual[own] = 0
        assert not residual.any()
    assert codec.lossless == (applied.tobytes() == total.tobytes())
