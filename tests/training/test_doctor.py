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


def test_a_missing_tool_that_is_not_always_needed_is_a_note(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    for check in (doctor.check_compiler, doctor.check_ssh):
        finding = check()
        assert finding.verdict == "note"
        assert finding.remedy.startswith("apt-get install")
    assert doctor.check_gpus().verdict == "note"


@pytest.mark.parametrize(
    ("says", "verdict", "text"),
    [
        ("print()", "ok", "2 × A GPU; gradients stay there"),
        ("print('TensorFlow sees none')", "problem", "2 × A GPU, but TensorFlow sees none"),
        ("raise SystemExit('no libcuda')", "problem", "2 × A GPU, but no libcuda"),
    ],
)
def test_what_keeps_gradients_off_the_gpus_is_said(monkeypatch, tmp_path, says, verdict, text):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'A GPU'\necho 'A GPU'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(doctor, "WHY_NOT_ON_GPUS", says)
    finding = doctor.check_gpus()
    assert finding.verdict == verdict
    assert finding.text.startswith(text)


MISMATCH = """echo '["0.28.1", "2.18.1", true, true, false]'"""
ILL = {
    "an unsupported Python": ("python", None, "3.14.0, expected 3.10 to 3.13", ""),
    "another TensorFlow": ("tensorflow", None, "2.17.1 with Keras 2.17.1, expected 2.18 to 2.21", ""),
    "built for another TensorFlow": ("horovod", MISMATCH, "installed is 2.17.1", "install-horovod"),
    "does not load": ("horovod", "echo no libmpi >&2; exit 1", "does not load: no libmpi", ""),
    "ranks do not start": ("mpi", "echo no slots >&2; exit 1", "two ranks do not start: no slots", ""),
    "no mpirun": ("mpi", None, "no mpirun", ""),
    "little shared memory": ("shared_memory", None, "0.06 GiB free in /dev/shm, expected 1", "--shm-size"),
}


@pytest.mark.parametrize(("subject", "script", "text", "remedy"), ILL.values(), ids=ILL)
def test_what_is_wrong_is_printed_with_its_remedy_and_sets_the_exit_status(
    monkeypatch, tmp_path, capsys, subject, script, text, remedy
):
    for name in ("python", "mpirun") if script is not None else ():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    monkeypatch.setattr(doctor, "version", lambda name: "2.17.1")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    monkeypatch.setattr(doctor, "CHECKS", {subject: getattr(doctor, f"check_{subject}")})
    assert doctor.examine() == 1
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("problem ")
    assert text in out
    assert remedy in out
