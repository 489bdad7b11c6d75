"""The tests of transports and reducers again, on real processes: the same files under mpirun."""

import sys

import pytest

from tests.launching import MPIRUN, run, tail


@pytest.mark.launch
@pytest.mark.parametrize(("processes", "verify"), [(2, 1), (4, 0), (6, 0)])
def test_the_same_bodies_pass_on_real_ranks_whether_messages_are_verified_or_not(processes, verify):
    result = run(
        *("env", f"CLOUDTRAIN_VERIFY={verify}", *MPIRUN, str(processes)),
        *(sys.executable, "-m", "pytest", "-q", "-x", "--color=no", "-p", "no:cacheprovider"),
        *(
            "tests/reducers/test_promises.py",
            "tests/test_wrappers.py",
            "tests/transport/test_communicator.py",
        ),
    )
    assert result.returncode == 0, tail(result)
    assert result.stdout.count(" passed in ") == processes, tail(result)
    assert " skipped" not in result.stdout
