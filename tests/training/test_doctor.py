"""Every check of the doctor, well and ill."""

import os
import sys
from pathlib import Path

import pytest

from training.commands import doctor


@pytest.mark.slow
def test_this_machine_can_train(capsys):
    assert doctor.examine() == 0
    out = capsys.readouterr().out
    assert "problem" not in out
    assert out.count("\n") >= len(doctor.CHECKS)
    assert "two ranks start" in out
    assert "compiled against TensorFlow 2.18.1" in out


def test_a_problem_is_printed_with_its_remedy_and_sets_the_exit_status(monkeypatch, capsys):
    ill = doctor.Finding("memory", "none", "buy some")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: ill,))
    assert doctor.examine() == 1
    out = capsys.readouterr().out
    assert "problem  memory         none\n" in out
    assert "to mend: buy some" in out


def test_a_missing_tool_that_is_not_always_needed_is_a_note(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    for check in (doctor.check_compiler, doctor.check_ssh):
        finding = check()
        assert finding.verdict == "note"
        assert finding.remedy.startswith("apt-get install")
    assert doctor.check_gpus().verdict == "note"


@pytest.fixture
def nvidia_smi(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'A GPU'\necho 'A GPU'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


@pytest.mark.large
def test_gpus_that_nothing_can_use_are_a_problem(nvidia_smi):
    finding = doctor.check_gpus()
    assert finding.verdict == "problem"
    assert finding.text.startswith("2 × A GPU, but CuPy cannot be imported")
    assert finding.remedy == "run ./scripts/install.sh gpu"


@pytest.mark.parametrize(
    ("says", "verdict", "text"),
    [
        ("print()", "ok", "2 × A GPU; gradients stay there"),
        ("print('TensorFlow sees none')", "problem", "2 × A GPU, but TensorFlow sees none"),
        ("raise SystemExit('no libcuda')", "problem", "2 × A GPU, but no libcuda"),
    ],
)
def test_what_keeps_gradients_off_the_gpus_is_said(nvidia_smi, monkeypatch, says, verdict, text):
    monkeypatch.setattr(doctor, "WHY_NOT_ON_GPUS", says)
    finding = doctor.check_gpus()
    assert finding.verdict == verdict
    assert finding.text.startswith(text)


def test_an_unsupported_python_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor.sys, "version_info", (3, 13, 0))
    finding = doctor.check_python()
    assert finding.verdict == "problem"
    assert "3.13.0, expected 3.10 to 3.12" in finding.text


@pytest.mark.parametrize(
    ("versions", "text"),
    [
        ({"tensorflow": "2.20.0", "keras": "3.10.0"}, "2.20.0 with Keras 3.10.0, expected 2.18.1"),
        ({"tensorflow": "2.18.1", "keras": "3.12.0"}, "2.18.1 with Keras 3.12.0, expected 2.18.1"),
        ({}, "tensorflow is not installed"),
    ],
)
def test_another_tensorflow_or_keras_is_a_problem(monkeypatch, versions, text):
    def version(name):
        if name not in versions:
            raise doctor.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(doctor, "version", version)
    finding = doctor.check_tensorflow()
    assert finding.verdict == "problem"
    assert text in finding.text


def test_horovod_built_for_another_tensorflow_is_a_problem(monkeypatch, tmp_path):
    said = """'["0.28.1", "2.18.1", true, true, false]'"""
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, f"echo {said}"))
    monkeypatch.setattr(doctor, "version", lambda name: "2.19.0")
    finding = doctor.check_horovod()
    assert finding.verdict == "problem"
    assert "compiled against TensorFlow 2.18.1, installed is 2.19.0" in finding.text
    assert "install.sh" in finding.remedy


def fake_python(folder: Path, script: str) -> str:
    """Write a program that stands in for the Python of an environment, and for its mpirun."""
    for name in ("python", "mpirun"):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return str(folder / "python")


def test_a_horovod_that_does_not_load_is_a_problem(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, "echo libmpi.so.40 is missing >&2; exit 1"))
    finding = doctor.check_horovod()
    assert finding.verdict == "problem"
    assert "does not load: libmpi.so.40 is missing" in finding.text


def test_an_mpi_that_does_not_start_ranks_is_a_problem(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, "echo no slots >&2; exit 1"))
    finding = doctor.check_mpi()
    assert finding.verdict == "problem"
    assert "two ranks do not start: no slots" in finding.text


def test_an_environment_without_mpi_is_a_problem(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert doctor.check_mpi().verdict == "problem"


def test_little_shared_memory_is_a_problem(monkeypatch):
    class Usage:
        free = 64 << 20

    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage)
    finding = doctor.check_shared_memory()
    assert finding.verdict == "problem"
    assert "0.06 GiB free in /dev/shm, expected 1" in finding.text
    assert "--shm-size" in finding.remedy
