"""Emulated clusters are taken down, and why one does not come up is said."""

import signal
import sys

import pytest

from benchmarks import jobs
from benchmarks.jobs import Failed, cluster_or_exit, cluster_until_end


@pytest.fixture
def emulated(monkeypatch, tmp_path):
    """Put a program in the place of ``benchmarks.emulated``."""

    def put(text):
        program = tmp_path / "cluster.py"
        program.write_text(f"import sys\n{text}")
        monkeypatch.setattr(jobs, "EMULATED", (sys.executable, str(program)))

    return put


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, RuntimeError])
def test_however_it_ends_the_cluster_is_taken_down(emulated, tmp_path, error):
    calls = tmp_path / "calls"
    emulated(f"open({str(calls)!r}, 'a').write(sys.argv[-1])")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(error), cluster_until_end() as cluster:
        cluster.up(4, "1gbit")
        raise error
    assert calls.read_text() == "--delay=0down"
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_cluster_that_is_built_again_and_does_not_come_up_says_why(emulated, capsys):
    emulated("sys.exit('cluster: found one half-built: building it\\ncluster: it did not come up: no room')")
    with pytest.raises(Failed, match="^it did not come up: no room$"), cluster_until_end() as cluster:
        cluster.up(4, "1gbit")
    with pytest.raises(SystemExit) as caught, cluster_or_exit() as cluster:
        cluster.up(4, "1gbit")
    assert (caught.value.code, capsys.readouterr().err) == (1, "cloudtrain: it did not come up: no room\n")
