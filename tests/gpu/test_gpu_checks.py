"""The script of the checks that need a GPU, as far as it goes without one."""

import importlib.util
import json
import queue
import threading
from pathlib import Path

import numpy as np
import pytest

from commlib.transport import nccl

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_checks.py"


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu_checks", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.sys, "argv", ["gpu_checks.py"])
    return module


@pytest.mark.skipif(nccl.missing() is None, reason="there is a GPU")
def test_without_a_gpu_one_line_says_what_is_missing(script, capsys):
    assert script.main() == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {"check": "missing", "problem": nccl.missing()}


def test_ranks_that_are_connected_by_pipes_see_the_bits_of_simulated_ones(script):
    """All that the ranks of NCCL do, in host memory: what travels is short enough for a pipe."""
    ranks, sizes, out = 3, (1, 500), queue.Queue()
    pipes = script.connected(ranks)
    threads = [
        threading.Thread(
            target=lambda rank: script.check(script.Pipes(pipes, rank, range(ranks)), sizes, out),
            args=(rank,),
        )
        for rank in range(ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [out.get() for _ in range(out.qsize())]
    assert [what for what, _ in found] == ["collectives"] + ["reducer"] * 2 * len(sizes) * len(script.CASES)
    assert found[0][1] and all(found[0][1].values())
    for _, each in found[1:]:
        assert each["digests"] == script.in_threads(each["case"], ranks, each["ranks_per_node"], np)
