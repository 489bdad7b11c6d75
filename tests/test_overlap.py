"""Buckets that are reduced while a graph of TensorFlow still computes: to the same bits as without."""

import numpy as np
import pytest
import tensorflow as tf

from commlib import RanksDisagree, Topology
from commlib.tensorflow import DistributedGradients
from commlib.transport import simulated

LAYERS = [(7, 11), (11, 5), (5, 3)]
BUCKET_BYTES = 4 * 60  # three buckets: 7·11 alone, 11·5 alone, 5·3
CONFIGS = {
    "dense": {"name": "dense"},
    "hitopk": {"name": "hitopk", "density": 0.1},
    "oktopk": {"name": "oktopk", "density": 0.1, "reevaluate_every": 2},
}


class Net:
    """Three dense layers with a loss, and the gradients of a batch that depends on rank and step."""

    def __init__(self):
        drawn = [np.random.default_rng(number).normal(size=shape) for number, shape in enumerate(LAYERS)]
        self.variables = [tf.Variable(each, name=f"w{n}", dtype=tf.float32) for n, each in enumerate(drawn)]

    def gradients(self, inputs):
        with tf.GradientTape() as tape:
            outputs = inputs
            for variable in self.variables:
                outputs = tf.tanh(outputs @ variable)
            loss = tf.reduce_sum(outputs**2)
        return tape.gradient(loss, self.variables)


def batch(rank, step):
    """The inputs of a step of a rank."""
    return tf.constant(np.random.default_rng([rank, step]).normal(size=(4, 7)), tf.float32)


def trained(comm, config, *, overlap, traced):
    """Reduce the gradients of four steps; return the flat means, whether they count, and the residual."""
    net = Net()
    topology = Topology(comm, ranks_per_node=2)
    options = {"bucket_bytes": BUCKET_BYTES, "overlap": overlap}
    with DistributedGradients(topology, net.variables, config, **options) as distributed:
        assert distributed.buckets == 3
        assert distributed.overlaps == overlap

        def step(inputs):
            return distributed.reduce(net.gradients(inputs))

        run, seen = tf.function(step) if traced else step, []
        for number in range(4):
            inputs = batch(comm.rank, number)
            if number == 1 == comm.rank:
                inputs *= np.nan  # of all buckets, on all ranks, this step does not count
            means, finite = run(inputs)
            seen.append((np.concatenate([mean.numpy().ravel() for mean in means]).tobytes(), bool(finite)))
        return seen, distributed.exchange.residual.tobytes(), topology.traffic


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_overlapped_steps_have_the_bits_of_plain_ones(config, traced):
    def run(overlap):
        return simulated.run(lambda comm: trained(comm, config, overlap=overlap, traced=traced), world_size=3)

    overlapped = run(overlap=True)
    assert overlapped == run(overlap=False)
    assert [finite for _, finite in overlapped[0][0]] == [True, False, True, True]


@pytest.mark.parametrize(("step", "expected"), [(1, [2, 1, 0]), (-1, [0, 1, 2])], ids=["listed", "reversed"])
def test_buckets_are_submitted_in_the_order_in_which_backpropagation_yields_them(step, expected):
    def body(comm):
        net = Net()
        variables = net.variables[::step]
        options = {"bucket_bytes": BUCKET_BYTES, "overlap": True}
        with DistributedGradients(Topology(comm), variables, {"name": "dense"}, **options) as distributed:
            tf.function(lambda inputs: distributed.reduce(net.gradients(inputs)[::step]))(batch(comm.rank, 0))
            return distributed.exchange.order

    assert simulated.run(body, 2) == [expected] * 2


def test_a_rehearsal_exchanges_nothing_and_changes_nothing():
    def body(comm):
        net, options = Net(), {"bucket_bytes": BUCKET_BYTES, "overlap": True}
        config = CONFIGS["hitopk"]
        with DistributedGradients(Topology(comm), net.variables, config, **options) as distributed:
            step = tf.function(lambda inputs: distributed.submit_in_graph(net.gradients(inputs)))
            with distributed.rehearsal():
                step(batch(comm.rank, 0))
            assert distributed.exchange.steps == 0
            assert distributed.topology.traffic.sent.intra == 0
            step(batch(comm.rank, 0))
            mean, report = distributed.wait()
            assert distributed.exchange.steps == 1
            return mean.tobytes(), report.finite

    (first, finite), other = simulated.run(body, 2)
    assert finite
    assert other == (first, finite)


@pytest.mark.parametrize(("count", "bucket_bytes", "buckets"), [(2, 1 << 20, 1), (1, 4, 1)])
def test_one_rank_or_one_bucket_overlaps_nothing(count, bucket_bytes, buckets):
    def body(comm):
        options = {"bucket_bytes": bucket_bytes, "overlap": True}
        small = DistributedGradients(Topology(comm), Net().variables, {"name": "dense"}, **options)
        return small.overlaps, small.buckets

    assert simulated.run(body, count) == [(False, buckets)] * count


def test_variables_in_another_order_on_a_rank_are_refused_by_name():
    def body(comm):
        variables = Net().variables
        order = [0, 2, 1] if comm.rank == 2 else [0, 1, 2]
        DistributedGradients(Topology(comm), [variables[each] for each in order], {"name": "dense"})

    with pytest.raises(
        RanksDisagree, match=r"number 1 is 'w1:0 .*' on ranks \[0, 1\], 'w2:0 .*' on ranks \[2\]$"
    ):
        simulated.run(body, 3)


def test_numbers_that_keras_appends_to_names_may_differ_between_ranks():
    def body(comm):
        name = "dense/kernel" if comm.rank == 0 else "dense_12/kernel"
        variable = tf.Variable(tf.zeros(3), name=name)
        return DistributedGradients(Topology(comm), [variable], {"name": "dense"}).size

    assert simulated.run(body, 2) == [3, 3]
