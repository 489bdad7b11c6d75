"""IndexedSlices of tables stay sparse: in, on the wire, and out."""

import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib import InvalidArgument, SparseVector, Topology
from commlib.tensorflow import DistributedGradients
from commlib.tensorflow.tensors import entries_of_rows, rows_of_entries
from commlib.transport import simulated
from tests.extent import examples

SHAPES = [(50, 3), (4, 2), (7,), (20, 2, 2), (5,)]
TABLES = [0, 3]
STEPS = 3
WAYS = {
    "one-vector": {},
    "buckets": {"bucket_bytes": 40},
    "overlapped": {"bucket_bytes": 40, "overlap": True},
    "selected": {"table_config": {"name": "oktopk", "density": 0.1}},
}


def variables():
    """Return the variables, and the tables among them."""
    made = [tf.Variable(tf.zeros(shape), name=f"v{number}") for number, shape in enumerate(SHAPES)]
    return made, [made[number] for number in TABLES]


def dense(tensor):
    return tf.convert_to_tensor(tensor).numpy()


def slices(shape, rank, step, dtype=tf.float32):
    """Rows with some given twice; none at all of rank 1 in step 1."""
    rng = np.random.default_rng([rank, step, *shape])
    rows = rng.integers(0, shape[0], 0 if (rank, step) == (1, 1) else 6)
    values = rng.standard_normal((len(rows), *shape[1:]))
    return tf.IndexedSlices(tf.constant(values, dtype), tf.constant(rows, tf.int32), tf.constant(shape))


def gradients(rank, step):
    rng = np.random.default_rng([rank, step])
    return [
        slices(shape, rank, step) if number in TABLES else tf.constant(rng.standard_normal(shape), tf.float32)
        for number, shape in enumerate(SHAPES)
    ]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("way", WAYS)
def test_means_of_tables_are_indexed_slices_of_the_rows_that_any_rank_has(way, traced, world_size):
    def body(comm):
        (own, tables), seen = variables(), []
        options = {"tables": tables, **WAYS[way]}
        with DistributedGradients(Topology(comm), own, {"name": "dense"}, **options) as distributed:
            assert distributed.sizes == [150, 8, 7, 80, 5]
            assert distributed.overlaps == (way == "overlapped" and comm.size > 1)
            reduce = tf.function(distributed.reduce) if traced else distributed.reduce
            for step in range(STEPS):
                means, finite = reduce(gradients(comm.rank, step))
                assert bool(finite)
                seen.append(list(map(dense, means)))
                for number in TABLES:
                    mean = means[number]
                    assert isinstance(mean, tf.IndexedSlices)
                    assert mean.indices.dtype == tf.int32
                    assert tuple(mean.dense_shape.numpy()) == SHAPES[number]
                    rows = mean.indices.numpy().tolist()
                    assert rows == sorted(set(rows))
                    assert len(rows) <= 6 * comm.size
        return seen

    ranks = simulated.run(body, world_size)
    for step in range(STEPS):
        given = [gradients(rank, step) for rank in range(world_size)]
        for number, parts in enumerate(zip(*given, strict=True)):
            means = [seen[step][number] for seen in ranks]
            assert len({mean.tobytes() for mean in means}) == 1
            if way == "selected" and number in TABLES and world_size > 1:
                continue
            whole = [dense(part).astype(np.float64) for part in parts]
            np.testing.assert_allclose(means[0], np.mean(whole, axis=0), rtol=1e-5, atol=1e-6)


def test_tables_alone_are_reduced():
    def body(comm):
        table = tf.Variable(tf.zeros((50, 3)))
        distributed = DistributedGradients(Topology(comm), [table], {"name": "dense"}, tables=[table])
        means, finite = distributed.reduce([slices((50, 3), comm.rank, 0)])
        return dense(means[0]), bool(finite), distributed.buckets

    expected = np.mean([dense(slices((50, 3), rank, 0)) for rank in range(2)], axis=0)
    for mean, finite, buckets in simulated.run(body, 2):
        np.testing.assert_allclose(mean, expected, rtol=1e-6)
        assert (finite, buckets) == (True, 1)


@pytest.mark.parametrize("way", ["one-vector", "overlapped"])
@pytest.mark.parametrize("bad", [0, 1], ids=["table", "vector"])
def test_a_bad_number_in_a_table_or_in_the_vector_skips_the_whole_step(way, bad):
    def body(comm):
        (own, tables), config = variables(), {"name": "allgather", "density": 0.2}
        results = []
        for poisons in (True, False):
            distributed = DistributedGradients(Topology(comm), own, config, tables=tables, **WAYS[way])
            with distributed:
                distributed.reduce(gradients(comm.rank, 0))
                poisoned = gradients(comm.rank, 1)
                if comm.rank == 0:
                    each = poisoned[bad]
                    poisoned[bad] = (
                        tf.IndexedSlices(each.values * np.inf, each.indices) if bad == 0 else each * np.inf
                    )
                if poisons:
                    assert not bool(distributed.reduce(poisoned)[1])
                means, finite = distributed.reduce(gradients(comm.rank, 2))
                assert bool(finite)
                results.append([dense(mean).tobytes() for mean in means])
        return results[0] == results[1]

    assert all(simulated.run(body, 3))


