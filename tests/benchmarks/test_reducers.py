"""Reducers beside all-reduces: who is measured with whom, also on emulated clusters, and what is kept."""

import json

import numpy as np
import pytest

from benchmarks import memory, reducers
from benchmarks.allreduce import ALLREDUCES, KEEP_MEMORY
from benchmarks.reducers import measure
from commlib import REDUCERS, Topology
from commlib.reducers import Outcome, Reducer
from commlib.reducers.dense import Dense
from commlib.transport import simulated
from commlib.tuning.probe import Gradients
from tests.launching import ROOT, mpirun, run, tail
from tests.test_cluster import commands, skip_where_no_cluster_can_be_made
from training.bench.record import Record
from training.bench.reducers import Plan

# ------------------------------------------------------------- beside all-reduces, on simulated ranks


class Twice(Dense):
    """Reduces twice."""

    def _reduce(self, gradient, buffer):
        super()._reduce(gradient, buffer)
        return super()._reduce(gradient, buffer)


class Nothing(Reducer):
    """Computes no mean, and takes no time but for a barrier."""

    sparse = True

    def __init__(self, topology, size, *, density):
        super().__init__(topology, size)

    def _reduce(self, gradient, buffer):
        self.topology.world.barrier()
        return Outcome(np.zeros(self.size, np.float32))


@pytest.fixture
def simulated_allreduces(monkeypatch):
    """All-reduces that need no MPI."""
    for name, kind in {"mpi": Twice, "horovod": Dense, "bare": Nothing}.items():
        monkeypatch.setitem(ALLREDUCES, name, kind)


def measured(**given) -> list[Record]:
    """Return rank 0's records of simulated ranks that are taken for real ones, two a node."""
    asked = {"size": 3001, "steps": 2, "ranks_per_node": 2} | given
    return simulated.run(lambda comm: list(measure(Plan(comm, **asked))), 4)[0]


def test_a_reducer_is_beside_all_all_reduces_and_the_peer_is_the_faster_one(simulated_allreduces):
    dense, hitopk, *allreduces = measured(reducers=["dense", "hitopk"])
    for record in (dense, hitopk):
        assert record.peer == "horovod"  # MPI is made to reduce twice
        assert list(record.more["baselines"]) == ["mpi", "horovod", "bare"]
        assert record.more["baselines"]["horovod"]["median"] == record.peer_seconds.median
        assert record.more["baselines"]["mpi"]["median"] > 1.5 * record.peer_seconds.median
        assert record.more["baselines"]["bare"]["median"] < record.peer_seconds.median
        for stage in record.more["stages"].values():
            assert stage["min"] <= stage["mean"] <= stage["max"]
    assert dense.ratio == pytest.approx(1, rel=1e-6)
    assert hitopk.bytes.inter == 8 * round(0.01 * 1500)  # one other node, half of the gradient
    assert [record.subject for record in allreduces] == ["mpi", "horovod", "bare"]
    for record in allreduces:
        assert (record.peer, record.bytes, record.more["entries"]) == (None, None, None)
        assert (record.more["stages"] is None) == (record.subject != "bare")
        assert record.case["density"] == (0.01 if record.subject == "bare" else None)


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
    list(reducers.memory(Plan(size=2000)))  # kernels are compiled, which takes memory too
    # Long enough for the selectors' histograms, 64 KiB whatever the size, not to count.
    found = list(reducers.memory(Plan(size=300_000)))
    assert [each.name for each, _ in found] == list(REDUCERS)
    assert all(1 <= vectors <= 4 for _, vectors in found), found


# ------------------------------------------------------------- jobs of a cluster


@pytest.mark.cluster
@pytest.mark.launch
def test_on_a_real_cluster_every_candidate_is_measured_and_nothing_is_left(tmp_path):
    skip_where_no_cluster_can_be_made()
    nodes = ("--nodes", "2", "--ranks-per-node", "1", "--rate", "1gbit")
    words = (*nodes, "--size", "20011", "--density", "0.01", "--steps", "2", "--reducer", "hitopk", "--json")
    program = ("python", "-m", "benchmarks.reducers", "--cluster")
    result = run("env", f"TMPDIR={tmp_path}", *program, *words, cwd=ROOT)
    assert result.returncode == 0, tail(result)
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["bench"] for record in records] == ["probe"] * 4 + ["reducers"] * 6
    alone = ["mpi, memory kept", "horovod, memory kept"]
    assert [record["subject"] for record in records[4:]] == ["hitopk", "mpi", "horovod", "bare", *alone]
    for record in records:
        is_kept = KEEP_MEMORY.items() <= record["settings"]["environment"].items()
        assert is_kept == (record["subject"] in alone)
        assert (record["case"]["ranks_of_nodes"], record["case"]["rate"]) == ([1, 1], "1gbit")
    assert records[4]["bytes"]["inter"] == 8 * 200  # k entries to the one other node
    assert not any(str(tmp_path) in command for command in commands().values())
    assert list(tmp_path.iterdir()) == []
