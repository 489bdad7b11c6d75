"""Tests that pass on simulated ranks again, on real processes: the same files under mpirun."""

import sys

import pytest

from tests.extent import more
from tests.launching import MPIRUN, run, tail

PLAIN = (
    "tests/reducers/test_promises.py",
    "tests/reducers/test_promises_buckets.py",
    "tests/reducers/test_promises_wrapped.py",
    "tests/test_exchange.py",
    "tests/test_wrappers.py",
    "tests/transport/test_communicator.py",
)
WITH_TENSORFLOW = (
    "tests/pto/test_parallel.py",
    "tests/pto/test_norms.py",
    "tests/training/test_checkpoints.py",
)


@pytest.mark.launch
@pytest.mark.parametrize(
    ("processes", "verify", "files"),
    [(3, 1, PLAIN), *more((3, 1, WITH_TENSORFLOW), (2, 1, PLAIN), (4, 0, PLAIN), (6, 0, PLAIN))],
)
def test_the_same_bodies_pass_on_real_ranks_whether_messages_are_verified_or_not(processes, verify, files):
    result = run(
        *("env", f"CLOUDTRAIN_VERIFY={verify}", *MPIRUN, str(processes)),
        *(sys.executable, "-m", "pytest", "-q", "-x", "--color=no", "-p", "no:cacheprovider"),
        *("-k", "mpi", *files),
    )
    assert result.returncode == 0, tail(result)
    assert result.stdout.count(" passed") == processes, tail(result)
    assert " skipped" not in result.stdout
