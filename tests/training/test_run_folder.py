"""What a run leaves in its folder, whatever names its data have and however full the disk is; its lock."""

import errno
import json
import multiprocessing
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tests.faults.jobs import weights_of
from tests.launching import ROOT
from tests.training.refusal import refused
from tests.training.small import metrics_of, phase, records_of, trainer
from training import run_folder
from training.results import Ranks, Summary
from training.run_folder import RunFolder, RunIsAlive, RunLock, WeightsNotSaved, to_resume

SPAWN = multiprocessing.get_context("spawn")
NO_ROOM = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def only_run(folder: Path) -> Path:
    (run,) = Path(folder).iterdir()
    return run


def pictures(folder: Path, hostile: bytes) -> None:
    """Make 16 pictures in two classes, one of which cannot be decoded, to train on and to test on."""
    for part in ("train", "val"):
        for label in ("a", "b"):
            (folder / part / label).mkdir(parents=True)
            for number in range(4):
                pixels = np.full((8, 8, 3), 20 * number + 100 * (label == "b"), np.uint8)
                Image.fromarray(pixels).save(folder / part / label / f"{number}.png")
    (folder / "train" / "a" / os.fsdecode(hostile)).write_bytes(b"no picture at all")


def test_weights_are_saved_where_a_picture_that_cannot_be_decoded_has_a_name_that_is_no_utf_8(
    tmp_path, capsys
):
    pictures(tmp_path / "pictures", b"\xff\x1b[2J.png")
    data = f"dataset={{name: imagenet, path: {tmp_path / 'pictures'}}}"
    run = trainer(tmp_path / "runs", data, phases=(phase(epochs=2, batch=3),))
    run.fit()
    folder = only_run(tmp_path / "runs")
    saved = weights_of(tmp_path)
    assert sum(each.size for each in saved.values()) == run.parts.exchange.gradients.size
    line = r"a/\xff\x1b[2J.png (sample 4) cannot be decoded: a/0.png (sample 0) stood in"
    assert line in capsys.readouterr().out.splitlines()
    (cache,) = records_of(tmp_path / "runs", "cache")  # and nothing that is no Unicode
    assert cache["stand_ins"] == [line]
    assert (folder / "summary.json").exists()


def test_weights_are_saved_before_anything_is_told(tmp_path):
    run = trainer(tmp_path)

    def broken():
        raise RuntimeError("a report that cannot be made")

    run.data.read_so_far = broken
    with pytest.raises(RuntimeError, match="a report"):
        run.fit()
    assert (only_run(tmp_path) / "model.weights.h5").exists()


def test_metrics_that_cannot_be_written_cost_neither_the_run_nor_its_weights(tmp_path, monkeypatch, capsys):
    run = trainer(tmp_path / "runs", "log_every=1")
    monkeypatch.setattr(run_folder._Lines, "append", Mock(side_effect=NO_ROOM))
    run.fit()
    folder = only_run(tmp_path / "runs")
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith(f"cloudtrain: warning: {folder / 'metrics.jsonl'}: cannot be written: No space")
    assert last == f"cloudtrain: warning: {folder / 'metrics.jsonl'}: 9 lines are missing in it"
    assert weights_of(tmp_path)
    assert json.loads((folder / "summary.json").read_text())["tested"] == 360


