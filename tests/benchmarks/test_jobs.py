"""Emulated clusters are taken down."""

import signal
import sys

import pytest

from benchmarks import jobs
from benchmarks.jobs import cluster_until_end


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, RuntimeError])
def test_however_it_ends_the_cluster_is_taken_down(monkeypatch, tmp_path, error):
    calls, program = tmp_path / "calls", tmp_path / "cluster.py"  # in the place of benchmarks.emulated
    program.write_text(f"import sys\nopen({str(calls)!r}, 'a').write(sys.argv[-1])")
    monkeypatch.setattr(jobs, "EMULATED", (sys.executable, str(program)))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(error), cluster_until_end() as cluster:
        cluster.up(4, "1gbit")
        raise error
    assert calls.read_text() == "--delay=0down"
    assert signal.getsignal(signal.SIGTERM) == before
