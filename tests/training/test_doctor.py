"""Every check of the doctor, well and ill."""

import os
import sys
from importlib.metadata import version
from types import SimpleNamespace

import pytest

from training.commands import doctor


@pytest.mark.slow
def test_this_machine_can_train(capsys):
    assert doctor.examine() == 0
    out = capsys.readouterr().out
    assert "problem" not in out
    assert out.count("\n") >= len(doctor.CHECKS)
    assert "two ranks start" in out
    assert f"compiled against TensorFlow {version('tensorflow')}" in out


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
    assert finding.remedy == "pip install 'cloudtrain[gpu]'"


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
    monkeypatch.setattr(doctor.sys, "version_info", (3, 14, 0))
    assert_problem(doctor.check_python(), "3.14.0, expected 3.10 to 3.13")


@pytest.mark.parametrize(
    ("versions", "text"),
    [
        ({"tensorflow": "2.17.1", "keras": "3.10.0"}, "2.17.1 with Keras 3.10.0, expected 2.18 to 2.21"),
        ({"tensorflow": "2.18.1", "keras": "3.8.0"}, "2.18.1 with Keras 3.8.0, expected 2.18 to 2.21"),
        ({"tensorflow": "2.22.0", "keras": "3.15.1"}, "2.22.0 with Keras 3.15.1, expected 2.18 to 2.21"),
        ({}, "tensorflow is not installed"),
    ],
)
def test_another_tensorflow_or_keras_is_a_problem(monkeypatch, versions, text):
    def version(name):
        if name not in versions:
            raise doctor.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(doctor, "version", version)
    assert_problem(doctor.check_tensorflow(), text)


@pytest.mark.parametrize(
    ("check", "script", "text", "remedy"),
    [
        (
            doctor.check_horovod,
            """echo '["0.28.1", "2.18.1", true, true, false]'""",
            "compiled against TensorFlow 2.18.1, installed is 2.19.0",
            "cloudtrain install-horovod",
        ),
        (
            doctor.check_horovod,
            "echo libmpi.so.40 is missing >&2; exit 1",
            "does not load: libmpi.so.40 is missing",
            "",
        ),
        (doctor.check_mpi, "echo no slots >&2; exit 1", "two ranks do not start: no slots", ""),
        (doctor.check_mpi, None, "no mpirun", ""),
    ],
    ids=["built for another TensorFlow", "does not load", "ranks do not start", "no mpirun"],
)
def test_a_horovod_or_mpi_that_does_not_work_is_a_problem(monkeypatch, tmp_path, check, script, text, remedy):
    for name in ("python", "mpirun") if script is not None else ():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(doctor, "version", lambda name: "2.19.0")
    assert_problem(check(), text, remedy)


def test_little_shared_memory_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    assert_problem(doctor.check_shared_memory(), "0.06 GiB free in /dev/shm, expected 1", "--shm-size")


def assert_problem(finding: doctor.Finding, text: str, remedy: str = "") -> None:
    assert finding.verdict == "problem"
    assert text in finding.text
    assert remedy in finding.remedy
