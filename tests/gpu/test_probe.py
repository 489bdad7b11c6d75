"""What ``cloudtrain tune`` measures of ranks whose gradients lie on GPUs."""

import pytest

from commlib import InvalidArgument, Link, Network, Topology
from commlib.transport import simulated
from commlib.tuning import probe
from commlib.tuning.probe import WIRES
from tests.gpu.on_gpu import GPURanks

NETWORK = Network(Link(1e-6, 1e-10), Link(1e-5, 8e-10))


def test_links_are_those_between_gpus_and_the_profile_is_none_of_processors(monkeypatch):
    monkeypatch.setattr(probe, "KERNEL_SIZE", 1 << 11)
    monkeypatch.setattr(probe, "RUNS", 3)
    ranks = GPURanks(4)
    profiles = ranks.run(lambda comm: probe.measure(Topology(comm, ranks_per_node=2)), network=NETWORK)
    assert len({repr(profile) for profile in profiles}) == 1
    assert set(profiles[0].speeds.code) == set(WIRES)
    assert ranks.cupy.nccl.launches.count("send") >= 4 * len(
        probe.MESSAGE_BYTES
    )  # from each GPU, over both links
    assert all(processor.endswith(", A GPU by nccl") for processor in profiles[0].job.processors)
    here = simulated.run(lambda comm: probe.job_of(Topology(comm, ranks_per_node=2)), 4)[0]
    with pytest.raises(InvalidArgument, match="A GPU.* there, .* here"):
        profiles[0].check(here)
