"""Benches beside all-reduces: who is measured with whom, on emulated clusters too, and what is kept of it."""

import json
import os
import platform
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks import cluster
from benchmarks.cluster import Sweep, best_algorithm, environment
from benchmarks.jobs import Failed
from commlib import REDUCERS
from commlib.reducers import Outcome, Reducer
from commlib.reducers.dense import Dense
from commlib.transport import simulated
from tests.launching import mpirun, run, tail
from tests.test_cluster import commands, skip_where_no_cluster_can_be_made
from training.bench import options
from training.bench.allreduce import ALLREDUCES, KEEP_MEMORY
from training.bench.checks import WrongResult
from training.bench.options import Options
from training.bench.plan import Plan
from training.bench.record import SETTING, Record, settings
from training.bench.reducers import measure
from training.commands.main import app

SPARSE = [name for name in REDUCERS if REDUCERS[name].sparse]


def bench(*words: str):
    """Run ``cloudtrain bench reducers`` in this process."""
    return CliRunner().invoke(app, ["bench", "reducers", *words])


# ------------------------------------------------------------- beside all-reduces, on simulated ranks


class Twice(Dense):
    """Takes twice as long as ``dense``, or twice as often."""

    def _reduce(self, gradient):
        super()._reduce(gradient)
        return super()._reduce(gradient)


class Nothing(Reducer):
    """Computes no mean, and takes no time but for a barrier."""

    sparse = True

    def __init__(self, topology, size, *, density):
        super().__init__(topology, size)
        assert 0 < density < 1

    def _reduce(self, gradient):
        self.topology.world.barrier()
        return Outcome(np.zeros(self.size, np.float32))


@pytest.fixture
def simulated_allreduces(monkeypatch):
    """All-reduces that need no MPI."""
    for name, kind in {"mpi": Twice, "horovod": Dense, "bare": Nothing}.items():
        monkeypatch.setitem(options.KINDS, name, kind)


def measured(*, ranks: int = 4, **given) -> list[Record]:
    """Return rank 0's records of simulated ranks that are taken for real ones, two a node."""
    asked = Options(**{"sizes": [3001], "steps": 2, "allreduce": True, "ranks_per_node": 2} | given)
    return simulated.run(lambda comm: list(measure(Plan.of(asked, comm))), ranks)[0]


def test_a_reducer_is_beside_all_all_reduces_and_the_peer_is_the_faster_one(simulated_allreduces):
    dense, hitopk, *allreduces = measured(reducers=["dense", "hitopk"])
    for record in (dense, hitopk):
        assert record.peer == "horovod"  # MPI is made to reduce twice
        assert list(record.more["baselines"]) == ["mpi", "horovod", "bare"]
        assert record.more["baselines"]["horovod"]["median"] == record.peer_seconds.median
        assert record.more["baselines"]["mpi"]["median"] > 1.5 * record.peer_seconds.median
        assert record.more["baselines"]["bare"]["median"] < record.peer_seconds.median
        assert {"memory", "prediction"}.isdisjoint(record.more)
        assert "network" not in record.case
        for stage in record.more["stages"].values():
            assert stage["min"] <= stage["mean"] <= stage["max"]
    assert dense.ratio == pytest.approx(1, rel=1e-6)
    assert hitopk.case["density"] == 0.01
    assert hitopk.bytes.inter == 8 * round(0.01 * 1500)  # one other node, half of the gradient
    assert [record.subject for record in allreduces] == ["mpi", "horovod", "bare"]
    for record in allreduces:
        assert (record.peer, record.bytes, record.more["entries"]) == (None, None, None)
        assert (record.more["stages"] is None) == (record.subject != "bare")
        assert record.case["density"] == (0.01 if record.subject == "bare" else None)


def test_every_codec_is_measured_with_every_sparse_reducer(simulated_allreduces):
    records = measured(reducers=["dense", "hitopk"], wires=["fp32", "gap+fp16"])
    subjects = [(record.subject, record.case["wire"]) for record in records if "baselines" in record.more]
    assert subjects == [("dense", None), ("hitopk", "fp32"), ("hitopk", "gap+fp16")]
    fp32, packed = (record.bytes.inter for record in records[1:3])
    assert packed < 0.6 * fp32


