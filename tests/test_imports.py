"""What importing our packages brings along, and what they promise to hold."""

import importlib
import os
import subprocess
import sys

import pytest

HEAVY = ["tensorflow", "keras", "horovod", "cupy", "mpi4py.MPI"]  # seconds, a GPU, or a started MPI
PACKAGES = [
    "commlib",
    "commlib.gpu",
    "commlib.keras",
    "commlib.reducers",
    "commlib.selection",
    "commlib.transport",
    "commlib.wire",
    "datacache",
    "pto",
]


@pytest.mark.parametrize("statement", ["import commlib, datacache, pto", "from commlib.transport import mpi"])
def test_importing_loads_no_framework_and_starts_no_mpi(statement):
    program = f"{statement}; import sys; print([name for name in {HEAVY} if name in sys.modules])"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stdout.strip()) == (0, "[]"), finished.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_exists_and_is_listed_once(package):
    module = importlib.import_module(package)
    names = getattr(module, "__all__", [])
    assert [name for name in names if not hasattr(module, name)] == []
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("package", [name for name in PACKAGES if name.startswith("commlib")])
def test_every_package_of_commlib_lists_its_public_names(package):
    assert importlib.import_module(package).__all__


@pytest.mark.parametrize("level", [None, "1"])
def test_the_adapter_brings_tensorflow_without_its_noise_and_leaves_the_user_s_log_level(level):
    program = (
        "import commlib.tensorflow, faulthandler, os, sys;"
        "print(os.environ['TF_CPP_MIN_LOG_LEVEL'], 'tensorflow' in sys.modules, faulthandler.is_enabled());"
        "os.write(2, b'oneDNN custom operations are on: as others write it\\n')"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": level} if level else {}
    finished = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert finished.stdout == f"{level or 2} True False\n"
    assert finished.stderr == "oneDNN custom operations are on: as others write it\n"
