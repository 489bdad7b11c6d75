"""Gradients of TensorFlow through a transport of GPUs: their means are those of the CPU."""

import pytest
import tensorflow as tf

from commlib import InvalidArgument, Topology
from commlib import tensorflow as adapter
from commlib.tensorflow import DistributedGradients
from commlib.transport import simulated
from tests import test_tensorflow_adapter as on_cpu
from tests.gpu.on_gpu import GPURanks


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