def test_all_reduces_are_beside_every_group_and_told_once(simulated_allreduces):
    records = measured()
    reducers = [record.subject for record in records if "baselines" in record.more]
    assert reducers == list(REDUCERS)
    assert [record.subject for record in records if "baselines" not in record.more] == [
        "mpi",
        "horovod",
        "bare",
    ]
    assert all(record.more["baselines"].keys() == ALLREDUCES.keys() for record in records[: len(REDUCERS)])


@pytest.mark.parametrize(
    ("wires", "lengths"),
    [([], [5, 5]), (["fp32", "gap"], [4, 5, 4, 5]), (["gap", "bf16", "qsgd8"], [4, 4, 4, 4, 5, 5])],
)
def test_groups_are_no_larger_than_fits_and_about_even(wires, lengths, monkeypatch):
    monkeypatch.setattr("training.bench.plan.LARGEST_GROUP_ENTRIES", 5 * 8)
    plan = Plan.of(Options(sizes=[8], wires=wires), None)
    groups = list(plan.groups())
    assert sorted(map(len, groups)) == sorted(lengths)
    assert [each for group in groups for each in group] == plan.candidates


def test_an_all_reduce_that_is_wrong_is_not_timed(simulated_allreduces, monkeypatch):
    class Wrong(Dense):
        def _reduce(self, gradient):
            outcome = super()._reduce(gradient)
            outcome.mean[5] += 1
            return outcome

    monkeypatch.setitem(options.KINDS, "mpi", Wrong)
    with pytest.raises(
        WrongResult, match=r"^mpi: P·mean \+ Σ residual differs from Σ gradients in 1 of 3001"
    ):
        measured(reducers=["dense"])


def test_the_codec_shows_without_all_reduces_too():
    result = bench("-np", "4", "--ranks-per-node", "2", "--size", "3001", "--steps", "1", "--wire", "gap")
    assert result.exit_code == 0, result.output
    firsts = [line.split()[:2] for line in result.stdout.splitlines() if line]
    assert ["hitopk", "gap"] in firsts
    assert ["dense", "gap"] not in firsts


# ------------------------------------------------------------- beside all-reduces, on real ranks


@pytest.mark.slow
@pytest.mark.launch
def test_on_real_ranks_mpi_and_horovod_are_right_and_measured():
    words = ("--allreduce", "--json", "--size", "10007", "--steps", "2", "--reducer", "hitopk")
    result = mpirun(2, "cloudtrain", "bench", "reducers", *words)
    assert result.returncode == 0, tail(result)
    hitopk, mpi, horovod, bare = (json.loads(line) for line in result.stdout.splitlines())
    assert [each["subject"] for each in (mpi, horovod, bare)] == ["mpi", "horovod", "bare"]
    assert hitopk["peer"] in ("mpi", "horovod")
    assert hitopk["baselines"] == {each["subject"]: each["seconds"] for each in (mpi, horovod, bare)}
    assert mpi["bytes"] is horovod["stages"] is None
    assert bare["stages"]["intra"]["min"] > 0
    assert hitopk["machine"]["openmpi"]
    assert not result.stderr


@pytest.mark.slow
@pytest.mark.launch
def test_without_horovod_no_tensorflow_is_started():
    program = (
        "import sys; from training.commands.main import app;"
        "words = ['--allreduce', '--no-horovod', '--size', '999', '--steps', '1', '--reducer', 'dense'];"
        "app(['bench', 'reducers', *words], standalone_mode=False);"
        "assert 'tensorflow' not in sys.modules"
    )
    result = mpirun(2, sys.executable, "-c", program)
    assert result.returncode == 0, tail(result)
    rows = [line.split() for line in result.stdout.splitlines() if line]
    assert [row[0] for row in rows if row[0] in ("dense", "mpi", "horovod", "bare")] == [
        "dense",
        "mpi",
        "bare",
    ]


