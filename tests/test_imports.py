"""What importing our packages brings along, what they promise to hold, and which may import which."""

import ast
import importlib
import os
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter

import pytest

from commlib.tf_logging import without_noise
from tests.launching import ENVIRONMENT, ROOT, run

# What takes seconds, a GPU, or a started MPI.
HEAVY = ["tensorflow", "keras", "torch", "jax", "horovod", "cupy", "mpi4py.MPI"]
PACKAGES = ["commlib", *(f"commlib.{name}" for name in ("gpu", "keras", "reducers", "selection", "wire"))]
PACKAGES += ["commlib.transport", "datacache", "pto"]
LIBRARIES = {"commlib", "datacache", "pto"}
# Where the libraries, and what of training reads configurations, import what is heavy, also inside functions.
ADAPTERS = {
    "tensorflow": {
        *("commlib.keras", "commlib.tensorflow", "datacache.tensorflow", "pto.keras", "pto.sharded"),
        "training.callbacks.writers",
    },
    "keras": {"commlib.keras", "pto.keras", "pto.sharded"},
    "torch": {"commlib.torch"},
    "jax": {"commlib.jax"},
    "horovod": set(),
    "cupy": {"commlib.gpu.cupy_engine", "commlib.transport.nccl"},
    "mpi4py": {"commlib.transport.mpi", "commlib.transport.watchdog"},
}
LIGHT = {
    *(*LIBRARIES, "training.callbacks", "training.config", "training.checkpoint", "training.datasets"),
    *("training.linear", "training.receipt"),
}


@cache
def sources() -> dict[str, ast.Module]:
    """Return the syntax trees of our modules, by name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text()
        )
        for package in (*sorted(LIBRARIES), "training")
        for path in (ROOT / package).rglob("*.py")
    }


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the modules that a file imports, also inside functions and for type checkers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            for each in node.names:
                inner = f"{node.module}.{each.name}"
                yield inner if inner in sources() else node.module


@cache
def imports() -> dict[str, set[str]]:
    """Return what of our modules, and of others, each of ours imports."""
    return {name: set(imported(tree)) for name, tree in sources().items()}


def without_types(tree: ast.Module) -> ast.Module:
    """Return a tree without what only type checkers import."""
    body = [
        each
        for each in tree.body
        if not (isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING")
    ]
    return ast.Module(body, [])


def inside(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def test_no_modules_import_each_other_in_a_circle():
    graph = {name: (each & sources().keys()) - {name} for name, each in imports().items()}
    TopologicalSorter(graph).prepare()  # which raises with the circle


def test_a_library_imports_no_other_package_of_ours():
    found = {
        (name, other)
        for name, others in imports().items()
        for other in others & sources().keys()
        if (package := name.partition(".")[0]) in LIBRARIES and not inside(other, package)
    }
    assert found == set()


@pytest.mark.parametrize("heavy", ADAPTERS)
def test_only_adapters_import_what_is_heavy(heavy):
    found = {
        name
        for name, tree in sources().items()
        if any(inside(name, package) for package in LIGHT)
        and any(inside(other, heavy) for other in imported(without_types(tree)))
        and not any(inside(name, adapter) for adapter in ADAPTERS[heavy])
    }
    assert found == set()


def test_importing_loads_no_framework_and_starts_no_mpi():
    program = f"""
import sys
import commlib, datacache, pto
from commlib.transport import mpi
import training.config.config, training.checkpoint.folders, training.commands.main
import training.commands.receipt, training.commands.report, training.linear.run
print([name for name in {HEAVY} if name in sys.modules])
"""
    finished = run(sys.executable, "-c", program)
    assert (finished.returncode, finished.stdout.strip()) == (0, "[]"), finished.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_exists_and_is_listed_once(package):
    module = importlib.import_module(package)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert len(set(module.__all__)) == len(module.__all__)


@pytest.mark.slow
def test_the_adapter_brings_tensorflow_without_its_noise():
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    program = (
        "import commlib.tensorflow, faulthandler, os, sys;"
        "print(os.environ['TF_CPP_MIN_LOG_LEVEL'], 'tensorflow' in sys.modules, faulthandler.is_enabled());"
        "os.write(2, b'oneDNN custom operations are on: as others write it\\n')"
    )
    finished = run(sys.executable, "-c", program, env=environment)
    assert finished.stdout == "2 True False\n"
    assert finished.stderr == "oneDNN custom operations are on: as others write it\n"


def test_the_level_of_tensorflow_s_lines_that_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "1")
    with without_noise():
        assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "1"


def test_everything_is_found_under_one_name():
    import cloudtrain
    import commlib

    assert cloudtrain.commlib is commlib
    assert cloudtrain.Trainer is cloudtrain.training.Trainer
    with pytest.raises(AttributeError, match="'cloudtrain' has no attribute 'trainer'"):
        cloudtrain.trainer  # noqa: B018  # the access is what is tested


@pytest.mark.parametrize(
    "program", ["import cloudtrain; cloudtrain.Trainer", "import cloudtrain; cloudtrain.main()"]
)
def test_a_training_of_another_project_is_named(tmp_path, program):
    other = tmp_path / "training"
    other.mkdir()
    (other / "__init__.py").touch()
    variables = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}  # behind the working directory
    result = run(sys.executable, "-c", program, env=variables, cwd=tmp_path)
    assert result.returncode == 1
    expected = f"training: expected the package of cloudtrain in {ROOT}/training, found another in {other}"
    assert expected in result.stderr.splitlines()[-1]