def test_of_a_line_that_does_not_fit_nothing_is_left(tmp_path):
    def limited():
        lines = run_folder._Lines(tmp_path / "lines")
        lines.append(b"whole\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        with pytest.raises(OSError, match="File too large"):
            lines.append(b"too long\n")
        lines.append(b"end\n")  # in the room that is left
        lines.close()
        os._exit(7)

    process = multiprocessing.get_context("fork").Process(target=limited)
    process.start()
    process.join(60)
    assert process.exitcode == 7
    assert (tmp_path / "lines").read_bytes() == b"whole\nend\n"


def test_numbers_that_are_not_finite_are_null_and_end_no_run(tmp_path):
    with RunFolder(trainer(tmp_path).config) as run:
        run.write("epoch", perplexity=float("inf"), stages=[float("nan"), 0.5])
        run.end(Summary({"perplexity": float("nan")}, tested=5), Ranks(1, [1], ["here"]))
    epoch, summary = metrics_of(tmp_path)
    assert (epoch["perplexity"], epoch["stages"]) == (None, [None, 0.5])
    assert summary["perplexity"] is None
    assert json.loads((run.path / "summary.json").read_text())["perplexity"] is None


def test_half_a_line_that_a_crash_has_left_is_dropped(tmp_path):
    path = tmp_path / "lines"
    whole = {b"": b"", b"half": b"", b"one\ntwo\nhalf": b"one\ntwo\n", b"one\n": b"one\n"}
    for before, after in whole.items():
        path.write_bytes(before)
        lines = run_folder._Lines(path)
        lines.append(b"next\n")
        lines.close()
        assert path.read_bytes() == after + b"next\n"


@pytest.mark.slow
def test_weights_that_do_not_fit_are_one_line_and_the_run_has_not_ended(tmp_path, monkeypatch):
    """In a process of its own: HDF5 that met a full disk would crash when the process ends."""
    process = SPAWN.Process(target=train_where_no_file_may_grow, args=(tmp_path,))
    process.start()
    process.join(240)
    assert process.exitcode == 0
    folder = only_run(tmp_path / "runs")
    assert not (folder / "summary.json").exists()
    assert [path.name for path in folder.glob("*weights*")] == []
    problem = (tmp_path / "problem").read_text()
    assert problem.startswith(f"{folder / 'model.weights.h5'}: expected room for the ")
    assert problem.endswith(" bytes of the weights, which are not saved: File too large")
    assert "\n" not in problem


def train_where_no_file_may_grow(folder: Path) -> None:
    run = trainer(folder / "runs", phases=(phase(steps=1, batch=8),))
    save = RunFolder.save_weights

    def save_without_room(self, model):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            save(self, model)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    RunFolder.save_weights = save_without_room
    with pytest.raises(WeightsNotSaved) as caught:
        run.fit()
    (folder / "problem").write_text(str(caught.value))


@pytest.mark.parametrize("name", ["config.yaml", "dawnbench.json"])
def test_a_disk_that_is_full_from_the_beginning_is_one_line(tmp_path, monkeypatch, name):
    run = trainer(tmp_path, "target={metric: top1, at_least: 0.99}")
    write = run_folder.write_whole

    def write_or_fail(path, content):
        if path.name == name:
            raise NO_ROOM
        write(path, content)

    monkeypatch.setattr(run_folder, "write_whole", write_or_fail)
    with refused("No space left on device") as caught:
        run.fit()
    assert f"{only_run(tmp_path)}" in str(caught.value)


def test_results_are_for_whom_the_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        trainer(tmp_path).fit()
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in only_run(tmp_path).iterdir()}
    assert modes.pop("lock") == 0o600
    assert set(modes.values()) == {0o640}
    assert stat.S_IMODE(only_run(tmp_path).stat().st_mode) == 0o750


CHECKPOINTED = ("checkpoints={every_steps: 2, every_epochs: null}", "resume=auto")


def test_a_run_that_is_still_trained_is_not_joined(tmp_path):
    config = trainer(tmp_path, *CHECKPOINTED).config
    with RunFolder(config) as run:  # this process holds it as if it trained
        with pytest.raises(RunIsAlive, match=f"got {run.path}, which is being trained"):
            to_resume(config, "auto")  # before its first checkpoint
        (run.path / "checkpoints").mkdir()
        metrics_before = (run.path / "metrics.jsonl").read_bytes()
        for resume in ("auto", run.path):
            again = trainer(tmp_path, CHECKPOINTED[0], f"resume={resume}")
            with refused("expected a run that has stopped") as caught:
                again.fit()
            process = f"process {os.getpid()} on {os.uname().nodename}, since 20"
            assert f"got {run.path}, which is being trained by {process}" in str(caught.value)
            assert "resume=never" in str(caught.value)
        assert (run.path / "metrics.jsonl").read_bytes() == metrics_before
        assert only_run(tmp_path) == run.path
    trainer(tmp_path, *CHECKPOINTED).fit()  # it has stopped without an end: this one goes on with it
    assert (run.path / "summary.json").exists()
    assert only_run(tmp_path) == run.path


def test_resume_auto_takes_no_run_whose_name_begins_with_that_of_another(tmp_path):
    config = trainer(tmp_path, *CHECKPOINTED).config
    longer = tmp_path / f"{config.name}-2-20261122-224254"
    (longer / "checkpoints").mkdir(parents=True)
    (longer / "metrics.jsonl").touch()
    assert to_resume(config, config.resume) is None
    second = tmp_path / f"{config.name}-20261122-224254-1"  # of two that began in the same second
    longer.rename(second)
    assert to_resume(config, config.resume) == second
    (second / "checkpoints").rmdir()
    assert to_resume(config, config.resume) is None  # it left nothing to go on with


