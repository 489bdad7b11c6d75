"""Gradients of TensorFlow through a transport of GPUs: memory changes hands, and nothing is copied."""

import numpy as np
import pytest
import tensorflow as tf

from commlib import InvalidArgument, Topology
from commlib import tensorflow as adapter
from commlib.tensorflow import DistributedGradients, array_of, tensor_of
from commlib.transport import simulated
from tests import test_tensorflow_adapter as on_cpu
from tests.gpu.fake_cupy import FakeCuPy, installed
from tests.gpu.on_gpu import GPURanks

SIZE = 20  # of the gradients of test_tensorflow_adapter, together


@pytest.fixture(autouse=True)
def gpus_that_are_processors(monkeypatch):
    """TensorFlow's part of a GPU is the CPU, where the fake arrays lie."""
    monkeypatch.setattr(adapter.gradients, "tensorflow_device", lambda gpu: "CPU:0")


def mean_of_steps(comm, config, *, traced):
    distributed = DistributedGradients(Topology(comm, ranks_per_node=2), on_cpu.variables(), config)
    reduce = tf.function(distributed.reduce) if traced else distributed.reduce
    steps = []
    for _ in range(3):
        means, finite = reduce(on_cpu.gradients(comm.rank))
        steps.append(b"".join(mean.numpy().tobytes() for mean in means) + bytes([bool(finite)]))
    return steps, distributed.exchange.residual.tobytes()


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("name", ["dense", "torus2d", "hitopk"])
def test_steps_on_a_gpu_have_the_bits_of_those_on_the_cpu(name, traced):
    config = {"name": name} | ({"density": 0.2} if name == "hitopk" else {})
    on_gpu = GPURanks(3).run(lambda comm: mean_of_steps(comm, config, traced=traced))
    assert on_gpu == simulated.run(lambda comm: mean_of_steps(comm, config, traced=traced), world_size=3)


def test_a_flat_gradient_and_its_mean_change_hands_without_a_copy():
    ranks = GPURanks(2)

    def body(comm):
        distributed = DistributedGradients(Topology(comm), on_cpu.variables(), {"name": "dense"})
        distributed.submit_inputs([tf.range(SIZE, dtype=tf.float32) * (1 + comm.rank)])
        mean, report = distributed.wait()
        return tensor_of(mean).numpy(), report.finite

    for mean, finite in ranks.run(body):
        np.testing.assert_array_equal(mean, 1.5 * np.arange(SIZE))
        assert finite
    assert max(ranks.cupy.copied_to_host) == 1  # whether all is finite


def test_a_tensor_shares_its_memory_with_its_array_in_both_directions():
    with installed(FakeCuPy()) as cupy:
        tensor = tf.range(64, dtype=tf.float32)
        array = array_of(tensor, cupy)
        assert array.data.ptr == np.asarray(tensor).ctypes.data
        made = cupy.zeros(1 << 12, np.float32)
        assert np.asarray(tensor_of(made)).ctypes.data == made.data.ptr


def test_a_switch_flushes_the_residual_on_the_gpu():
    def body(comm):
        topology = Topology(comm, ranks_per_node=1)
        distributed = DistributedGradients(topology, on_cpu.variables(), {"name": "hitopk", "density": 0.05})
        first = np.concatenate(
            [mean.numpy().ravel() for mean in distributed.reduce(on_cpu.gradients(comm.rank))[0]]
        )
        distributed.switch({"name": "dense"})
        nothing = [tf.zeros(shape) for shape in on_cpu.SHAPES]
        return first + np.concatenate([mean.numpy().ravel() for mean in distributed.reduce(nothing)[0]])

    for total in GPURanks(2).run(body):
        np.testing.assert_array_equal(total, 50 + np.arange(SIZE))


@pytest.mark.parametrize(
    ("visible", "gpu", "message"),
    [([], 0, "TensorFlow sees none"), ([3], 3, "CUDA_VISIBLE_DEVICES"), ([3], 0, "CUDA_VISIBLE_DEVICES")],
)
def test_gpus_that_tensorflow_does_not_see_or_numbers_otherwise_are_refused(
    visible, gpu, message, monkeypatch
):
    monkeypatch.undo()
    seen = [tf.config.PhysicalDevice(f"/physical_device:GPU:{number}", "GPU") for number in visible]
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: seen)
    with pytest.raises(InvalidArgument, match=message):
        adapter.tensorflow_device(gpu)
