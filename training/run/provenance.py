"""The provenance of a run: its command, and the versions of the packages that it uses."""

import platform
import shlex
import sys
from importlib.metadata import version
from importlib.util import find_spec

import keras
import tensorflow as tf
from mpi4py import MPI

from commlib import __version__
from training.config.secrets import mask


def command() -> str:
    """Return the shell command line of this process, its secrets masked."""
    return shlex.join(mask(sys.argv))


def versions() -> dict[str, str]:
    """Return the versions of all packages that affect the results of a run, by name."""
    return {
        "cloudtrain": __version__,
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "horovod": version("horovod") if find_spec("horovod") else "none",
        "mpi": MPI.Get_library_version().split(",")[0],
    }
