"""What ``cloudtrain tune`` measures of ranks whose gradients lie on GPUs."""

import pytest

from commlib import InvalidArgument, Link, Network, Topology
from commlib.transport import nccl, simulated
from commlib.tuning import probe
from commlib.tuning.probe import WIRES
from tests.gpu.fake_cupy import FakeCuPy, installed
from tests.gpu.on_gpu import kernels_for

NETWORK = Network(Link(1e-6, 1e-10), Link(1e-5, 8e-10))


@pytest.fixture
def cupy(monkeypatch):
    monkeypatch.setattr(probe, "KERNEL_SIZE", 1 << 11)
    cupy = FakeCuPy()
    with installed(cupy), kernels_for(cupy):
        yield cupy


def on_gpus(cupy, function, ranks=4):
    def body(comm):
        cupy.nccl.speaks_as(comm)
        return function(Topology(nccl.over(comm), ranks_per_node=2))

    return simulated.run(body, ranks, network=NETWORK)


def test_links_are_those_between_gpus_and_the_profile_is_none_of_processors(cupy):
    profiles = on_gpus(cupy, probe.measure)
    assert len({repr(profile) for profile in profiles}) == 1
    assert set(profiles[0].speeds.code) == set(WIRES)
    assert cupy.nccl.launches.count("send") >= 4 * len(probe.MESSAGE_BYTES)  # from each GPU, over both links
    assert all(processor.endswith(", A GPU by nccl") for processor in profiles[0].job.processors)
    here = simulated.run(lambda comm: probe.job_of(Topology(comm, ranks_per_node=2)), 4)[0]
    with pytest.raises(InvalidArgument, match="A GPU.* there, .* here"):
        profiles[0].check(here)
