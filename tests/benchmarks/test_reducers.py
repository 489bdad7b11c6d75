"""Reducers beside all-reduces: who is measured with whom, also on emulated clusters, and what is kept."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import jobs, memory, reducers
from benchmarks.allreduce import ALLREDUCES, KEEP_MEMORY
from benchmarks.jobs import Layout
from benchmarks.reducers import Sweep, measure
from commlib import REDUCERS, Topology
from commlib.reducers import Outcome, Reducer
from commlib.reducers.dense import Dense
from commlib.transport import simulated
from commlib.tuning.probe import Gradients
from tests.launching import ROOT, mpirun, run, tail
from tests.test_cluster import commands, skip_where_no_cluster_can_be_made
from training.bench.record import Record, WrongResult
from training.bench.reducers import Options, Plan

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
    asked = Options(**{"size": 3001, "steps": 2, "ranks_per_node": 2} | given)
    return simulated.run(lambda comm: list(measure(Plan.of(asked, comm))), 4)[0]


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


def test_an_all_reduce_that_is_wrong_is_not_timed(simulated_allreduces, monkeypatch):
    class Wrong(Dense):
        def _reduce(self, gradient, buffer):
            outcome = super()._reduce(gradient, buffer)
            outcome.mean[5] += 1
            return outcome

    monkeypatch.setitem(ALLREDUCES, "mpi", Wrong)
    with pytest.raises(WrongResult, match="^mpi: .* in 1 of 3001"):
        measured(reducers=["dense"])


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
    list(reducers.memory(Plan.of(Options(size=2000), None)))  # kernels are compiled, which takes memory too
    # Long enough for the selectors' histograms, 64 KiB whatever the size, not to count.
    found = list(reducers.memory(Plan.of(Options(size=300_000), None)))
    assert [each.name for each, _ in found] == list(REDUCERS)
    assert all(1 <= vectors <= 4 for _, vectors in found), found


# ------------------------------------------------------------- jobs of a cluster


def sweep(**given) -> Sweep:
    own = {"layout": Layout(4, 2), "rates": ["1gbit", "2gbit"], "sizes": [77], "densities": [0.01, 0.001]}
    return Sweep(**own | {"steps": 20} | given)


def told(subject: str, median: float, **keys) -> dict:
    """Return a record as a job prints it."""
    seconds = {"median": median, "min": median, "max": median, "runs": 5}
    case = {"size": 77, "density": None, "wire": None, "ranks_of_nodes": [2, 2], "quick": False}
    own = {"bench": "reducers", "case": case, "subject": subject, "peer": None, "seconds": seconds}
    return own | {"peer_seconds": None, "bytes": None, "entries": None, "stages": None} | keys


def beside(subject: str, own: float, peers: dict[str, float]) -> dict:
    """Return a record beside peers, of which the first is its peer."""
    baselines = {name: told(name, median)["seconds"] for name, median in peers.items()}
    peer = next(iter(peers))
    return told(subject, own, peer=peer, peer_seconds=baselines[peer], baselines=baselines)


class FakeCluster:
    """Prints what jobs print, and keeps what was asked for."""

    calls: list[tuple]

    def __init__(self, state: Path) -> None:
        assert not state.exists()

    def up(self, nodes, rate):
        self.calls.append(("up", nodes, rate))

    def down(self):
        self.calls.append(("down",))

    def records(self, layout, words, environment, timeout, what):
        algorithm = environment.get("OMPI_MCA_coll_tuned_allreduce_algorithm")
        density = words[words.index("--density") + 1] if "--density" in words else None
        is_kept = KEEP_MEMORY.items() <= environment.items()
        self.calls.append(("run", "memory kept" if is_kept else density, algorithm))
        if is_kept:
            yield from (told("dense", 1.0), told("mpi", 5.0), told("horovod", 7.0), told("bare", 1.0))
        elif density is None:
            yield beside("dense", 1.0, {"mpi": {None: 4.0, "4": 2.0, "5": 1.0, "6": 3.0}[algorithm]})
            yield told("mpi", 1.0)
        else:
            yield beside("hitopk", 3.0, {"mpi": 6.0})
            yield from (told("mpi", 6.0), told("horovod", 6.0), told("bare", 1.0))


def test_a_sweep_probes_each_size_at_each_rate_and_measures_each_density_with_the_best(monkeypatch):
    fake = type("Fake", (FakeCluster,), {"calls": []})
    monkeypatch.setattr(jobs, "EmulatedCluster", fake)
    records = list(sweep(reducers=["hitopk"]).records())
    probes = [("run", None, number) for number in (None, "4", "5", "6")]
    work = [*probes, *(("run", what, "5") for what in ("memory kept", "0.01", "0.001"))]
    assert fake.calls == [("up", 4, "2gbit"), ("up", 4, "1gbit"), *work, ("up", 4, "2gbit"), *work, ("down",)]
    of_a_rate = [
        *[("probe", "dense")] * 4,
        *(("reducers", each) for each in ["hitopk", "mpi", "horovod", "bare"]),
    ]
    of_a_rate += [("reducers", "hitopk"), ("reducers", "bare")]  # all-reduces have no density: measured once
    of_a_rate += [("reducers", "mpi, memory kept"), ("reducers", "horovod, memory kept")]
    assert [(record["bench"], record["subject"]) for record in records] == 2 * of_a_rate
    algorithms = ["default", "ring", "segmented ring", "Rabenseifner", *["segmented ring"] * 8]
    assert [record["case"]["mpi_algorithm"] for record in records] == 2 * algorithms
    assert [record["case"]["rate"] for record in records] == ["1gbit"] * 12 + ["2gbit"] * 12
    for record in records:
        if record["subject"] == "hitopk":  # the all-reduce whose memory is kept was the faster one
            assert list(record["baselines"]) == ["mpi", "mpi, memory kept", "horovod, memory kept"]
            assert (record["peer"], record["ratio"]) == ("mpi, memory kept", pytest.approx(5 / 3))


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
