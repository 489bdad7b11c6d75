"""``cloudtrain doctor``: check this machine, and suggest remedies."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

GIB = 1 << 30
SHARED_MEMORY_GIB = 1
INSTALL = "pip install 'cloudtrain[train]'"
REBUILD = "cloudtrain install-horovod"
PATIENCE_SECONDS = 60
# Prints why gradients cannot stay on this machine's GPUs; an empty line where they can.
WHY_NOT_ON_GPUS = """
import tensorflow as tf
from commlib.transport import nccl
print(nccl.missing() or ("" if tf.config.list_physical_devices("GPU") else "TensorFlow sees none"))
"""


@dataclass(frozen=True)
class Finding:
    """The result of one check. ``remedy`` is empty if nothing is wrong; a note is not a problem by itself."""

    text: str
    remedy: str = ""
    is_note: bool = False

    @property
    def verdict(self) -> str:
        """Return ``ok``, ``note`` or ``problem``."""
        return "note" if self.is_note else "problem" if self.remedy else "ok"


def check_python() -> Finding:
    """Compare Python with the versions that TensorFlow 2.18 to 2.21 have wheels for."""
    found = ".".join(map(str, sys.version_info[:3]))
    if (3, 10) <= sys.version_info[:2] <= (3, 13):
        return Finding(found)
    return Finding(f"{found}, expected 3.10 to 3.13", "install one of these, and cloudtrain with it")


def check_compiler() -> Finding:
    """Find a C++ compiler; it is needed once, to build Horovod."""
    if shutil.which("g++") is None:
        return Finding("no g++; Horovod cannot be built here", "apt-get install g++", is_note=True)
    return Finding(_first_line(_run("g++", "--version")))


def check_mpi() -> Finding:
    """Start two ranks and let them communicate."""
    mpirun = Path(sys.executable).parent / "mpirun"
    if not mpirun.exists():
        return Finding("no mpirun beside this Python", INSTALL)
    program = (
        "from mpi4py import MPI; name = MPI.Get_library_version().split(',')[0];"
        "print(f'{MPI.COMM_WORLD.allreduce(1)} ranks of {name}')"
    )
    flags = ["--allow-run-as-root", "--bind-to", "none", "--map-by", "slot:OVERSUBSCRIBE"]
    result = _run(str(mpirun), *flags, "-np", "2", sys.executable, "-c", program)
    met = re.findall(r"^2 ranks of (.*)$", result.stdout, re.MULTILINE)
    if result.returncode or len(met) != 2:
        return Finding(f"two ranks do not start: {_first_line(result)}", INSTALL)
    return Finding(f"{met[0]}, two ranks start")


def check_horovod() -> Finding:
    """Load Horovod and compare what it was compiled against with the TensorFlow that is installed."""
    if find_spec("horovod") is None:
        return Finding("not installed; nothing but horovodrun needs it", is_note=True)
    program = (
        "import json, horovod, horovod.tensorflow as h; from pathlib import Path;"
        "built = json.loads((Path(horovod.__file__).parent / 'metadata.json').read_text());"
        "has = [h.mpi_built(), h.gloo_built(), h.nccl_built()];"
        "print(json.dumps([horovod.__version__, built['tensorflow'], *has]))"
    )
    result = _run(sys.executable, "-c", program)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no output"])[-1]  # the end of a traceback
        return Finding(f"does not load: {reason}", REBUILD)
    horovod, tensorflow, mpi, gloo, nccl = json.loads(result.stdout.splitlines()[-1])
    built = ", ".join(name for name, there in (("MPI", mpi), ("Gloo", gloo), ("NCCL", nccl)) if there)
    if tensorflow != version("tensorflow"):
        text = f"{horovod} was compiled against TensorFlow {tensorflow}, installed is {version('tensorflow')}"
        return Finding(text, REBUILD)
    if not mpi:
        return Finding(f"{horovod} was compiled without MPI (has {built})", REBUILD)
    return Finding(f"{horovod} with {built}, compiled against TensorFlow {tensorflow}")


def check_tensorflow() -> Finding:
    """Compare TensorFlow and Keras with the versions that the tests run with."""
    try:
        tensorflow, keras = version("tensorflow"), version("keras")
    except PackageNotFoundError as error:
        return Finding(f"{error.name} is not installed", INSTALL)
    text = f"{tensorflow} with Keras {keras}"
    of_tensorflow, of_keras = (tuple(map(int, each.split(".")[:2])) for each in (tensorflow, keras))
    if not (2, 18) <= of_tensorflow <= (2, 21) or not (3, 10) <= of_keras < (4,):
        return Finding(f"{text}, expected 2.18 to 2.21 with Keras 3.10 or later", INSTALL)
    return Finding(text)


def check_gpus() -> Finding:
    """Find GPUs, and the requirements to keep gradients there: CuPy, NCCL, a TensorFlow that sees them."""
    if shutil.which("nvidia-smi") is None:
        return Finding("none; training runs on the CPU", is_note=True)
    asked = _run("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    gpus = asked.stdout.splitlines()
    if asked.returncode or not gpus:
        return Finding(f"nvidia-smi finds none: {_first_line(asked)}", "mend the NVIDIA driver")
    found = f"{len(gpus)} × {gpus[0]}"
    tried = _run(sys.executable, "-c", WHY_NOT_ON_GPUS)
    why_not = _first_line(tried) if tried.returncode else tried.stdout.strip()
    if why_not:
        return Finding(f"{found}, but {why_not}", "pip install 'cloudtrain[gpu]'")
    return Finding(f"{found}; gradients stay there and travel by NCCL")


def check_shared_memory() -> Finding:
    """Measure the free space in /dev/shm, through which the ranks of a node communicate."""
    try:
        free = shutil.disk_usage("/dev/shm").free / GIB
    except OSError as error:
        return Finding(f"no /dev/shm: {error}", "mount -t tmpfs tmpfs /dev/shm")
    if not os.access("/dev/shm", os.W_OK):
        return Finding("/dev/shm cannot be written", "chmod 1777 /dev/shm")
    if free < SHARED_MEMORY_GIB:
        text = f"{free:.2f} GiB free in /dev/shm, expected {SHARED_MEMORY_GIB}"
        return Finding(text, "in a container: docker run --shm-size=8g")
    return Finding(f"{free:.1f} GiB free in /dev/shm")


def check_cores() -> Finding:
    """Count the cores available to ranks."""
    return Finding(f"{len(os.sched_getaffinity(0))}; more ranks than that share them")


def check_ssh() -> Finding:
    """Find ssh; it is needed to start ranks on other machines."""
    if shutil.which("ssh") is None:
        return Finding("no ssh; only this machine can run ranks", "apt-get install openssh-client", True)
    return Finding(_first_line(_run("ssh", "-V")))


CHECKS: dict[str, Callable[[], Finding]] = {
    "Python": check_python,
    "compiler": check_compiler,
    "MPI": check_mpi,
    "TensorFlow": check_tensorflow,
    "Horovod": check_horovod,
    "GPUs": check_gpus,
    "shared memory": check_shared_memory,
    "cores": check_cores,
    "ssh": check_ssh,
}


def examine() -> int:
    """Print what every check found; return 1 where one found a problem, else 0."""
    problems = 0
    for subject, check in CHECKS.items():
        finding = check()
        problems += finding.verdict == "problem"
        print(f"{finding.verdict:<8} {subject:<14} {finding.text}", flush=True)
        if finding.remedy:
            print(f"{'':<23} to mend: {finding.remedy}", flush=True)
    count = f"{problems} problem{'s' if problems > 1 else ''}"
    print(f"\n{count if problems else 'ready to train'}")
    return bool(problems)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, or for a minute, and return its output."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=PATIENCE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer in {PATIENCE_SECONDS} s")


def _first_line(result: subprocess.CompletedProcess[str]) -> str:
    """Return the first line of a command's output, errors first."""
    output = f"{result.stderr}\n{result.stdout}".split("\n")
    return next((line for line in output if line.strip(" -")), "no output")
