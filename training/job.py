"""The processes of a run: how they were started, and how they end together."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

from commlib import Communicator, transport

Result = TypeVar("Result")

USAGE_ERROR = 2


class LaunchError(ValueError):
    """The processes were started in a way that cannot work; one line says why and how to start them."""


def world() -> Communicator:
    """Return the communicator of all ranks of this job.

    Raises :class:`LaunchError` where Horovod was started with another number of ranks than MPI sees, as
    ``horovodrun --gloo`` does.
    """
    comm = transport.mpi.world()
    expected = int(os.environ.get("HOROVOD_SIZE", comm.size))
    if expected != comm.size:
        raise LaunchError(
            f"Horovod was started with {expected} ranks and MPI with {comm.size} (horovodrun --gloo?): "
            f"start it over MPI, with: cloudtrain launch -np {expected} CONFIG"
        )
    return comm


def is_first() -> bool:
    """Return whether this process speaks for the job, before MPI is asked."""
    names = ("OMPI_COMM_WORLD_RANK", "HOROVOD_RANK")
    return all(os.environ.get(name, "0") == "0" for name in names)


def together(comm: Communicator, function: Callable[[], Result]) -> Result:
    """Return ``function()``; if it raises a ``ValueError`` on any rank, all ranks exit with status 2.

    The lowest of those ranks prints its one line. For what a user got wrong, before training starts.
    """
    result, problem = None, None
    try:
        result = function()
    except ValueError as error:
        problem = str(error)
    problems = [(rank, each) for rank, each in enumerate(comm.allgather_objects(problem)) if each is not None]
    if problems:
        rank, text = problems[0]
        if comm.rank == rank:
            complain(text)
        comm.barrier()  # the first process to end would take the others, and the line, with it
        sys.exit(USAGE_ERROR)
    return result  # type: ignore[return-value]


def complain(line: str) -> None:
    """Print one line to standard error."""
    sys.stderr.write(f"cloudtrain: {line}\n")
    sys.stderr.flush()


def refuse(line: str) -> NoReturn:
    """Print one line, on the first process only, and exit with status 2."""
    if is_first():
        complain(line)
    sys.exit(USAGE_ERROR)


def threads_per_rank() -> int:
    """Return how many cores each rank of this machine can have for itself, at least one."""
    ranks_here = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // ranks_here)
