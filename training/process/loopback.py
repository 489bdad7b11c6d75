"""``mpirun`` that listens on the loopback interface only: launches on one machine are not reachable.

Open MPI 5's ``mpirun`` listens on all interfaces, on one machine too, and has no option against it. A library
of one function, ``bind``, is compiled at the first launch, stored in this environment, and preloaded into it;
``start_rank`` removes it from the ranks.
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
    """Return the additions to the environment of ``mpirun``.

    Raises ``OSError`` if the library is missing and cannot be compiled.
    """
    before = environment.get(PRELOAD)
    library = str(_library())
    return {PRELOAD: f"{library}:{before}" if before else library}


def _library() -> Path:
    library = Path(sys.prefix, "lib", PRELOADED)
    if set(" :") & set(str(library)):  # the separators of LD_PRELOAD
        raise OSError(f"a path with a space or a colon cannot be preloaded: {library}")
    if library.exists() and library.stat().st_mtime >= SOURCE.stat().st_mtime:
        return library
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise OSError(f"none of {', '.join(COMPILERS)} is installed")
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder, PRELOADED)
        command = (compiler, "-x", "c", "-shared", "-fPIC", "-O2", str(SOURCE), "-o", str(made), "-ldl")
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise OSError(f"{compiler} does not compile {SOURCE}: {result.stderr.strip()[-200:]}")
        os.replace(made, library)  # atomic: other launches may run at the same time
    return library
