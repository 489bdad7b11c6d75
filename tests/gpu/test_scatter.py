"""The sum of many ranks' entries: the order of the ranks, and nothing else."""

import numpy as np
import pytest

from commlib import InvalidArgument, SparseVector
from commlib.gpu import RankSum
from commlib.vectors import total
from tests.gpu.vectors import SEED


def ranks_of(size, count, seed=0):
    """Sorted entries of each rank: some ranks have none, one has all."""
    generator = np.random.default_rng([SEED, size, count, seed])
    vectors = []
    for rank in range(count):
        entries = 0 if rank % 4 == 3 else size if rank == 1 else int(generator.integers(0, size + 1))
        indices = np.sort(generator.choice(size, entries, replace=False)).astype(np.int32)
        values = (generator.standard_normal(entries) * 10.0 ** generator.integers(-3, 8, entries)).astype(
            np.float32
        )
        vectors.append(SparseVector(size, indices, values))
    return vectors


def added(engine, vectors, divisor=1.0, padding=0):
    """Return what ``RankSum`` makes of them; ``padding`` entries lie unused after each rank's own."""
    room = [vector.entries + padding for vector in vectors]
    starts = np.concatenate([[0], np.cumsum(room[:-1])]).astype(np.uint64)
    indices, values = np.full(sum(room), 2**30, np.int32), np.full(sum(room), np.nan, np.float32)
    for start, vector in zip(starts.astype(int), vectors, strict=True):
        indices[start : start + vector.entries] = vector.indices
        values[start : start + vector.entries] = vector.values
    counts = np.array([vector.entries for vector in vectors], np.uint64)
    adder = RankSum(vectors[0].size, len(vectors), engine=engine)
    return engine.to_host(adder.add(*map(engine.from_host, (indices, values, starts, counts)), divisor))


@pytest.mark.parametrize("size", [1, 33, 4096, 4097, 30_001])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_sum_is_bitwise_that_of_the_cpu(engine, size, count):
    vectors = ranks_of(size, count)
    assert added(engine, vectors, padding=3).tobytes() == total(vectors).to_dense().tobytes(), SEED


def test_more_ranks_than_threads_of_a_block(engine):
    vectors = ranks_of(900, 300)
    assert added(engine, vectors).tobytes() == total(vectors).to_dense().tobytes(), SEED


def test_the_order_is_that_of_the_ranks(engine):
    parts = [np.float32(each) for each in (1.0, 1e8, -1e8)]
    vectors = [SparseVector(5, np.array([2], np.int32), np.array([part])) for part in parts]
    assert added(engine, vectors).tolist() == [0, 0, 0, 0, 0]  # 1 is lost in 1e8
    assert added(engine, vectors[::-1]).tolist() == [0, 0, 1, 0, 0]


def test_sums_are_divided_as_by_the_cpu(engine):
    vectors = ranks_of(5000, 3)
    expected = total(vectors).to_dense() / np.float32(3)
    assert added(engine, vectors, divisor=3).tobytes() == expected.tobytes()


def test_the_order_of_blocks_changes_no_bit(emulate):
    vectors = ranks_of(20_000, 5)
    engines = [emulate(seed, under_way=under_way) for seed, under_way in [(1, 1), (2, 4), (3, 9)]]
    assert len({added(engine, vectors).tobytes() for engine in engines}) == 1


def test_nothing_to_add_to_is_refused(engine):
    with pytest.raises(InvalidArgument, match="expected at least 1 each, got 0 and 2"):
        RankSum(0, 2, engine=engine)
    adder, one = RankSum(8, 1, engine=engine), engine.from_host(np.ones(1, np.float32))
    with pytest.raises(InvalidArgument, match=r"indices: expected int32 of shape \(1,\), got float32"):
        adder.add(one, one, one, one)
