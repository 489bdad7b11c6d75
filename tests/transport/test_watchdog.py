"""A rank that waits too long says for whom, and ends the job."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from commlib import InvalidArgument
from commlib.transport.watchdog import check_seconds, describe_stall
from tests.launching import python_on_ranks, tail

PROGRAM = """
import threading
from commlib.transport import mpi

comm = mpi.world()
other, watchdog = comm.split(0), comm.watchdog({seconds})
late = comm.split(0)
if comm.rank == 2:  # late, but it comes: when the others have asked for it
    while not watchdog._comm.iprobe():
        pass
with watchdog.waiting("step 6"):
    late.allgather_ints([1])
print("all have come", flush=True)

def step_7():
    with watchdog.waiting("step 7"):
        with watchdog.waiting("a comparison in it"):
            pass
        comm.allgather_ints([1])

if comm.rank < 2:
    {here}
{elsewhere}
"""


SECONDS = 8
# What two ranks do then, what the late one does, and what the line says of it.
STALLS = {
    "one-does-not-come": ("step_7()", "threading.Event().wait()", r"at step 7; ranks \[2\] have not come"),
    "all-wait-at-different-places": (
        *("step_7()", "with watchdog.waiting('the end of fit'): other.allgather_ints([1])"),
        r"at step 7; ranks \[2\] wait at the end of fit|at the end of fit; ranks \[0, 1\] wait at step 7",
    ),
    "outside-of-steps": (
        *("comm.allgather_objects(comm.rank)", "threading.Event().wait()"),
        r"at an exchange after step 6; ranks \[2\] have not come",
    ),
}


@pytest.fixture(scope="module")
def jobs():
    """Return what came of the jobs, which wait beside each other."""

    def job(here, elsewhere, _):
        return python_on_ranks(3, PROGRAM.format(seconds=SECONDS, here=here, elsewhere=elsewhere))

    with ThreadPoolExecutor() as threads:
        return dict(zip(STALLS, threads.map(job, *zip(*STALLS.values(), strict=True)), strict=True))


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.parametrize("stall", STALLS)
def test_a_rank_that_waits_too_long_names_the_others_and_ends_the_job(jobs, stall):
    result, words = jobs[stall], STALLS[stall][-1]
    assert result.returncode != 0
    assert result.stdout.count("all have come") == 3, tail(result)
    line = rf"rank [012] of 3 on \S+ has waited \d+ s for other ranks ({words})\n"
    assert re.search(line, result.stderr), tail(result)


def test_the_line_names_ranks_and_places():
    places = {1: "the end of fit", 3: "the end of fit", 2: "step 8", 5: "step 7"}
    assert describe_stall(300.4, "step 7", places, missing=[4]) == (
        "has waited 300 s for other ranks at step 7; ranks [4] have not come; "
        "ranks [1, 3] wait at the end of fit; ranks [2] wait at step 8"
    )


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan"), "300", True])
def test_a_bound_that_is_none_is_refused(seconds):
    with pytest.raises(InvalidArgument, match="timeout: expected seconds above 0"):
        check_seconds(seconds)