# ------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--allreduce",), "--allreduce: expected ranks of mpirun or horovodrun, got simulated ones"),
        (("--allreduce", "--peers"), "--allreduce: has an effect only without --peers"),
        (("--allreduce", "--inter-gbit", "1"), "--inter-gbit: has an effect only without --allreduce"),
        (("--no-horovod",), "--no-horovod: has an effect only with --allreduce or --cluster"),
        (("--algorithm", "ring"), "--algorithm: has an effect only with --cluster"),
        (("--cluster", "--algorithm", "rings"), 'unknown algorithm "rings" (known: default, ring, '),
        (("--wire", "zip"), 'unknown codec "zip" (known: raw32, '),
        (("--wire", "gap", "--reducer", "dense"), "--wire: expected a sparse --reducer, got dense"),
        (("--wire", "gap", "--peers"), "--wire: has an effect only without --peers"),
        (("--size", "5", "--size", "6"), "--size: expected one without --cluster, got 2"),
        (("--density", "0.1", "--density", "0.2"), "--density: expected one without --cluster, got 2"),
        (("--rate", "1gbit"), "--rate: has an effect only with --cluster"),
        (("--nodes", "4"), "--nodes: has an effect only with --cluster"),
        (("--timeout", "5"), "--timeout: has an effect only with --cluster"),
        (("--cluster", "-np", "4"), "-np: has an effect only without --cluster"),
        (("--cluster", "--allreduce"), "--allreduce: has an effect only without --cluster"),
        (("--cluster", "--intra-gbit", "8"), "--intra-gbit: has an effect only without --cluster"),
        (("--cluster", "--nodes", "0"), "--nodes: expected at least 1, got 0"),
        (("--cluster", "--timeout", "0.5"), "--timeout: expected at least 1, got 0.5"),
        (("--cluster", "--size", "9", "--size", "0"), "--size: expected at least 1, got 0"),
        (
            ("--cluster", "--density", "0.1", "--density", "2"),
            "density: expected a number in (0, 1], got 2.0",
        ),
        (
            ("--cluster", "--nodes", "1", "--ranks-per-node", "1"),
            "--nodes, --ranks-per-node: expected two ranks or more, got 1",
        ),
    ],
    ids=" ".join,
)
def test_a_bad_value_is_one_line_and_status_2(words, message):
    result = bench(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"cloudtrain: {message}")
    assert result.stderr.count("\n") == 1


