"""What every test may use: a set of ranks, simulated or the MPI job that pytest itself runs in."""

import gc
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from commlib import transport
from tests.extent import ALL, more

MPI_RANKS = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))

# Simulated ranks are threads, and wait for each other inside TensorFlow's pool: it needs one for each. One
# test runs on each core. Read when TensorFlow is first used, by whichever test that is.
os.environ |= {"TF_NUM_INTEROP_THREADS": "16", "TF_NUM_INTRAOP_THREADS": "1"}

# How long an example takes says how busy the machine is, and whether a kernel had to be compiled first.
settings.register_profile("all", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same few examples in every run; under MPI, all ranks must draw the same ones.
settings.register_profile("ci", settings.get_profile("all"), max_examples=20, derandomize=True, database=None)
settings.load_profile("all" if ALL and MPI_RANKS == 1 else "ci")


class Ranks:
    """Runs ``function(comm)`` on a number of ranks and returns their results, the same list everywhere."""

    def __init__(self, size: int, comm: Any = None) -> None:
        self.size = size
        self._comm = comm

    def run(
        self, function: Callable[[Any], Any], ranks_per_node: int | Sequence[int] | None = None
    ) -> list[Any]:
        if self._comm is None:
            return transport.simulated.run(function, self.size, ranks_per_node)
        return self._comm.allgather_objects(function(self._comm))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every test of ``ranks`` at each simulated size, or on the ranks of the surrounding MPI job.

    ``@pytest.mark.world_sizes(3)`` names the simulated sizes of a test for which they hardly matter.
    """
    if "ranks" in metafunc.fixturenames:
        if MPI_RANKS > 1:
            metafunc.parametrize("ranks", [Ranks(MPI_RANKS, transport.mpi.world())], ids=[f"mpi-{MPI_RANKS}"])
        else:
            marker = metafunc.definition.get_closest_marker("world_sizes")
            # others are those of tests/test_under_mpirun.py
            sizes = marker.args if marker else (1, 3, 8, *more(2, 5))
            metafunc.parametrize("ranks", [Ranks(size) for size in sizes], ids=[f"P{size}" for size in sizes])


def is_left_to_all(item: pytest.Item) -> bool:
    """Return whether a test takes long, or has parameters that ``@pytest.mark.pairs(are_met)`` does not meet.

    Of a table of reducers, numbers of ranks and values that all prove one promise, a part does.
    """
    pairs = item.get_closest_marker("pairs")
    is_met = pairs is None or not hasattr(item, "callspec") or pairs.args[0](**item.callspec.params)
    return not is_met or any(map(item.get_closest_marker, ("large", "faults")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave what is too much for each change to a run of all; of the rest, what starts real ranks is first.

    Ranks start and end one process after the other, and wait for each other: a second worker of pytest-xdist,
    which begins in the middle, computes meanwhile.
    """
    left_out = set() if ALL else set(filter(is_left_to_all, items))
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: not any(map(item.get_closest_marker, ("launch", "slow"))))


def leave_out_of_collections() -> None:
    """Leave what there is, a million objects, out of later collections of garbage.

    Keras makes one whenever a test clears its session, which took half a second.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_finish(session: pytest.Session) -> None:
    leave_out_of_collections()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path != item.path:
        leave_out_of_collections()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Under MPI, one rank's failure ends the job: the others would wait for it in the next exchange."""
    outcome = yield
    report = outcome.get_result()
    if MPI_RANKS > 1 and report.failed:
        from mpi4py import MPI

        print(f"\nrank {MPI.COMM_WORLD.rank}: {item.nodeid}\n{report.longreprtext}", flush=True)
        MPI.COMM_WORLD.Abort(1)


@pytest.fixture
def alone() -> Any:
    """Return the communicator of a world of one rank."""
    return transport.simulated.run(lambda comm: comm, 1)[0]