def test_a_switch_leaves_the_tables_reducers_and_flushes_the_residual_of_the_vector():
    def body(comm):
        own, tables = variables()
        config = {"name": "allgather", "density": 0.2}
        with DistributedGradients(Topology(comm), own, config, tables=tables) as distributed:
            first, _ = distributed.reduce(gradients(comm.rank, 0))
            before = distributed.exchange.reducers
            distributed.exchange.set_density(0.5)
            distributed.switch({"name": "dense"})
            after = distributed.exchange.reducers
            # in the order of the variables: the second table lies between two parts of the vector
            assert [old is new for old, new in zip(before, after, strict=True)] == [True, False, True, False]
            nothing = [
                tf.IndexedSlices(tf.zeros([0, *shape[1:]]), tf.zeros([0], tf.int32))
                if number in TABLES
                else tf.zeros(shape)
                for number, shape in enumerate(SHAPES)
            ]
            second, _ = distributed.reduce(nothing)
            return dense(first[1]) + dense(second[1]), second[0].indices.numpy().tolist()

    expected = np.mean([gradients(rank, 0)[1] for rank in range(2)], axis=0)
    for total, rows in simulated.run(body, 2):
        np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-6)
        assert rows == []


def test_a_table_without_a_gradient_has_no_rows_and_is_named():
    def body(comm):
        own, tables = variables()
        distributed = DistributedGradients(Topology(comm), own, {"name": "dense"}, tables=tables)
        given = gradients(comm.rank, 0)
        given[3] = None
        with pytest.warns(UserWarning, match="the loss does not depend on v3"):
            means, _ = distributed.reduce(given)
        return means[3].indices.shape, means[3].values.shape

    assert simulated.run(body, 1) == [((0,), (0, 2, 2))]


def test_what_tables_cannot_do_is_refused():
    def body(comm):
        own, tables = variables()
        with pytest.raises(InvalidArgument, match="^tables: expected some of the variables, 1 of 2 are"):
            DistributedGradients(Topology(comm), own, {"name": "dense"}, tables=[own[0], tf.Variable(1.0)])
        distributed = DistributedGradients(Topology(comm), own, {"name": "dense"}, tables=tables)
        with pytest.raises(InvalidArgument, match="^gradients: expected IndexedSlices of v0.*, got a dense"):
            distributed.reduce([tf.zeros(shape) for shape in SHAPES])
        return True

    assert all(simulated.run(body, 1))


# ------------------------------------------------------------- rows and entries


@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 2**16),
    height=st.integers(1, 50),
    inner=st.sampled_from([(), (1,), (3,), (2, 4)]),
    count=st.integers(0, 120),
)
def test_rows_in_any_order_are_added_up_one_after_the_other(seed, height, inner, count):
    rng = np.random.default_rng(seed)
    rows, values = rng.integers(0, height, count), rng.standard_t(1, (count, *inner)).astype(np.float32)
    expected = np.zeros((height, *inner), np.float32)
    for row, each in zip(rows, values, strict=True):
        expected[row] += each
    vector = entries_of_rows(rows, values, expected.shape)
    checked = SparseVector(vector.size, vector.indices, vector.values)  # which checks the indices
    np.testing.assert_array_equal(checked.to_dense(), expected.ravel())
    found, sums = rows_of_entries(vector, expected.shape)
    assert found.tolist() == sorted(set(rows.tolist()))
    np.testing.assert_array_equal(sums, expected[found])


@pytest.mark.parametrize(
    ("indices", "entries", "shape", "rows", "values"),
    [
        (np.array([1, 2, 9], np.int32), [5, 6, 7], (4, 3), [0, 3], [[0, 5, 6], [7, 0, 0]]),
        (None, [0, 0, 0, 2, 0, 0], (3, 2), [1], [[0, 2]]),
    ],
    ids=["sparse", "dense"],
)
def test_rows_of_a_vector_are_those_that_are_not_all_zero(indices, entries, shape, rows, values):
    vector = SparseVector(math.prod(shape), indices, np.array(entries, np.float32))
    assert [each.tolist() for each in rows_of_entries(vector, shape)] == [rows, values]


def test_a_table_past_what_32_bits_address():
    shape = (2**30, 8)
    vector = entries_of_rows(np.array([2**30 - 1, 0], np.int32), np.ones((2, 8)), shape)
    assert vector.indices.dtype == np.int64
    assert vector.indices.tolist() == [*range(8), *range(2**33 - 8, 2**33)]
    rows, values = rows_of_entries(vector, shape)
    assert rows.tolist() == [0, 2**30 - 1]
    assert values.shape == (2, 8)


@pytest.mark.parametrize(
    ("rows", "values", "message"),
    [
        ([4], np.ones((1, 2)), "rows: expected 0 … 3, got one outside"),
        ([-1], np.ones((1, 2)), "rows: expected 0 … 3, got one outside"),
        ([1.5], np.ones((1, 2)), "rows: expected integers, got float64"),
        ([1], np.ones((1, 3)), "values: expected shape (1, 2) for 1 rows, got (1, 3)"),
        ([1, 2], np.ones((1, 2)), "values: expected shape (2, 2) for 2 rows, got (1, 2)"),
    ],
)
def test_rows_that_the_table_has_not_are_refused(rows, values, message):
    with pytest.raises(InvalidArgument) as caught:
        entries_of_rows(rows, values, (4, 2))
    assert str(caught.value) == message