def test_what_the_script_says_of_a_cluster_that_cannot_be_is_the_one_line(monkeypatch, tmp_path):
    script = tmp_path / "cluster.py"
    script.write_text(
        "import sys; 'up' in sys.argv and sys.exit(print('cluster: needs root: su', file=sys.stderr) or 2)"
    )
    monkeypatch.setattr(cluster, "SCRIPT", (sys.executable, str(script)))
    result = bench("--cluster", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "cloudtrain: --cluster: needs root: su\n"


# ------------------------------------------------------------- jobs of a cluster


def sweep(**given) -> Sweep:
    return Sweep.of(Options(cluster=True, **given))


def test_dense_reducers_are_measured_with_the_first_density_only():
    first, second = (sweep().measuring(77, density) for density in (0.01, 0.001))
    names = [
        [words[place + 1] for place, word in enumerate(words) if word == "--reducer"]
        for words in (first, second)
    ]
    assert names == [list(REDUCERS), SPARSE]
    assert "--steps 20 --density 0.001" in " ".join(second)
    assert sweep(reducers=["dense"]).measuring(77, 0.001) == []


def test_codecs_are_passed_on_to_sparse_reducers():
    words = sweep(reducers=["dense", "hitopk"], wires=["fp32", "gap+fp16"]).measuring(77, 0.01)
    assert " ".join(words).endswith("--reducer dense --reducer hitopk --wire fp32 --wire gap+fp16")
    assert Options(reducers=["dense", "hitopk"], wires=["fp32"], allreduce=True)  # as the ranks take them


def test_without_horovod_the_ranks_are_told_so():
    assert "--no-horovod" in sweep(horovod=False).measuring(77, 0.01)
    assert "--no-horovod" not in sweep().measuring(77, 0.01)


def test_an_algorithm_that_is_given_is_not_probed():
    assert list(sweep(algorithm="ring").algorithms) == ["ring"]
    assert list(sweep().algorithms) == ["default", "ring", "segmented ring", "Rabenseifner"]


def test_mpi_gets_the_algorithm_from_the_environment_and_nothing_of_the_user_s(monkeypatch):
    monkeypatch.setenv("OMPI_MCA_coll_tuned_allreduce_algorithm", "1")
    monkeypatch.setenv("OMPI_MCA_coll", "basic")
    monkeypatch.setenv("OMPI_MCA_btl", "tcp,self")
    default, ring = environment("default"), environment("ring")
    for each in (default, ring):
        assert each["OMPI_MCA_btl"] == "tcp,self"
        assert each["TF_CPP_MIN_LOG_LEVEL"] == "3"
    assert not any(name.startswith("OMPI_MCA_coll") for name in default)
    assert {name: value for name, value in ring.items() if name.startswith("OMPI_MCA_coll")} == {
        "OMPI_MCA_coll": "^han",
        "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
        "OMPI_MCA_coll_tuned_allreduce_algorithm": "4",
    }


def told(subject: str, median: float, algorithm: str = "ring", **keys) -> dict:
    """Return a record as a job prints it."""
    seconds = {"median": median, "min": median, "max": median, "runs": 5}
    case = {"size": 77, "density": None, "wire": None, "ranks_of_nodes": [2, 2], "quick": False}
    stage = {"min": 0.0, "mean": 0.0, "max": 0.0}
    return {
        "bench": "reducers",
        "case": case | ({"mpi_algorithm": algorithm} if algorithm else {}),
        "subject": subject,
        "peer": None,
        "seconds": seconds,
        "peer_seconds": None,
        "bytes": None,
        "entries": None,
        "stages": dict.fromkeys(("select", "intra", "inter", "combine"), stage),
        "command": "of the job",
        **keys,
    }


def probed(algorithm: str | None, dense: float, mpi: float) -> dict:
    seconds = {"median": mpi, "min": mpi, "max": mpi, "runs": 5}
    baselines = {"mpi": seconds, "bare": seconds}
    return told("dense", dense, algorithm, peer="mpi", peer_seconds=seconds, baselines=baselines)


def test_the_best_algorithm_is_the_fastest_beside_dense_of_its_job():
    # the second ran while the machine was busy: dense took twice as long there, too
    probes = [probed("default", 1.0, 3.0), probed("ring", 2.0, 1.8), probed("Rabenseifner", 1.0, 1.1)]
    assert best_algorithm(probes) == "ring"


class FakeCluster:
    """Prints what jobs print, and keeps what was asked for."""

    calls: list[tuple]
    fails_at: str | None = None
    kept = {"mpi": 5.0, "horovod": 7.0}  # seconds of peers whose memory is kept

    def __init__(self, state: Path) -> None:
        assert not state.exists()

    def up(self, nodes, rate):
        self.calls.append(("up", nodes, rate))

    def down(self):
        self.calls.append(("down",))

    def lines(self, job, environment, timeout):
        words = json.loads(job[-1])
        algorithm = environment.get("OMPI_MCA_coll_tuned_allreduce_algorithm")
        density = words[words.index("--density") + 1] if "--density" in words else None
        is_kept = KEEP_MEMORY.items() <= environment.items()
        self.calls.append(("run", "memory kept" if is_kept else density, algorithm))
        yield "mpirun says something\n"
        if is_kept:
            for subject, median in {"dense": 1.0, **self.kept, "bare": 1.0}.items():
                yield json.dumps(told(subject, median, "")) + "\n"
            return
        if density is None:
            yield json.dumps(probed(None, 1.0, {None: 4.0, "4": 2.0, "5": 1.0, "6": 3.0}[algorithm])) + "\n"
            yield json.dumps(told("mpi", 1.0, "")) + "\n"
            return
        if density == self.fails_at:
            raise Failed("status 1: node3 is on fire")
        peers = {"peer": "mpi", "peer_seconds": told("mpi", 6.0)["seconds"]}
        peers["baselines"] = {"mpi": peers["peer_seconds"]}
        for subject in ["hitopk", "mpi", "horovod", "bare"]:
            yield json.dumps(told(subject, 3.0, "", **(peers if subject == "hitopk" else {}))) + "\n"


@pytest.fixture
def fake(monkeypatch):
    fake = type("Fake", (FakeCluster,), {"calls": []})
    monkeypatch.setattr(cluster, "EmulatedCluster", fake)
    return fake


WORDS = ("--cluster", "--rate", "1gbit", "--rate", "2gbit", "--size", "77", "--reducer", "hitopk")


def test_a_sweep_probes_each_size_at_each_rate_and_measures_each_density_with_the_best(fake, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["cloudtrain", "bench", "reducers", *WORDS])
    result = bench(*WORDS, "--json")
    assert result.exit_code == 0, result.output
    probes = [("run", None, number) for number in (None, "4", "5", "6")]
    jobs = [*probes, *(("run", what, "5") for what in ("memory kept", "0.01", "0.001"))]
    assert fake.calls == [("up", 4, "2gbit"), ("up", 4, "1gbit"), *jobs, ("up", 4, "2gbit"), *jobs, ("down",)]
    records = [json.loads(line) for line in result.stdout.splitlines()]
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
    assert {record["command"] for record in records} == {f"cloudtrain bench reducers {' '.join(WORDS)}"}


def test_without_json_there_is_a_table_a_rate(fake):
    result = bench(*WORDS)
    assert result.exit_code == 0, result.output
    for rate in ("1gbit", "2gbit"):
        assert f"77 entries, 4 ranks on 2 nodes, {rate}, all-reduce of MPI: segmented ring" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("hitopk")]
    assert [row[2:9] for row in rows] == [["3,000.0"] * 3 + ["mpi,", "memory", "kept", "1.67"]] * 4


