"""Jobs on emulated clusters: what they are told, what is kept of their output, and what their end says."""

import os
import signal
import sys

import pytest

from benchmarks import jobs
from benchmarks.jobs import EmulatedCluster, Failed, cluster_until_end


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
        ("cloudtrain: compiling CPU kernels (about\ncloudtrain: warning: a\nodd\n", "status 1: odd"),
        ("", "status 1: no error was reported"),
    ],
)
def test_a_job_s_failure_is_one_line_that_says_why(tmp_path, monkeypatch, said, message):
    with pytest.raises(Failed) as failure:
        lines_of(tmp_path, monkeypatch, f"import sys; sys.stderr.write({said!r}); sys.exit(1)")
    assert str(failure.value) == message


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
