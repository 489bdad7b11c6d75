"""How the ranks of an MPI job end: real processes, each way out of a script while others wait."""

import ctypes
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from mpi4py import MPI

from commlib.errors import ConcurrentUse, LaunchError
from commlib.transport import mpi, polling
from commlib.transport.verified import VERIFY
from tests.launching import MPIRUN, run, tail

BOUND_SECONDS = 120  # for a job that is to end within 10 seconds, on a machine that has much else to do

ENDED = "rank 1 of {size} on {host} has ended, and others wait for it: all have to make the same exchanges"


def ended(program, ranks):
    return run(*MPIRUN, str(ranks), sys.executable, "-c", program, timeout=BOUND_SECONDS)


BARRIER, STARTS = "comm.barrier()", "rank 1 of 3 on {host} "
WAYS = {
    "a_clean_exit": ("sys.exit(0)", "comm.allgather_objects(1)", ENDED, 1),
    "the_end_of_the_script": ("pass", "comm.receive(np.zeros(4), 1).wait()", ENDED, 1),
    "an_exit_with_a_status": ("sys.exit(3)", "comm.split(0)", ENDED, 1),
    "an_interrupt": ("os.kill(os.getpid(), 2); time.sleep(60)", BARRIER, STARTS + "was interrupted", 130),
    "an_exception": ("sys.stdout.close(); raise OSError('gone')", BARRIER, STARTS + "failed:", 1),
}


def leaving(leave: str, wait: str) -> str:
    """Return a program in which one rank leaves while others wait for it."""
    return (
        "import os, signal, sys, time, numpy as np\n"
        "from commlib.transport import mpi\n"
        "comm = mpi.world()\n"
        "comm.barrier()\n"
        f"if comm.rank == 1:\n    {leave}\n"
        f"else:\n    {wait}\n"
        "    print('went on')"
    )


def leaving_overlapped(leave: str) -> str:
    """Return a program in which one rank leaves while the exchange threads of others wait for it."""
    return (
        "import numpy as np\n"
        "from commlib import BucketExchange, Topology\n"
        "from commlib.transport import mpi\n"
        "topology = Topology(mpi.world())\n"
        "exchange = BucketExchange(topology, [10, 20], {'name': 'hitopk'}, overlap=True)\n"
        "def step():\n"
        "    for bucket, size in enumerate(exchange.sizes):\n"
        "        exchange.submit(bucket, np.ones(size))\n"
        "    return exchange.wait()\n"
        "step()\n"
        f"if topology.world.rank == 1:\n    {leave}\n"
        "else:\n    step()\n    print('went on')"
    )


OVERLAPPED = {"ends": "pass", "fails": "raise RuntimeError('the disk is gone')"}
EARLY = (
    "import time\n"
    "from commlib.transport import mpi, watchdog\n"
    "comm = mpi.world()\n"
    "others = comm.split(comm.rank == 1)\n"
    "if comm.rank == 0:\n"  # rank 2 waits for it as long
    "    time.sleep(watchdog.LONG_WAIT_SECONDS + 2 * watchdog.REPORTS_OF_A_WAIT * watchdog.REPORT_SECONDS)\n"
    "others.barrier()\n"
    "print(f'rank {comm.rank} is done')"
)


@pytest.fixture(scope="module")
def jobs():
    """Return what came of each program on three ranks, beside each other: most of the time they wait."""
    programs = {"early": EARLY} | {name: leaving(leave, wait) for name, (leave, wait, _, _) in WAYS.items()}
    programs |= {f"overlapped {name}": leaving_overlapped(leave) for name, leave in OVERLAPPED.items()}
    with ThreadPoolExecutor(len(programs)) as threads:
        results = threads.map(lambda program: ended(program, ranks=3), programs.values())
        return dict(zip(programs, results, strict=True))


@pytest.mark.launch
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_leaves_ends_the_job_and_is_named(jobs, way):
    _, _, line, status = WAYS[way]
    result = jobs[way]
    assert line.format(host=os.uname().nodename, size=3) in result.stderr.splitlines()
    assert result.stderr.count(" of 3 on ") == 1  # one rank is named, once
    assert result.stderr.count("Traceback") == ("failed" in line)
    assert "went on" not in result.stdout
    assert result.returncode == status


@pytest.mark.launch
@pytest.mark.parametrize("leave", OVERLAPPED)
def test_a_rank_that_leaves_while_the_exchanges_of_others_wait_ends_the_job(jobs, leave):
    result = jobs[f"overlapped {leave}"]
    assert "rank 1 of 3 on " in result.stderr
    assert result.stderr.count(" of 3 on ") == 1
    assert "went on" not in result.stdout
    assert result.returncode == 1


@pytest.mark.launch
def test_a_rank_that_is_done_early_does_not_end_those_that_compute(jobs):
    result = jobs["early"]
    assert (result.returncode, result.stderr) == (0, "")
    assert sorted(result.stdout.splitlines()) == [f"rank {rank} is done" for rank in range(3)]


