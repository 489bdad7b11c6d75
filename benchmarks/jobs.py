"""Jobs that a bench starts: real ranks on this machine with ``mpirun``, and the output of any command."""

import os
import subprocess
import sys
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from training.process.launch import RANK_TAG, SAID_ALREADY, is_noise

BESIDE_PYTHON = Path(sys.executable).parent
# There may be more ranks than cores: a rank that waits yields its core.
FLAGS = (
    *("--allow-run-as-root", "--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"),
    *("--mca", "mpi_yield_when_idle", "1"),
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
OWN = ("cloudtrain: ", "cluster: ")
NO_ERROR = ("cloudtrain: warning: ", "cloudtrain: compiling kernels ")


class Failed(Exception):
    """A cluster that does not come up, or a job that failed; the message is one line."""


def command_line(ranks: int, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs ``cloudtrain`` with these arguments on all ranks."""
    mpirun, cloudtrain = str(BESIDE_PYTHON / "mpirun"), str(BESIDE_PYTHON / "cloudtrain")
    return [mpirun, *FLAGS, "-np", str(ranks), cloudtrain, *arguments]


def lines(ranks: int, arguments: Sequence[str]) -> Generator[str, None, None]:
    """Run ``cloudtrain`` with these arguments on so many ranks; yield its output, line by line.

    Raises :class:`Failed` if it fails. The job ends when this generator does.
    """
    try:
        status, line = yield from output(command_line(ranks, arguments), {**os.environ, **ONE_THREAD})
    except FileNotFoundError:
        raise Failed("mpirun is not installed next to this Python: run ./scripts/install.sh") from None
    if status != 0:
        raise Failed(f"status {status}: {line}")


def output(command: Sequence[str], environment: Mapping[str, str]) -> Generator[str, None, tuple[int, str]]:
    """Run a command and yield its output, line by line, without the tags of the ranks.

    Return its status, and the line of standard error that reports why it failed. The command ends when this
    generator does.
    """
    pipe, errors = subprocess.PIPE, list[str]()
    with subprocess.Popen(
        command, env=environment, stdout=pipe, stderr=pipe, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        reading = threading.Thread(target=errors.extend, args=(process.stderr,), daemon=True)
        reading.start()
        try:
            for line in process.stdout:
                yield RANK_TAG.sub("", line)
        except BaseException:
            process.terminate()  # it ends all processes that it has started
            raise
        reading.join()
    return process.returncode, error_line(errors)


def error_line(lines: Iterable[str]) -> str:
    """Return the line that reports an error: the first of our own, else the last before MPI's message."""
    untagged = (RANK_TAG.sub("", line).strip("\0\n ") for line in lines)
    before_banner = takewhile(lambda line: not SAID_ALREADY.match(line), untagged)
    reported = [line for line in before_banner if line.strip("-") and not is_noise(line)]
    errors = [line for line in reported if line.startswith(OWN) and not line.startswith(NO_ERROR)]
    own = [line.partition(": ")[2] for line in errors]
    return next(iter(own or reported[-1:]), "no error was reported")
