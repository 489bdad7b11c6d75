"""Gradients in, mean gradients out, inside and outside of ``tf.function``."""

import numpy as np
import pytest
import tensorflow as tf

from commlib import InvalidArgument, Topology, make_reducer
from commlib.tensorflow import DistributedGradients, array_of, tensor_of
from commlib.transport import simulated

SHAPES = [(3, 2), (), (5,), (1, 1, 4, 2)]


def variables(dtype=tf.float32):
    return [tf.Variable(tf.zeros(shape, dtype), name=f"v{number}") for number, shape in enumerate(SHAPES)]


def gradients(rank: int, dtype=tf.float32):
    """Entry ``e`` of rank ``r``'s flat gradient is ``100·r + e``."""
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    flat = 100 * rank + np.arange(sum(sizes), dtype=np.float32)
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    return [tf.constant(part.reshape(shape), dtype) for part, shape in zip(parts, SHAPES, strict=True)]


def flat(tensors):
    """The entries of all tensors, in their order."""
    return np.concatenate([tensor.numpy().ravel() for tensor in tensors])


def nothing():
    return [tf.zeros(shape) for shape in SHAPES]


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize(
    "config", [{"name": "dense"}, {"name": "hitopk", "density": 1.0}], ids=lambda c: c["name"]
)
def test_means_come_back_in_the_shapes_and_dtypes_given(config, traced):
    def body(comm):
        distributed = DistributedGradients(Topology(comm, ranks_per_node=2), variables(), config)
        reduce = tf.function(distributed.reduce) if traced else distributed.reduce
        means, finite = reduce(gradients(comm.rank))
        assert [mean.shape for mean in means] == SHAPES
        return flat(means), bool(finite)

    for mean, finite in simulated.run(body, world_size=3):
        assert finite
        np.testing.assert_array_equal(mean, 100 + np.arange(20))  # of ranks 0, 1 and 2


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_a_variable_is_cut_between_its_rows_and_its_mean_is_whole(traced):
    """The cuts are in the first variable, in the third, and at the beginning of the last."""
    config = {"name": "powersgd", "matrix_rank": 1}

    def body(comm):
        topology, steps = Topology(comm), []
        for cuts in ([], [4, 9, 12]):
            distributed = DistributedGradients(topology, variables(), {"name": "dense"}, cuts=cuts)
            reduce = tf.function(distributed.reduce) if traced else distributed.reduce
            means, _ = reduce(gradients(comm.rank))
            steps.append([mean.numpy().tobytes() for mean in means])
        with DistributedGradients(topology, variables(), config, cuts=cuts) as distributed:
            shapes = [each.options.shapes for each in distributed.exchange.reducers]
        return steps, distributed.exchange.slices, shapes

    for (whole, cut), slices, shapes in simulated.run(body, world_size=3):
        assert cut == whole
        assert [each.start for each in slices] == [0, 4, 9, 12]
        assert shapes == [[(2, 2)], [(1, 2), (), (2,)], [(3,)], [(1, 1, 4, 2)]]


def test_half_precision_comes_back_as_half_precision():
    def body(comm):
        distributed = DistributedGradients(Topology(comm), variables(tf.bfloat16), {"name": "dense"})
        means, _ = distributed.reduce([tf.ones(shape, tf.bfloat16) * (1 + comm.rank) for shape in SHAPES])
        return [(mean.dtype, float(tf.reduce_mean(tf.cast(mean, tf.float32)))) for mean in means]

    assert simulated.run(body, world_size=2) == [[(tf.bfloat16, 1.5)] * len(SHAPES)] * 2


def test_a_traced_step_follows_a_switch_and_the_residual_is_flushed():
    def body(comm):
        topology = Topology(comm, ranks_per_node=1)
        distributed = DistributedGradients(topology, variables(), {"name": "hitopk", "density": 0.05})
        reduce = tf.function(distributed.reduce)
        first = flat(reduce(gradients(comm.rank))[0])
        distributed.switch({"name": "dense"})
        second = flat(reduce(nothing())[0])
        return np.count_nonzero(first), first + second

    for applied, total in simulated.run(body, world_size=2):
        assert applied == 1  # k = round(0.05 · 20), the largest entry of both ranks
        np.testing.assert_array_equal(total, 50 + np.arange(20))