def test_of_two_processes_that_found_the_same_run_one_gets_it(tmp_path, monkeypatch):
    """Both have seen it free; the second finds it locked when it opens the folder."""
    monkeypatch.setattr(run_folder, "_PATIENCE_SECONDS", 0.0)
    config = trainer(tmp_path, *CHECKPOINTED).config
    first = RunFolder(config)
    with pytest.raises(RunIsAlive, match=f"expected a run that has stopped, got {first.path}"):
        RunFolder(config, first.path)
    first.__exit__()
    RunFolder(config, first.path).__exit__()


def test_a_killed_process_leaves_no_lock(tmp_path):
    program = (
        "from training.run_folder import RunLock\n"
        f"lock = RunLock(__import__('pathlib').Path({str(tmp_path)!r}))\n"
        "print('held', flush=True)\n"
        "input()"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        assert f"process {process.pid} on " in run_folder.holder_of(tmp_path)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert run_folder.holder_of(tmp_path) is None
    RunLock(tmp_path).release()


def test_nobody_else_may_open_the_lock_and_a_link_in_its_place_is_refused(tmp_path):
    RunLock(tmp_path).release()
    assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o600
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        RunLock(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, capsys):
    unsupported = Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr(run_folder.fcntl, "flock", unsupported)
    RunLock(tmp_path).release()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"cloudtrain: warning: {tmp_path / 'lock'}: ")
    assert "No locks available" in line


def test_the_run_has_an_identity_that_outlives_a_resumption(tmp_path):
    config = trainer(tmp_path).config
    with RunFolder(config) as first, RunFolder(config) as other:
        assert len(first.identity) == 32
        assert first.identity != other.identity
    with RunFolder(config, first.path) as again:
        assert again.identity == first.identity
    (first.path / "run.json").write_text("{}")
    with pytest.raises(ValueError, match=r"run\.json: expected the identity of a run, got what is damaged"):
        RunFolder(config, first.path)
    assert run_folder.holder_of(first.path) is None


def test_epochs_of_one_rank_name_no_reducer_and_it_switches_none(tmp_path, capsys):
    phases = (phase(steps=2, reducer="hitopk"), phase(steps=2))
    trainer(tmp_path, phases=phases).fit()
    lines = metrics_of(tmp_path)
    assert [line["reducer"] for line in lines if line["kind"] == "epoch"] == [None, None]
    assert [phase["reducer"] for phase in lines[-1]["phases"]] == [None, None]
    said = capsys.readouterr().out
    assert "no reducer is used" in said
    assert "hitopk" not in said


def test_the_first_record_says_what_a_run_is_made_with_and_masks_secrets(tmp_path, monkeypatch):
    argv = ["cloudtrain", "train", "my run.yaml", "dataset.storage.options.secret=hunter2", "name=\xe9\udcff"]
    monkeypatch.setattr(sys, "argv", argv)
    run = trainer(tmp_path)
    run.fit()
    first, *others = metrics_of(tmp_path)
    assert first["kind"] == "run"
    assert "run" not in {line["kind"] for line in others}
    assert first["command"] == (
        r"cloudtrain train 'my run.yaml' 'dataset.storage.options.secret=***' 'name=é\xff'"
    )
    assert "hunter2" not in (only_run(tmp_path) / "metrics.jsonl").read_text()
    assert first["identity"] == json.loads((only_run(tmp_path) / "run.json").read_text())["identity"]
    host = run.topology.world.host
    assert (first["ranks"], first["nodes"], first["hosts"]) == (1, [1], [host])
    assert first["versions"]["tensorflow"] == tf.__version__
    packages = {"tensorflow", "keras", "numpy", "numba", "mpi4py", "horovod"}
    assert set(first["versions"]) == {"cloudtrain", "python", "mpi", *packages}
    assert all(first["versions"].values())
    assert (first["transport"], first["reducers"]) == ("none", [])
    summary = json.loads((only_run(tmp_path) / "summary.json").read_text())
    assert (summary["ranks"], summary["nodes"], summary["hosts"]) == (1, [1], [host])
