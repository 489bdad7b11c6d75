"""Gradients in, mean gradients out, inside and outside of ``tf.function``."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib import InvalidArgument, Topology
from commlib.tensorflow import DistributedGradients, DistributedOptimizer
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


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize(
    "config", [{"name": "dense"}, {"name": "hitopk", "density": 1.0}], ids=lambda c: c["name"]
)
def test_means_come_back_in_the_shapes_and_dtypes_given(config, traced):
    def body(comm):
        distributed = DistributedGradients(Topology(comm, ranks_per_node=2), variables(), config)
        reduce = tf.function(distributed.reduce) if traced else distributed.reduce
        means, finite = reduce(gradients(comm.rank))
        return [mean.numpy() for mean in means], bool(finite)

    for means, finite in simulated.run(body, world_size=3):
        assert finite
        assert [mean.shape for mean in means] == SHAPES
        flat = np.concatenate([mean.ravel() for mean in means])
        np.testing.assert_array_equal(flat, 100 + np.arange(20))  # the mean of ranks 0, 1 and 2


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
        first = np.concatenate([mean.numpy().ravel() for mean in reduce(gradients(comm.rank))[0]])
        distributed.switch({"name": "dense"})
        nothing = [tf.zeros(shape) for shape in SHAPES]
        second = np.concatenate([mean.numpy().ravel() for mean in reduce(nothing)[0]])
        return np.count_nonzero(first), first + second

    for applied, total in simulated.run(body, world_size=2):
        assert applied == 1  # k = round(0.05 · 20), the largest entry of both ranks
        np.testing.assert_array_equal(total, 50 + np.arange(20))


def test_a_nan_on_one_rank_says_on_all_that_the_step_does_not_count():
    def body(comm):
        distributed = DistributedGradients(Topology(comm), variables(), {"name": "hitopk", "density": 0.1})
        own = gradients(comm.rank)
        if comm.rank == 1:
            own[1] = tf.constant(np.nan)
        return bool(distributed.reduce(own)[1])

    assert simulated.run(body, world_size=3) == [False] * 3


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


def test_a_variable_without_a_gradient_is_named():
    def body(comm):
        distributed = DistributedGradients(Topology(comm), variables(), {"name": "dense"})
        with pytest.raises(InvalidArgument, match="v2.* has none"):
            distributed.reduce([*gradients(0)[:2], None, gradients(0)[3]])
        return True

    assert simulated.run(body, world_size=1) == [True]


def test_a_variable_without_a_gradient_on_one_rank_ends_the_others():
    def body(comm):
        distributed = DistributedGradients(Topology(comm), variables(), {"name": "dense"})
        own = gradients(comm.rank)
        if comm.rank == 1:
            own[2] = None
        distributed.reduce(own)

    with pytest.raises(InvalidArgument, match="v2.* has none"):
        simulated.run(body, world_size=3)


def test_gradients_are_left_as_they_are_and_two_models_share_no_residual():
    config = {"name": "hitopk", "density": 0.05}  # k = round(0.05 · 20) = 1

    def body(comm):
        topology = Topology(comm, ranks_per_node=1)
        first, second = (DistributedGradients(topology, variables(), config) for _ in range(2))
        own, nothing = gradients(comm.rank), [tf.zeros(shape) for shape in SHAPES]
        first.reduce(own)
        (*_, of_second), _ = second.reduce(nothing)
        (*_, of_first), _ = first.reduce(nothing)
        untouched = np.concatenate([gradient.numpy().ravel() for gradient in own])
        return untouched, np.count_nonzero(of_second), of_first.numpy().ravel().tolist()

    for rank, (untouched, of_second, of_first) in enumerate(simulated.run(body, world_size=2)):
        np.testing.assert_array_equal(untouched, 100 * rank + np.arange(20))
        assert of_second == 0
        # The first step sent entry 19 of both ranks; the largest that they kept is entry 18, 18 and 118.
        assert of_first == [0, 0, 0, 0, 0, 0, 68, 0]


class Watcher:
    """A passenger that has one number to say: the sum of its part of the mean. It keeps what it saw."""

    def __init__(self):
        self.looks, self.trips = [], []

    def look(self, arrays):
        self.looks.append([(array.shape, array.dtype, array.ctypes.data, array.sum()) for array in arrays])

    def count(self, low, high):
        return 1

    def numbers(self, low, high, mean):
        return np.array([getattr(mean, "values", mean).sum(dtype=np.float64)])

    def arrived(self, shards):
        self.trips.append(sum(numbers[0] for _, _, numbers in shards))


@pytest.mark.parametrize(
    "config", [{"name": "torus2d"}, {"name": "hitopk", "density": 1.0}], ids=lambda c: c["name"]
)
def test_a_passenger_looks_at_the_weights_as_they_are_and_its_numbers_arrive(config):
    weights = [tf.Variable(tf.fill(shape, 2.0)) for shape in SHAPES[:3]]
    weights.append(tf.Variable(tf.fill(SHAPES[3], tf.constant(2, tf.bfloat16))))

    def body(comm):
        distributed = DistributedGradients(Topology(comm, ranks_per_node=2), variables(), config)
        distributed.passenger = passenger = Watcher()
        reduce = tf.function(distributed.reduce)
        reduce(gradients(comm.rank), weights)
        return distributed.carried, passenger

    addresses = [np.asarray(tf.convert_to_tensor(weight)).ctypes.data for weight in weights]
    for carried, passenger in simulated.run(body, world_size=3):
        assert carried
        lent, given_back = passenger.looks
        assert [shape for shape, *_ in lent] == SHAPES
        assert [dtype for _, dtype, *_ in lent] == [weight.dtype.as_numpy_dtype for weight in weights]
        assert [total for *_, total in lent] == [2 * np.prod(shape) for shape in SHAPES]
        # Not copied. What is no dimension becomes a NumPy scalar on the way, and that is a copy.
        assert [lent[which][2] for which in (0, 2, 3)] == [addresses[which] for which in (0, 2, 3)]
        assert given_back == []
        assert passenger.trips == [100 * 20 + 190]  # the mean is 100 + e


def test_a_variable_is_updated_in_place_after_its_passenger_has_let_go():
    class Holder(Watcher):
        def look(self, arrays):
            self.held = arrays

    weight = tf.Variable(tf.zeros([1000]))

    def body(comm):
        distributed = DistributedGradients(Topology(comm), [weight], {"name": "torus2d"})
        distributed.passenger = Holder()

        @tf.function
        def step():
            (mean,), _ = distributed.reduce([tf.ones([1000])], [weight])
            weight.assign_sub(mean)

        step()
        before = np.asarray(tf.convert_to_tensor(weight)).ctypes.data
        step()
        return before, np.asarray(tf.convert_to_tensor(weight)).ctypes.data

    ((before, after),) = simulated.run(body, world_size=1)
    assert before == after
    np.testing.assert_array_equal(weight.numpy(), -2)


def test_a_switch_takes_the_passenger_along_or_leaves_it_aside():
    def body(comm):
        topology = Topology(comm, ranks_per_node=1)
        distributed = DistributedGradients(topology, variables(), {"name": "hitopk", "density": 0.05})
        assert not distributed.carried
        distributed.passenger = passenger = Watcher()
        reduce, seen = tf.function(distributed.reduce), []
        for name in ("hitopk", "dense", "torus2d", "hioktopk"):
            if name != "hitopk":
                distributed.switch({"name": name})
            reduce(gradients(comm.rank), [])
            seen.append((distributed.carried, len(passenger.trips)))
        distributed.passenger = None
        return seen, distributed.carried

    expected = [(True, 1), (False, 1), (True, 2), (True, 3)]
    assert simulated.run(body, world_size=2) == [(expected, False)] * 2


def test_a_void_step_brings_a_passenger_nothing():
    def body(comm):
        distributed = DistributedGradients(Topology(comm), variables(), {"name": "torus2d"})
        distributed.passenger = passenger = Watcher()
        own = gradients(comm.rank)
        own[1] = tf.constant(np.nan)
        _, finite = distributed.reduce(own, variables())
        return bool(finite), len(passenger.looks), passenger.trips

    assert simulated.run(body, world_size=2) == [(False, 2, [])] * 2


def test_a_traced_function_takes_the_mean_over_without_a_copy():
    def body(comm):
        distributed = DistributedGradients(Topology(comm), [tf.Variable(tf.zeros([5000]))], {"name": "dense"})
        kept = []

        def reduce(flat):
            mean, finite = DistributedGradients._reduce(distributed, flat)
            kept.append(mean)
            return mean, finite

        distributed._reduce = reduce
        ((mean,), _) = tf.function(distributed.reduce)([tf.ones([5000])])
        return np.shares_memory(np.asarray(mean), kept[0])

    assert simulated.run(body, world_size=2) == [True] * 2


# ---------------------------------------------------------------------------- DistributedOptimizer


def fitted(comm, config, batches=4, poison=None):
    """Fit a linear model on ``batches`` of 8 samples of each rank's own; return weights, steps, optimizer."""
    generator = np.random.default_rng(comm.rank)
    inputs = generator.normal(size=(8 * batches, 3)).astype(np.float32)
    targets = inputs @ np.array([1.0, -2.0, 0.5], np.float32)
    if poison == comm.rank:
        targets[8:16] = np.nan
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
    optimizer = DistributedOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.5), Topology(comm, ranks_per_node=2), config
    )
    model.compile(optimizer=optimizer, loss="mse", jit_compile=False)
    model.fit(inputs, targets, batch_size=8, shuffle=False, verbose=0)
    return [weight.numpy() for weight in model.weights], optimizer, inputs, targets


