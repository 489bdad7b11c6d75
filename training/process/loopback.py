"""``mpirun`` that listens on the loopback interface alone: nobody else can reach a launch on one machine.

Open MPI 5's ``mpirun`` listens on all interfaces, on one machine too, and has no option against it. A library
of one function, ``bind``, is compiled at the first launch, kept in this environment, and preloaded into it;
``start_rank`` takes it away again from the ranks.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from training.process.start_rank import PRELOAD, PRELOADED

SOURCE = Path(__file__).with_suffix(".c")
COMPILERS = ("cc", "gcc", "g++")


def preloading(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what to put into the environment of ``mpirun``.

    Raises ``OSError`` where the library is missing and cannot be made.
    """
    before = environment.get(PRELOAD)
    library = str(_library())
    return {PRELOAD: f"{library}:{before}" if before else library}


def _library() -> Path:
    library = Path(sys.prefix, "lib", PRELOADED)
    if set(" :") & set(str(library)):  # which separate one library from the next
        raise OSError(f"a path with a space or a colon cannot be preloaded: {library}")
    if library.exists() and library.stat().st_mtime >= SOURCE.stat().st_mtime:
        return library
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise OSError(f"none of {', '.join(COMPILERS)} is installed")
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder, PRELOADED)
        words = (compiler, "-x", "c", "-shared", "-fPIC", "-O2", str(SOURCE), "-o", str(made), "-ldl")
        result = subprocess.run(words, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise OSError(f"{compiler} does not compile {SOURCE}: {result.stderr.strip()[-200:]}")
        os.replace(made, library)  # whole or not at all: others may launch at the same time
    return library
