"""Jobs on emulated clusters: what they are told, what is kept of their output, and what their end says."""

import json
import os
import signal
import sys

import pytest

from benchmarks import jobs
from benchmarks.jobs import EmulatedCluster, Failed, Layout, cluster_until_end, environment, record_of
from commlib import LinkBytes
from training.bench.record import Record, Seconds


def test_mpi_gets_the_algorithm_from_the_environment_and_nothing_of_the_user_s(monkeypatch):
    monkeypatch.setenv("OMPI_MCA_coll_tuned_allreduce_algorithm", "1")
    monkeypatch.setenv("OMPI_MCA_coll", "basic")
    monkeypatch.setenv("OMPI_MCA_btl", "tcp,self")
    default, ring = environment("default"), environment("ring")
    assert default["OMPI_MCA_btl"] == ring["OMPI_MCA_btl"] == "tcp,self"
    assert not any(name.startswith("OMPI_MCA_coll") for name in default)
    assert {name: value for name, value in ring.items() if name.startswith("OMPI_MCA_coll")} == {
        "OMPI_MCA_coll": "^han",
        "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
        "OMPI_MCA_coll_tuned_allreduce_algorithm": "4",
    }


def test_a_layout_is_nodes_and_ranks_on_each():
    layout = Layout.of("3x2")
    assert (layout.ranks, layout.hosts, str(layout)) == (6, "node1:2,node2:2,node3:2", "3x2")
    for text in ("4", "1x1", "255x1", "0x2"):
        with pytest.raises(ValueError, match=text):
            Layout.of(text)


def lines_of(tmp_path, monkeypatch, program: str, timeout: float = 60.0) -> list[str]:
    """Return what a job prints whose cluster is this program."""
    (tmp_path / "cluster.py").write_text(program)
    monkeypatch.setattr(jobs, "EMULATED", (sys.executable, str(tmp_path / "cluster.py")))
    return list(EmulatedCluster(tmp_path / "state").lines(["job"], dict(os.environ), timeout))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("[1,3]<stderr>: Traceback\n[1,3]<stderr>: ValueError: 3 is odd\n", "status 1: ValueError: 3 is odd"),
        ("[1,0]<stderr>: cloudtrain: hitopk: wrong\nnode4 closed\n", "status 1: hitopk: wrong"),
        (
            "ValueError: odd\n----\nprterun detected that one or more processes exited\n  Exit code: 1\n",
            "status 1: ValueError: odd",
        ),
        ("cloudtrain: compiling kernels for this\ncloudtrain: warning: a\nodd\n", "status 1: odd"),
        ("", "status 1: no error was reported"),
    ],
)
def test_a_job_s_failure_is_one_line_that_says_why(tmp_path, monkeypatch, said, message):
    with pytest.raises(Failed) as failure:
        lines_of(tmp_path, monkeypatch, f"import sys; sys.stderr.write({said!r}); sys.exit(1)")
    assert str(failure.value) == message


def test_a_job_that_hangs_is_told_apart(tmp_path, monkeypatch):
    with pytest.raises(Failed, match="within 9 s"):
        lines_of(tmp_path, monkeypatch, "import sys; sys.exit(124)", 9)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, RuntimeError])
def test_however_it_ends_the_cluster_is_taken_down(monkeypatch, tmp_path, error):
    calls = tmp_path / "calls"
    program = tmp_path / "cluster.py"
    program.write_text(f"import sys; open({str(calls)!r}, 'a').write(sys.argv[-1])")
    monkeypatch.setattr(jobs, "EMULATED", (sys.executable, str(program)))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(error), cluster_until_end() as cluster:
        cluster.up(4, "1gbit")
        raise error
    assert calls.read_text() == "--rate=1gbitdown"
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_record_is_read_back_as_it_was_written():
    seconds = Seconds(2.0, 1.0, 4.0, 5)
    record = Record("x", {"size": 3}, "s", seconds, "p", seconds, bytes=LinkBytes(1, 2), more={"own": [1]})
    written = json.loads(record.line())
    assert json.loads(record_of(written).line()) == written