def by_hand(data, batches=4):
    """Return what SGD makes of the mean gradients, in float64."""
    weights, bias = np.ones(3), 0.0
    velocity = np.zeros(4)
    for batch in range(batches):
        own = slice(8 * batch, 8 * batch + 8)
        gradients = []
        for inputs, targets in data:
            error = inputs[own].astype(float) @ weights + bias - targets[own]
            gradients.append([*(2 * error @ inputs[own] / 8), 2 * error.mean()])
        velocity = 0.5 * velocity - 0.05 * np.mean(gradients, axis=0)
        weights, bias = weights + velocity[:3], bias + velocity[3]
    return weights, bias


def test_fit_steps_along_the_mean_gradient_of_all_ranks():
    results = simulated.run(lambda comm: fitted(comm, {"name": "dense"}), 3)
    weights, bias = by_hand([(inputs, targets) for _, _, inputs, targets in results])
    for (kernel, offset), optimizer, _, _ in results:
        assert np.array_equal(kernel, results[0][0][0])
        assert np.array_equal(offset, results[0][0][1])
        # float32 sums of 8 products in TensorFlow
        np.testing.assert_allclose(kernel[:, 0], weights, rtol=1e-5)
        np.testing.assert_allclose(offset, [bias], rtol=1e-5, atol=1e-6)
        assert int(optimizer.iterations) == 4


