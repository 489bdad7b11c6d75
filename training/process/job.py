"""The processes of a run: how they were started, and how they exit collectively."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn, TypeVar

from commlib import Communicator, transport
from commlib.errors import LaunchError
from datacache.escaping import escaped
from training.process.start_rank import ASKS_TO_END, FIRST_SPEAKS_WITHIN_SECONDS

Result = TypeVar("Result")

USAGE_ERROR = 2
FAILURE = 1
INTERRUPTED = 130
PREEMPTED = os.EX_TEMPFAIL  # 75

# Environment variables in which launchers set the rank; the last two: srun, with PMIx and without.
WORLD_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "HOROVOD_RANK", "PMIX_RANK", "SLURM_PROCID")


@contextmanager
def as_rank() -> Iterator[Communicator]:
    """Run the block as one rank of this job, with the world communicator: an error on one rank ends all.

    If the processes were started in a way that cannot work, they print one line and exit.
    """
    try:
        comm = transport.mpi.world()
    except LaunchError as error:
        if not is_first():
            time.sleep(FIRST_SPEAKS_WITHIN_SECONDS)  # launchers end all processes with the first that exits
        usage_error(str(error))
    interrupts: list[int] = []  # recorded, as TensorFlow makes other errors of ``KeyboardInterrupt``

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    with _handling((signal.SIGINT,), interrupt):
        try:
            yield comm
        except BaseException:
            if not interrupts:
                raise
            transport.mpi.interrupt()
            log_error("interrupted")
            sys.exit(INTERRUPTED)


@contextmanager
def _handling(numbers: Sequence[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle signals inside the block, in the main thread, which alone can."""
    is_main = threading.current_thread() is threading.main_thread()
    before = [(number, signal.signal(number, handler)) for number in numbers if is_main]
    try:
        yield
    finally:
        for number, old in before:
            signal.signal(number, old)


class Preempted(SystemExit):
    """SIGTERM has stopped the run after ``step``, which has a checkpoint; exit status 75 unless caught."""

    def __init__(self, step: int) -> None:
        super().__init__(PREEMPTED)
        self.step = step


@contextmanager
def terminations() -> Iterator[list[int]]:
    """Record SIGTERM, or what launchers send for it, in the block, in place of ending this process."""
    received: list[int] = []
    with _handling((signal.SIGTERM, ASKS_TO_END), lambda number, frame: received.append(number)):
        yield received


def is_first() -> bool:
    """Return whether this process prints for the job, before MPI is initialised."""
    return all(os.environ.get(name, "0") == "0" for name in WORLD_RANKS)


def all_or_exit(comm: Communicator, function: Callable[[], Result]) -> Result:
    """Return ``function()``; where ``all_or_raise`` raises, rank 0 prints the line, and all exit with 2."""
    try:
        return all_or_raise(comm, function, names_rank=True)
    except ValueError as error:
        if comm.rank == 0:
            log_error(str(error))
        exit_all(comm, USAGE_ERROR)


def attempt(function: Callable[[], Result], *kinds: type[Exception]) -> tuple[Result | None, str | None]:
    """Return ``(function(), None)``, or ``None`` and the text of an error of these kinds."""
    try:
        return function(), None
    except kinds as error:
        return None, str(error)


def on_rank0(comm: Communicator, function: Callable[[], Result]) -> Result:
    """Return on all ranks what ``function()`` returns on rank 0, or raise its ``ValueError`` on all of them.

    For values that must be equal on all ranks while their files may differ. The result is pickled.
    """
    own = attempt(function, ValueError) if comm.rank == 0 else None
    result, problem = comm.allgather_objects(own)[0]
    if problem is not None:
        raise ValueError(problem)
    return result


def all_or_raise(comm: Communicator, function: Callable[[], Result], *, names_rank: bool = False) -> Result:
    """Return ``function()``; the first ``ValueError`` of any rank is raised on all.

    ``names_rank``: with that rank and its host, unless rank 0 or all ranks have a problem.
    """
    result, problem = attempt(function, ValueError)
    of_ranks = comm.allgather_objects((problem, comm.host))
    having = [rank for rank, (each, _) in enumerate(of_ranks) if each is not None]
    if having:
        problem, host = of_ranks[having[0]]
        is_of_some = names_rank and len(having) < comm.size and having[0] != 0
        raise ValueError(f"{problem} (rank {having[0]} on {host})" if is_of_some else problem)
    return result  # type: ignore[return-value]


def exit_all(comm: Communicator, status: int) -> NoReturn:
    """Exit with ``status``, all ranks at once: the first to end would take the others' last lines with it."""
    sys.stdout.flush()
    comm.barrier()
    sys.exit(status)


def fail_alone(comm: Communicator, line: str) -> NoReturn:
    """End the job with one line for an error of this rank, wherever the other ranks are."""
    where = f" (rank {comm.rank} of {comm.size} on {comm.host})" if comm.size > 1 else ""
    transport.mpi.fail(f"cloudtrain: {escaped(line)}{where}")
    log_error(line)
    sys.exit(FAILURE)


def log_error(line: str) -> None:
    """Print one line to standard error, with undecodable file names escaped."""
    sys.stderr.write(f"cloudtrain: {escaped(line)}\n")
    sys.stderr.flush()


def usage_error(line: str) -> NoReturn:
    """Print one line, on the first process only, and exit with status 2."""
    if is_first():
        log_error(line)
    sys.exit(USAGE_ERROR)


@dataclass(frozen=True)
class LocalRank:
    """A rank's number among the ``ranks`` of its machine, independent of emulated nodes.

    ``cores``: the number of its cores, where a core that ``r`` ranks share counts as ``1/r``.
    """

    number: int
    ranks: int
    cores: float = 1.0

    @classmethod
    def of(cls, comm: Communicator) -> "LocalRank":
        """Return that of this rank; collective."""
        everyone = comm.allgather_objects((comm.host, os.sched_getaffinity(0)))
        here = [cores for host, cores in everyone if host == comm.host]
        number = sum(host == comm.host for host, _ in everyone[: comm.rank])
        shares = (1 / sum(core in cores for cores in here) for core in here[number])
        return cls(number, len(here), math.fsum(shares))

    @property
    def threads(self) -> int:
        """Return the number of cores available to this rank alone, at least one.

        >>> LocalRank(0, 3, 1 / 3 + 1 / 3 + 1 / 3).threads, LocalRank(0, 4, 0.5).threads
        (1, 1)
        """
        return max(1, int(self.cores + 1e-6))
