"""The sums of many ranks' entries, and of their rows: the order of the ranks, and nothing else."""

import numpy as np
import pytest

import commlib.gpu.scatter
import commlib.vectors
from commlib import InvalidArgument, SparseVector
from commlib.gpu import RankSum, add_rows
from commlib.vectors import sum_rows, sum_sparse
from tests.extent import more
from tests.gpu.vectors import SEED

SIZES = [33, 30_001, *more(1, 4096, 4097)]


def ranks_of(size, count):
    """Sorted entries of each rank: some ranks have none, one has all, and some have denormal values."""
    generator = np.random.default_rng([SEED, size, count])
    vectors = []
    for rank in range(count):
        entries = 0 if rank % 4 == 3 else size if rank == 1 else int(generator.integers(0, size + 1))
        indices = np.sort(generator.choice(size, entries, replace=False)).astype(
            commlib.vectors.index_dtype(size)
        )
        exponents = generator.integers(-3, 8, entries) - 44.0 * (rank % 5 == 2)
        values = (generator.standard_normal(entries) * 10.0**exponents).astype(np.float32)
        vectors.append(SparseVector(size, indices, values))
    return vectors


def moved(engine, vector, beside=0):
    """Return the vector on the device; ``beside``: entries before and after it that belong to nobody."""
    indices, values = np.pad(vector.indices, beside, constant_values=2**30), np.pad(vector.values, beside)
    arrays = [engine.from_host(each)[beside : beside + vector.nnz] for each in (indices, values)]
    return SparseVector(vector.size, *arrays)


def added(engine, vectors, beside=0):
    """Return the indices and values of the sparse sum, and the dense one, as bytes."""
    given = [moved(engine, vector, beside) for vector in vectors]
    sparse, dense = RankSum(given, engine=engine).sparse(), RankSum(given, engine=engine).dense()
    assert dense.is_dense
    return [engine.to_host(each).tobytes() for each in (sparse.indices, sparse.values, dense.values)]


def expected(vectors, monkeypatch):
    """Return what the CPU makes of them, also past δ."""
    monkeypatch.setattr(commlib.vectors, "delta", lambda size: np.inf)
    sums = sum_sparse(vectors)
    return [each.tobytes() for each in (sums.indices, sums.values, sums.to_dense())]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 2, 7])
def test_sums_are_bitwise_those_of_the_cpu(engine, monkeypatch, size, count):
    vectors = ranks_of(size, count)
    assert added(engine, vectors, beside=3) == expected(vectors, monkeypatch), SEED


def test_indices_may_be_of_64_bits(engine, monkeypatch):
    """As past 2³¹ - 1, which the emulator would take hours for."""
    for module in (commlib.vectors, commlib.gpu.scatter):
        monkeypatch.setattr(module, "index_dtype", lambda size: np.dtype(np.int64))
    vectors = ranks_of(9000, 5)
    sums = added(engine, vectors)
    assert len(sums[0]) == 2 * len(sums[1])
    assert sums == expected(vectors, monkeypatch), SEED


@pytest.mark.parametrize(
    ("given", "sums"),
    [
        ([[-0.0], [-0.0]], [0.0]),  # which starts from 0
        ([[1.5], [-1.5]], [0.0]),  # and stays
        ([[1e-40], [2e-40]], [np.float32(1e-40) + np.float32(2e-40)]),
        ([[1e-45]], [1e-45]),
        ([[np.inf], [1.0]], [np.inf]),
    ],
)
def test_zeros_denormals_and_infinities_are_entries_like_others(engine, given, sums):
    vectors = [SparseVector(9, np.array([4], np.int32), np.array(each, np.float32)) for each in given]
    indices, values, dense = added(engine, vectors)
    assert indices == np.array([4], np.int32).tobytes()
    assert values == np.array(sums, np.float32).tobytes()
    assert dense[16:20] == values


def test_what_cannot_be_added_is_refused(engine):
    ones, places = (engine.from_host(np.arange(8, dtype=kind)) for kind in (np.float32, np.int32))
    given = {
        "sparse ones of 8, got a dense one of 8": SparseVector(8, None, ones),
        "sparse ones of 8, got a sparse one of 9": SparseVector(9, places, ones),
        "contiguous entries, got a stride of 8 bytes": SparseVector(8, places[:4], ones[::2]),
    }
    for message, vector in given.items():
        with pytest.raises(InvalidArgument, match=message):
            RankSum([SparseVector(8, places, ones), vector], engine=engine)


# ------------------------------------------------------------- rows


def rows_of(size, count):
    generator = np.random.default_rng([SEED, size, count])
    exponents = generator.integers(-42, 8, (count, size))
    rows = (generator.standard_normal((count, size)) * 10.0**exponents).astype(np.float32)
    rows[:, size // 2] = -0.0  # their sum is no 0.0
    return rows


def sum_of_rows(engine, rows, place, before=0, spare=0):
    """``before``: entries of its array that come before the own row; ``spare``: beside the rows of others."""
    size = rows.shape[1]
    stride = -(-size // 4) * 4 + spare
    others = engine.from_host(np.full((len(rows) - 1) * stride, np.nan, np.float32)).reshape(-1, stride)
    others[:, :size] = engine.from_host(np.delete(rows, place, axis=0).ravel()).reshape(-1, size)
    own = engine.from_host(np.pad(rows[place], (before, 0)))[before:]
    return engine.to_host(add_rows(others, own, place, engine=engine)).tobytes()


@pytest.mark.parametrize("size", [*SIZES, *more(30_002, 30_003)])
@pytest.mark.parametrize(("count", "place"), [(2, 0), (2, 1), (7, 3), (20, 19)])
def test_rows_are_summed_as_by_the_cpu(engine, size, count, place):
    rows = rows_of(size, count)
    sums = sum_rows(np.delete(rows, place, axis=0), rows[place], place).tobytes()
    assert sum_of_rows(engine, rows, place) == sums, SEED
    assert sum_of_rows(engine, rows, place, before=place % 4, spare=8) == sums, SEED


@pytest.mark.parametrize(("shape", "dtype"), [((2, 6), np.float32), ((2, 4), np.float32), ((2, 8), np.int32)])
def test_rows_that_do_not_fit_are_refused(engine, shape, dtype):
    others = engine.from_host(np.zeros(shape[0] * shape[1], dtype)).reshape(shape)
    with pytest.raises(InvalidArgument, match="others: expected contiguous float32, 5 or more a row"):
        add_rows(others, engine.from_host(np.zeros(5, np.float32)), 0, engine=engine)