def test_indexed_slices_are_made_dense():
    def body(comm):
        table = tf.Variable(tf.zeros((4, 2)))
        distributed = DistributedGradients(Topology(comm), [table], {"name": "dense"})
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [1, 1, comm.rank]))
        gradient = tape.gradient(loss, table)
        assert isinstance(gradient, tf.IndexedSlices)
        (mean,), _ = distributed.reduce([gradient])
        return mean.numpy().tolist()

    # rank 0: row 1 twice and row 0 once; rank 1: row 1 three times
    assert simulated.run(body, world_size=2)[0] == [[0.5, 0.5], [2.5, 2.5], [0.0, 0.0], [0.0, 0.0]]


def test_a_variable_without_a_gradient_counts_as_zero_and_is_named():
    def body(comm):
        distributed = DistributedGradients(Topology(comm), variables(), {"name": "dense"})
        own = gradients(comm.rank)
        if comm.rank == 1:
            own[2] = None
        return flat(distributed.reduce(own)[0])

    with pytest.warns(UserWarning, match="the loss does not depend on v2.*: taken as zero"):
        results = simulated.run(body, world_size=3)
    for mean in results:
        # entries 7 to 11 of ranks 0 and 2, over three ranks
        np.testing.assert_allclose(mean[7:12], (2 * np.arange(7, 12) + 200) / 3, rtol=1e-6)  # one rounding
        np.testing.assert_array_equal(mean[:6], 100 + np.arange(6))


@pytest.mark.parametrize(
    ("given", "words"), [([None] * 4, "no variable has one"), ([], "of 4 variables, got 0")]
)
def test_gradients_of_no_variable_are_refused(given, words):
    def body(comm):
        DistributedGradients(Topology(comm), variables(), {"name": "dense"}).reduce(given)

    with pytest.raises(InvalidArgument, match=words):
        simulated.run(body, world_size=1)


def test_gradients_are_left_as_they_are_and_two_models_share_no_residual():
    config = {"name": "hitopk", "density": 0.05}  # k = round(0.05 · 20) = 1

    def body(comm):
        topology = Topology(comm, ranks_per_node=1)
        first, second = (DistributedGradients(topology, variables(), config) for _ in range(2))
        own = gradients(comm.rank)
        first.reduce(own)
        (*_, of_second), _ = second.reduce(nothing())
        (*_, of_first), _ = first.reduce(nothing())
        return flat(own), np.count_nonzero(of_second), of_first.numpy().ravel().tolist()

    for rank, (untouched, of_second, of_first) in enumerate(simulated.run(body, world_size=2)):
        np.testing.assert_array_equal(untouched, 100 * rank + np.arange(20))
        assert of_second == 0
        # The first step sent entry 19 of both ranks; the largest that they kept is entry 18, 18 and 118.
        assert of_first == [0, 0, 0, 0, 0, 0, 68, 0]


@pytest.mark.parametrize("config", [{"name": "dense"}, {"name": "hitopk", "density": 0.01}], ids=str)
def test_means_that_tensorflow_holds_are_not_overwritten(config):
    """A graph may hold a mean, or compute in its memory: the next one is right all the same."""

    def body(comm):
        distributed = DistributedGradients(Topology(comm), [tf.Variable(tf.zeros([5000]))], config)
        traced = tf.function(distributed.reduce)
        computing = tf.function(lambda flat: tf.reduce_sum(distributed.reduce([flat])[0][0] * 3 + 1))
        given = [tf.constant(np.roll(np.arange(5000, dtype=np.float32), 7 * step)) for step in range(4)]
        held = [traced([flat])[0][0] for flat in given]
        copies = [mean.numpy().copy() for mean in held]
        for flat in given:
            computing(flat)
        unchanged = [np.array_equal(mean, copy) for mean, copy in zip(held, copies, strict=True)]
        twin = make_reducer(size=5000, topology=Topology(comm), **config)
        expected = [twin.reduce(flat.numpy()) for flat in [*given, *given, given[0]]][-1]
        return unchanged, np.array_equal(traced([given[0]])[0][0], expected)

    assert simulated.run(body, 2) == [([True] * 4, True)] * 2


def test_an_array_of_a_tensor_goes_back_to_tensorflow_without_a_copy():
    tensor = tf.range(1000.0) * 2
    array = array_of(tensor)
    assert array_of(tensor_of(array)).ctypes.data == array.ctypes.data
    part = tensor_of(array[3:900])  # which is no tensor's: TensorFlow copies it
    np.testing.assert_array_equal(part, array[3:900])
