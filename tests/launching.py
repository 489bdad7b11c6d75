"""Real processes for tests: the installed command, mpirun and horovodrun."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
BESIDE_PYTHON = Path(sys.executable).parent
DIGITS = str(ROOT / "configs" / "digits.yaml")

ENVIRONMENT = {
    **{
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMPI_", "PMIX_", "HOROVOD_", "TF_NUM_"))
    },
    "PATH": f"{BESIDE_PYTHON}{os.pathsep}{os.environ['PATH']}",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",  # CI and containers run as root; without effect for others
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMP_NUM_THREADS": "1",  # of NumPy's products: ranks of a program of ours share the cores
    "OMPI_MCA_mpi_yield_when_idle": "1",  # ranks that wait leave the core to those that they wait for
}
COMPILING = "cloudtrain: compiling CPU kernels (about 30 s; cached for later runs)\n"
MPIRUN = ("mpirun", "--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE", "-np")


def run(
    *words: str | Path, cwd: Path = ROOT, env: Mapping[str, str] = ENVIRONMENT, timeout: int = 280
) -> subprocess.CompletedProcess[str]:
    """Run a command, if nothing else is said of this environment, and return what it printed."""
    return subprocess.run(
        words, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )


def mpirun(ranks: int, *words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command on real MPI ranks."""
    return run(*MPIRUN, str(ranks), *words, cwd=cwd)


def python_on_ranks(ranks: int, program: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a Python program on real MPI ranks."""
    return mpirun(ranks, sys.executable, "-c", program, cwd=cwd)


def launch(ranks: int, *words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run ``cloudtrain launch``."""
    return run("cloudtrain", "launch", "-np", str(ranks), *words, cwd=cwd)


def tail(result: subprocess.CompletedProcess[str], lines: int = 30) -> str:
    """Return the end of what a command printed, for an assertion's message."""
    both: Sequence[str] = [*result.stdout.splitlines(), *result.stderr.splitlines()]
    return "\n".join(both[-lines:])


def errors(result: subprocess.CompletedProcess[str]) -> str:
    """Return what a command printed to standard error, without the line about kernels to be compiled."""
    return result.stderr.replace(COMPILING, "")
