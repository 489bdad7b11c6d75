"""Real ranks that a bench starts on this machine with ``mpirun``, and the lines that rank 0 prints."""

import os
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from itertools import takewhile
from pathlib import Path

from training.process.launch import SAID_ALREADY

BESIDE_PYTHON = Path(sys.executable).parent
# There may be more ranks than cores: who waits gives up the core.
FLAGS = (
    *("--allow-run-as-root", "--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"),
    *("--mca", "mpi_yield_when_idle", "1"),
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
OWN = "cloudtrain: "


class Failed(Exception):
    """A cluster that does not come up, or a job that did not end well; one line says how."""


def command_line(ranks: int, words: Sequence[str]) -> list[str]:
    """Return the command that runs ``cloudtrain`` with these words on all ranks."""
    mpirun, cloudtrain = str(BESIDE_PYTHON / "mpirun"), str(BESIDE_PYTHON / "cloudtrain")
    return [mpirun, *FLAGS, "-np", str(ranks), cloudtrain, *words]


def lines(ranks: int, words: Sequence[str]) -> Generator[str, None, None]:
    """Run ``cloudtrain`` with these words on so many ranks; yield what it prints, line by line.

    Raises :class:`Failed` where it does not end well. The job ends when this generator does.
    """
    pipe, errors = subprocess.PIPE, list[str]()
    environment = {**os.environ, **ONE_THREAD}
    try:
        process = subprocess.Popen(
            command_line(ranks, words), env=environment, stdout=pipe, stderr=pipe, text=True, errors="replace"
        )
    except FileNotFoundError:
        raise Failed("mpirun is not installed next to this Python: run ./scripts/install.sh") from None
    with process:
        assert process.stdout is not None
        reading = threading.Thread(target=errors.extend, args=(process.stderr,), daemon=True)
        reading.start()
        try:
            yield from process.stdout
        except BaseException:
            process.terminate()  # it ends the ranks
            raise
        reading.join()
    if process.returncode != 0:
        raise Failed(_reason(process.returncode, [line.strip("\0\n") for line in errors]))


def _reason(status: int, errors: Sequence[str]) -> str:
    """Return what the ranks said themselves, else the status and the last line before mpirun's account."""
    own = [line.removeprefix(OWN) for line in errors if line.startswith(OWN)]
    if own:
        return own[0]
    before = takewhile(lambda line: not SAID_ALREADY.match(line), errors)
    reported = [line for line in before if line.strip("- ")]
    return f"status {status}: {reported[-1] if reported else 'nothing was said'}"