@pytest.mark.parametrize("name", ["hitopk", "oktopk", "gtopk"])
def test_fit_keeps_the_ranks_alike_with_sparse_gradients(name):
    results = simulated.run(lambda comm: fitted(comm, {"name": name, "density": 0.25}), 4)
    for weights, optimizer, _, _ in results:
        assert all(np.array_equal(one, other) for one, other in zip(weights, results[0][0], strict=True))
        assert optimizer.gradients.reducer.steps == 4


def test_a_void_step_of_one_rank_changes_no_weight_on_any():
    results = simulated.run(lambda comm: fitted(comm, {"name": "dense"}, batches=2, poison=1), 2)
    clean = simulated.run(lambda comm: fitted(comm, {"name": "dense"}, batches=1), 2)
    for (weights, optimizer, _, _), (before, _, _, _) in zip(results, clean, strict=True):
        assert all(np.array_equal(one, other) for one, other in zip(weights, before, strict=True))
        assert int(optimizer.iterations) == 1


def test_the_learning_rate_is_that_of_the_optimizer_inside():
    def body(comm):
        optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1), Topology(comm), {"name": "dense"})
        optimizer.learning_rate = 0.5
        return float(optimizer.inner_optimizer.learning_rate), float(optimizer.learning_rate)

    assert simulated.run(body, 1) == [(0.5, 0.5)]


def test_a_loss_scale_of_each_rank_alone_is_refused():
    def body(comm):
        keras.config.set_dtype_policy("mixed_float16")  # of this thread
        return DistributedOptimizer(keras.optimizers.SGD(), Topology(comm), {"name": "dense"})

    with pytest.raises(InvalidArgument, match="dtype policy: expected one without a loss scale"):
        simulated.run(body, 1)
