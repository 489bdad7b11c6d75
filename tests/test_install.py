"""What ``scripts/install.sh`` says on a machine that lacks something, before it downloads anything."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import ROOT, run

NEEDED = ["bash", "dirname", "flock", "cat", "sha256sum", "awk", "mkdir", "df", "ls", "grep", "realpath"]


@pytest.fixture
def machine(tmp_path):
    """A clone and a machine that has Python 3.11, a compiler and room; tests take one away."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in NEEDED:
        (tools / name).symlink_to(shutil.which(name))
    program(tools / "df", 'printf "Filesystem\\nroot 9 9 104857600 9 /\\n"')
    program(tools / "python3", 'case "$2" in *sys.exit*) ;; *print*) echo cp311 ;; esac')
    program(tools / "g++", "")
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "scripts", clone / "scripts")
    (clone / "training" / "process").mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "training/process/install_horovod.sh"):
        shutil.copy(ROOT / name, clone / name)
    return tmp_path


def program(path: Path, script: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def install(
    machine: Path, *words: str, clone: str = "clone", **environment: str
) -> subprocess.CompletedProcess[str]:
    variables = {"PATH": str(machine / "bin"), "HOME": str(machine), **environment}
    return run("bash", machine / clone / "scripts" / "install.sh", *words, env=variables)


def refusal(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


MISSING = {
    "python that is too new": (
        lambda folder: program(folder / "bin/python3", "test $1 = --version && echo Python 3.14.1 || exit 1"),
        "needs Python 3.10 to 3.13, found Python 3.14.1",
        "apt-get install python3",
    ),
    "no python": (lambda folder: os.remove(folder / "bin/python3"), "needs Python 3.10 to 3.13, found"),
    "no compiler": (
        lambda folder: os.remove(folder / "bin/g++"),
        "cloudtrain: needs a C++ compiler to build Horovod: apt-get install g++",
    ),
    "little disk": (
        lambda folder: program(folder / "bin/df", 'printf "Filesystem\\nroot 9 9 1048576 9 /\\n"'),
        "cloudtrain: needs 4 GiB of free disk in ",
        "/clone, found 1 GiB: make room there",
    ),
}


@pytest.mark.parametrize("missing", MISSING)
def test_what_a_machine_lacks_is_one_line_and_nothing_is_left_behind(machine, missing):
    change, *said = MISSING[missing]
    change(machine)
    line = refusal(install(machine, "dev"))
    assert all(each in line for each in said)
    assert not (machine / "clone" / ".venv").exists()


def test_a_path_with_a_space_is_refused_at_once(machine):
    (machine / "clone").rename(machine / "my clone")
    assert "has a space in its path" in refusal(install(machine, clone="my clone"))


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"PYTHON": "mine"}, "found Python 2.7.18"),  # chosen by name, it is the one that is judged
        ({"HOME": ""}, "needs HOME, found none"),
        ({"XDG_CACHE_HOME": "{}/bin/mine"}, "cloudtrain: cannot write to {}/bin/mine/cloudtrain/wheels: "),
    ],
)
def test_an_environment_that_is_wrong_is_named(machine, environment, said):
    program(machine / "bin" / "mine", 'test "$1" = --version && echo Python 2.7.18 || exit 1')
    given = {name: value.format(machine) for name, value in environment.items()}
    assert said.format(machine) in refusal(install(machine, **given))


def test_the_command_for_horovod_names_the_compiler_that_is_missing(tmp_path):
    for name in ("bash", "ls", "mkdir"):
        (tmp_path / name).symlink_to(shutil.which(name))
    variables = {**os.environ, "PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    result = run(sys.executable, "-m", "training", "install-horovod", env=variables)
    assert result.returncode == 1
    assert result.stderr == "cloudtrain: needs a C++ compiler to build Horovod: apt-get install g++\n"
