"""The second half of ``dsar_split`` in few bits: what is sent and applied, and which rank keeps the error."""

import numpy as np
import pytest

from commlib import InvalidArgument, Topology, make_reducer, transport
from commlib.vectors import partition
from commlib.wire import VALUE_CODECS

WORLD_SIZE, SIZE = 4, 4099  # no range is a multiple of the bucket of 512


def gradient(rank):
    return np.random.default_rng(rank).standard_t(2, SIZE).astype(np.float32)


def reduced(sums):
    """One step in which everything is selected; on every rank its mean, residual and bytes sent."""

    def step(comm):
        topology = Topology(comm, ranks_per_node=1)
        reducer = make_reducer("dsar_split", topology, size=SIZE, density=1.0, sums=sums)
        mean = reducer.reduce(gradient(comm.rank))
        return mean, reducer.residual, reducer.last.traffic.sent.inter

    return transport.simulated.run(step, WORLD_SIZE)


@pytest.mark.parametrize("sums", VALUE_CODECS)
def test_all_apply_what_was_decoded_and_the_owner_of_the_range_keeps_the_rest(sums):
    codec, bounds = VALUE_CODECS[sums](), partition(SIZE, WORLD_SIZE)
    total = np.zeros(SIZE, np.float32)
    for rank in range(WORLD_SIZE):
        total += gradient(rank)
    ranges = np.split(total, bounds[1:-1])
    applied = np.concatenate([codec.decode(codec.encode(each), len(each)) for each in ranges])
    for rank, (mean, residual, _) in enumerate(reduced(sums)):
        own = slice(bounds[rank], bounds[rank + 1])
        assert mean.tobytes() == (applied / np.float32(WORLD_SIZE)).tobytes()
        assert (residual[own] == total[own] - applied[own]).all()
        residual[own] = 0
        assert not residual.any()
    assert codec.lossless == (applied.tobytes() == total.tobytes())


@pytest.mark.parametrize(
    ("sums", "bytes_of_1024"),
    [("fp32", 4096), ("fp16", 2048), ("bf16", 2048), ("qsgd8", 1032), ("qsgd4", 520), ("qsgd2", 264)],
)
def test_the_bytes_of_the_second_half(sums, bytes_of_1024):
    lengths = np.diff(partition(SIZE, WORLD_SIZE))
    assert lengths.tolist() == [1024, 1025, 1025, 1025]
    _, _, sent = reduced(sums)[0]
    # Round the ring, rank 0 hands on its own range, and those of ranks 3 and 2.
    handed_on = bytes_of_1024 + 2 * VALUE_CODECS[sums]().message_bytes(1025)
    assert sent == 4 * (1025 + 1025 + 1025) + handed_on


def test_sums_that_no_value_codec_stands_for_are_refused():
    def body(comm):
        with pytest.raises(InvalidArgument) as caught:
            make_reducer("dsar_split", Topology(comm), size=10, sums="gap")
        return str(caught.value)

    expected = f"sums: expected one of {', '.join(VALUE_CODECS)}, got 'gap'"
    assert transport.simulated.run(body, 2) == [expected] * 2
