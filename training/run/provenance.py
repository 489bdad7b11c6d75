"""The provenance of a run: its command, its source tree, and the versions of the packages that it uses."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import keras
import tensorflow as tf
from mpi4py import MPI

from commlib import __version__
from training.config.secrets import mask
from training.receipt.receipt import Source

TREE = Path(__file__).parents[2]  # that this module is in: a clone, or where packages are installed
PATIENCE_SECONDS = 20


def command() -> str:
    """Return the shell command line of this process, its secrets masked."""
    return shlex.join(mask(sys.argv))


def now() -> str:
    """Return the time of now as records have it, in UTC."""
    return f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"


def versions() -> dict[str, str]:
    """Return the versions of all packages that affect the results of a run, by name."""
    return {
        "cloudtrain": __version__,
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        **{name: version(name) for name in ("numpy", "numba", "mpi4py")},
        "horovod": version("horovod") if find_spec("horovod") else "none",
        "mpi": MPI.Get_library_version().split(",")[0],
    }


def source(tree: Path = TREE) -> Source:
    """Return the source tree of cloudtrain: its commit if it is a git checkout that git may read."""
    if not (tree / ".git").exists():
        return Source(__version__)
    try:
        commit = _git(tree, "rev-parse", "--verify", "HEAD").strip()
        changed = _git(tree, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):  # no git, no commit, or a tree that others own
        return Source(__version__)
    return Source(__version__, commit, dirty=bool(changed))


def _git(tree: Path, *words: str) -> str:
    # Without the variables that a git hook sets, which name another tree.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        ["git", "--no-optional-locks", "-C", str(tree), *words],  # noqa: S607 - that of the user
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
    ).stdout
