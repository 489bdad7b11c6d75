"""Reducers beside all-reduces, and the memory that they take."""

import json

import pytest

from benchmarks import reducers
from commlib import REDUCERS
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


def test_no_reducer_holds_more_than_four_dense_vectors():
    """At density 0.01 on eight ranks, residual and result included."""
    # Long enough for the selectors' histograms, 64 KiB whatever the size, not to count.
    found = list(reducers.memory(Plan(size=300_000)))
    assert [each.name for each, _ in found] == list(REDUCERS)
    assert all(1 <= vectors <= 4 for _, vectors in found), found
