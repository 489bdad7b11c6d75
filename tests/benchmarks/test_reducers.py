"""Reducers beside all-reduces, and the memory that they take."""

import json

import numpy as np
import pytest

from benchmarks import memory, reducers
from commlib import REDUCERS, Topology
from commlib.reducers import Outcome, Reducer
from commlib.transport import simulated
from commlib.tuning.probe import Gradients
from tests.launching import mpirun, tail
from training.bench.reducers import Plan


@pytest.mark.slow
@pytest.mark.launch
def test_on_real_ranks_mpi_and_horovod_are_right_and_measured():
    words = ("--json", "--size", "10007", "--steps", "2", "--reducer", "hitopk")
    result = mpirun(2, "python", "-m", "benchmarks.reducers", *words)
    assert result.returncode == 0, tail(result)
    hitopk, mpi, horovod, bare = (json.loads(line) for line in result.stdout.splitlines())
    assert [each["subject"] for each in (mpi, horovod, bare)] == ["mpi", "horovod", "bare"]
    assert hitopk["peer"] in ("mpi", "horovod")
    assert hitopk["baselines"] == {each["subject"]: each["seconds"] for each in (mpi, horovod, bare)}
    assert bare["stages"]["intra"]["min"] > 0


# ------------------------------------------------------------- memory


class Hungry(Reducer):
    """Holds one vector and the memory of the mean, and for a moment two more vectors."""

    sparse = False

    def __init__(self, topology, size):
        super().__init__(topology, size)
        self.held = np.ones(size, np.float32)

    def _reduce(self, gradient, buffer):
        comm = self.topology.world
        outgoing, incoming = gradient + self.held, gradient - self.held
        request = comm.receive(incoming, (comm.rank - 1) % comm.size)
        comm.send(outgoing, (comm.rank + 1) % comm.size).wait()
        request.wait()
        mean = np.add(outgoing, incoming, out=buffer.dense())
        return Outcome(mean, self.size, self.size)


def test_memory_is_counted_a_rank_and_without_what_the_transport_copies():
    def held_of(size):
        gradients = Gradients(size)

        def step(comm):
            return memory.dense_vectors(comm, lambda metered: Hungry(Topology(metered), size), gradients)

        with memory.traced():
            return simulated.run(step, world_size=3)

    held_of(1000)  # what is imported and compiled at the first use takes memory, too
    held = held_of(250_007)
    # held, outgoing, incoming and the mean; all small objects are less than a hundredth of a vector
    assert held == [held[0]] * 3
    assert held[0] == pytest.approx(4, abs=0.02)


def test_no_reducer_holds_more_than_four_dense_vectors():
    """At density 0.01 on eight ranks, residual and result included."""
    # Long enough for the selectors' histograms, 64 KiB whatever the size, not to count.
    found = list(reducers.memory(Plan(size=300_000)))
    assert [each.name for each, _ in found] == list(REDUCERS)
    assert all(1 <= vectors <= 4 for _, vectors in found), found