def test_peers_are_measured_with_and_without_memory_kept_and_the_faster_one_counts(fake):
    for kept, peer, seconds in ((5.0, "mpi, memory kept", 5.0), (6.5, "mpi", 6.0)):
        fake.kept = {"mpi": kept, "horovod": 7.0}
        records = [json.loads(line) for line in bench(*WORDS, "--json").stdout.splitlines()]
        for record in records:
            if record["subject"] == "hitopk":
                assert list(record["baselines"]) == ["mpi", "mpi, memory kept", "horovod, memory kept"]
                assert (record["peer"], record["peer_seconds"]["median"]) == (peer, seconds)
                assert record["ratio"] == pytest.approx(seconds / 3.0)


def test_a_record_says_under_which_settings_it_was_measured(monkeypatch):
    for name in [name for name in os.environ if SETTING.match(name)]:
        monkeypatch.delenv(name)
    assert settings()["environment"] == {}
    given = {"MALLOC_MMAP_MAX_": "0", "OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    for name, value in {**given, "OMPI_COMM_WORLD_RANK": "0", "MY_MALLOC_": "1"}.items():
        monkeypatch.setenv(name, value)
    assert settings()["environment"] == given
    assert settings()["allocator"].startswith(platform.libc_ver()[0])


def test_a_job_that_fails_ends_the_sweep_and_what_was_measured_is_kept(fake):
    fake.fails_at = "0.001"
    result = bench(*WORDS, "--json")
    assert result.exit_code == 1
    assert len(result.stdout.splitlines()) == 4 + 4  # probes, and the records of the first density
    assert result.stderr.splitlines()[-1] == (
        "cloudtrain: --cluster: --size 77 --steps 20 --density 0.001 --reducer hitopk:"
        " status 1: node3 is on fire"
    )
    assert fake.calls[-1] == ("down",)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, RuntimeError])
def test_however_it_ends_the_cluster_is_taken_down(fake, monkeypatch, error):
    def interrupt(*_):
        raise error

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(cluster.json, "loads", interrupt)
    assert bench(*WORDS).exit_code != 0 or error is SystemExit
    assert fake.calls[-1] == ("down",)
    assert signal.getsignal(signal.SIGTERM) == before