@pytest.mark.launch
@pytest.mark.parametrize("first", ["world", pytest.param("init", marks=pytest.mark.slow)])
def test_ranks_that_use_horovod_as_well_end_as_others_do(first, tmp_path):
    calls = ["comm = mpi.world()", "hvd.init()"]
    # Horovod may hang in an exchange that begins while another rank shuts it down: rank 0 waits for a file
    # that rank 1 writes in a hook that runs after Horovod's.
    shut_down = f"pathlib.Path({str(tmp_path / 'shut down')!r})"
    calls.insert(1, f"if comm.rank == 1: atexit.register({shut_down}.touch)")
    again = f"while not {shut_down}.exists(): time.sleep(0.05)\nhvd.allreduce(tf.ones(3), name='again')\n"
    result = ended(
        "import atexit, os, pathlib, sys, time\n"
        "os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'\n"
        "from training.process.tf_logging import import_tensorflow\n"
        "import_tensorflow()\n"
        "import horovod.tensorflow as hvd, tensorflow as tf\n"
        "from commlib.transport import mpi\n"
        + "\n".join(calls if first == "world" else [calls[2], calls[0]])
        + "\nprint(float(hvd.allreduce(tf.ones(3))[0]), flush=True)\n"
        + "if comm.rank == 1: sys.exit(0)\n"
        + (again if first == "world" else "comm.barrier()\n")
        + "print('went on')",
        ranks=2,
    )
    assert result.returncode == 1
    assert result.stdout.splitlines() == ["1.0"] * 2
    (line,) = [each for each in result.stderr.splitlines() if each.startswith("rank ")]
    host = os.uname().nodename
    assert line == (f"rank 0 of 2 on {host} failed:" if first == "world" else ENDED.format(host=host, size=2))


class Request(MPI.Request):
    """A request that is over when it is told, and says when somebody waits for it."""

    def __init__(self):
        super().__init__()
        self.is_over, self.is_waited_for = threading.Event(), threading.Event()
        self.tests = 0

    def Test(self, status):
        self.tests += 1
        if self.tests > 1:  # by a thread that sleeps in between
            self.is_waited_for.set()
        return self.is_over.is_set()

    def Wait(self, status):
        self.is_waited_for.set()
        assert self.is_over.wait(BOUND_SECONDS)


def test_two_threads_in_one_communicator_are_refused_with_what_to_do(monkeypatch):
    monkeypatch.delenv(mpi.YIELDS, raising=False)
    comm, other = mpi.world(), mpi.world()
    request = Request()
    thread = threading.Thread(target=comm.wait_for, args=(request,))
    thread.start()
    assert request.is_waited_for.wait(BOUND_SECONDS)
    try:
        with pytest.raises(ConcurrentUse, match="give each thread a topology of its own"):
            comm.wait_for(Request())
        is_over = Request()
        is_over.is_over.set()
        other.wait_for(is_over)  # another communicator may be used
    finally:
        request.is_over.set()
        thread.join()
    comm.barrier()  # and so may this one, now


def test_naps_grow_and_a_wait_begins_with_a_quarter_of_the_last_nap(monkeypatch):
    naps, request = [], Request()

    def poll(handle, address, status):
        if len(naps) in (55, 59):
            ctypes.c_int.from_address(address).value = 1
            request.is_over.set()
        return 0

    monkeypatch.setenv(mpi.YIELDS, "1")
    monkeypatch.delenv(VERIFY, raising=False)
    with mpi.world() as comm:
        monkeypatch.setattr(polling, "_sleep", polling._sleep.py_func)
        monkeypatch.setattr(polling, "_usleep", naps.append)
        monkeypatch.setattr(polling, "_get_status", poll)
        for _ in range(2):
            request.is_over.clear()
            comm.wait_for(request)
    grown = [min(20 * 1.1**nap, 2e3) for nap in range(55)]
    assert naps == pytest.approx([*grown, *(0.5e3 * 1.1**nap for nap in range(4))], abs=1)


@pytest.mark.launch
def test_ranks_that_are_bound_to_a_core_each_share_none():
    program = "from commlib.transport import mpi; print(mpi.world().shares_cores)"
    ranks = str(min(2, len(os.sched_getaffinity(0))))
    launched = ("mpirun", "--bind-to", "core", "-np", ranks, sys.executable, "-c", program)
    result = run("env", "-u", mpi.YIELDS, *launched)
    assert result.stdout.split() == ["False"] * int(ranks), tail(result)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"HOROVOD_SIZE": "2"}, r"_SIZE says that 2 ranks were started and MPI sees 1 \(horovodrun --gl"),
        ({"PMI_SIZE": "3"}, r"PMI_SIZE says that 3 .* \(the launcher of another MPI\?\)"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, r"_TASKS says that 4 .* \(srun without --mpi=pmix\?\)"),
        ({"WORLD_SIZE": "2"}, r"WORLD_SIZE says that 2 .* \(torchrun\?\)"),
        ({"HOROVOD_ELASTIC": "1", "HOROVOD_SIZE": "1"}, "HOROVOD_ELASTIC says that this is an elastic job"),
    ],
)
def test_a_world_of_one_in_a_job_of_more_is_refused_with_the_way_to_launch(monkeypatch, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=message + r".*cloudtrain launch -np \d .*-- python my\.py"):
        mpi.world()