def lines_of(tmp_path, monkeypatch, program: str, timeout: float = 60.0) -> list[str]:
    """Return what a job prints whose cluster is this program."""
    (tmp_path / "cluster.py").write_text(program)
    monkeypatch.setattr(cluster, "SCRIPT", (sys.executable, str(tmp_path / "cluster.py")))
    return list(cluster.EmulatedCluster(tmp_path / "state").lines(["job"], dict(os.environ), timeout))


def test_a_job_is_run_on_the_first_node_and_its_lines_are_without_tags(tmp_path, monkeypatch):
    program = "import sys; print('[1,0]<stdout>: ' + ' '.join(sys.argv[1:]))"
    (line,) = lines_of(tmp_path, monkeypatch, program, 7.5)
    assert line == f"--state {tmp_path}/state run --timeout 7.5 -- job\n"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("[1,3]<stderr>: Traceback\n[1,3]<stderr>: ValueError: 3 is odd\n", "status 1: ValueError: 3 is odd"),
        ("[1,0]<stderr>: cloudtrain: hitopk: wrong\nnode4 closed\n", "status 1: hitopk: wrong"),
        (
            "ValueError: odd\n----\nprterun detected that one or more processes exited\n  Exit code: 1\n",
            "status 1: ValueError: odd",
        ),
        ("broken\nE0000 Unable to register cuDNN factory\n", "status 1: broken"),
        ("cloudtrain: compiling kernels for this\ncloudtrain: warning: a\nodd\n", "status 1: odd"),
        ("", "status 1: no error was reported"),
    ],
)
def test_a_job_s_failure_is_one_line_that_says_why(tmp_path, monkeypatch, said, message):
    with pytest.raises(Failed) as failure:
        lines_of(tmp_path, monkeypatch, f"import sys; sys.stderr.write({said!r}); sys.exit(1)")
    assert str(failure.value) == message


def test_a_job_that_hangs_is_told_apart(tmp_path, monkeypatch):
    with pytest.raises(Failed, match=r"^expected an end within 9 s \(--timeout\), got none$"):
        lines_of(tmp_path, monkeypatch, "import sys; sys.exit(124)", 9)


def test_a_record_is_read_back_as_it_was_written():
    line = Record.of(probed("ring", 1.5, 2.0) | {"machine": {}, "ratio": 2.0 / 1.5}).line()
    written = json.loads(line)
    assert written["ratio"] == 2.0 / 1.5
    assert Record.of(written).line() == line


@pytest.mark.cluster
@pytest.mark.launch
def test_on_a_real_cluster_every_candidate_is_measured_and_nothing_is_left(tmp_path):
    skip_where_no_cluster_can_be_made()
    nodes = ("--nodes", "2", "--ranks-per-node", "1", "--rate", "1gbit")
    words = (*nodes, "--size", "20011", "--density", "0.01", "--steps", "2", "--reducer", "hitopk", "--json")
    result = run("env", f"TMPDIR={tmp_path}", "cloudtrain", "bench", "reducers", "--cluster", *words)
    assert result.returncode == 0, tail(result)
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["bench"] for record in records] == ["probe"] * 4 + ["reducers"] * 6
    alone = ["mpi, memory kept", "horovod, memory kept"]
    assert [record["subject"] for record in records[4:]] == ["hitopk", "mpi", "horovod", "bare", *alone]
    for record in records:
        is_kept = KEEP_MEMORY.items() <= record["settings"]["environment"].items()
        assert is_kept == (record["subject"] in alone)
        assert record["settings"]["environment"]["OMPI_MCA_mpi_yield_when_idle"] == "1"
        assert record["case"]["ranks_of_nodes"] == [1, 1]
        assert record["case"]["rate"] == "1gbit"
    hitopk = records[4]
    assert hitopk["bytes"]["inter"] == 8 * 200  # k entries to the one other node
    assert hitopk["stages"]["inter"]["max"] > 0
    assert not any(str(tmp_path) in command for command in commands().values())
    assert list(tmp_path.iterdir()) == []
