"""What ends or holds up a run: SIGTERM, disks that are slow or full."""

import json
import os
import signal
import threading

import pytest

from tests.training import small
from training.checkpoint import folders
from training.checkpoint.folders import CheckpointFailed
from training.checkpoint.serialization import write_tree
from training.process.job import Preempted
from training.process.start_rank import ASKS_TO_END

CHECKPOINTED = "checkpoints={every_steps: 3, every_epochs: null}"


def trainer(folder, *words, steps=8):
    return small.trainer(folder, *words, phases=(small.phase(steps=steps, batch=200),))


def before_step(run, number, function):
    small.before_steps(run, lambda *_: function() if run.position.steps == number else None)


def test_a_run_that_is_to_end_stops_with_a_checkpoint_and_goes_on_to_the_bit(tmp_path, capsys):
    whole = trainer(tmp_path / "whole")
    whole.fit()
    run = trainer(tmp_path / "stopped", CHECKPOINTED)
    before_step(run, 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, ASKS_TO_END)]
    with pytest.raises(Preempted) as caught:
        run.fit()
    assert (caught.value.code, caught.value.step) == (75, 5)
    assert (
        "SIGTERM: stopped after step 5, with a checkpoint of it; resume=auto goes on"
        in capsys.readouterr().out
    )
    assert [signal.getsignal(each) for each in (signal.SIGTERM, ASKS_TO_END)] == handlers
    assert [line["steps"] for line in small.records_of(tmp_path / "stopped", "checkpoint")] == [3, 5]
    again = trainer(tmp_path / "stopped", CHECKPOINTED, "resume=auto")
    again.fit()
    assert [line["steps"] for line in small.records_of(tmp_path / "stopped", "resume")] == [5]
    small.assert_same_weights(whole, again)


def test_a_launcher_may_ask_too_and_the_end_of_an_epoch_is_not_cut_off_from_its_test(tmp_path):
    run = trainer(tmp_path, CHECKPOINTED, steps=16)
    before_step(run, 6, lambda: os.kill(os.getpid(), ASKS_TO_END))  # seven steps are an epoch
    with pytest.raises(Preempted) as caught:
        run.fit()
    assert caught.value.step == 8
    assert len(small.records_of(tmp_path, "epoch")) == 1


def held(monkeypatch, go):
    def write(path, tree):
        assert go.wait(60)
        return write_tree(path, tree)

    monkeypatch.setattr(folders, "write_tree", write)


def test_training_goes_on_while_a_checkpoint_is_written_as_it_was(tmp_path, monkeypatch):
    """The files are written after two more steps, and hold the state from before them."""
    words = ("model=vgg_tiny", "optimizer=adam", "phases.0.learning_rate=0.001", "average=0.5")
    whole = trainer(tmp_path / "whole", *words)
    whole.fit()
    words += (CHECKPOINTED,)
    go, run = threading.Event(), trainer(tmp_path / "held", *words)
    held(monkeypatch, go)
    seen = []

    def stop():
        seen.append((run.checkpointer.flags, list((tmp_path / "held").glob("*/checkpoints/step-*"))))
        go.set()
        small.settle(run)
        raise KeyboardInterrupt

    before_step(run, 5, stop)
    with pytest.raises(KeyboardInterrupt):
        run.fit()
    assert seen == [(2, [])]
    again = trainer(tmp_path / "held", *words, "resume=auto")
    again.fit()
    assert [line["steps"] for line in small.records_of(tmp_path / "held", "resume")] == [3]
    small.assert_same_weights(whole, again)


def test_the_next_checkpoint_and_the_end_wait_for_the_one_before(tmp_path, monkeypatch):
    go, run = threading.Event(), trainer(tmp_path, CHECKPOINTED)
    held(monkeypatch, go)

    def finish_when_waited_for():
        finish = run.checkpointer.finish
        run.checkpointer.finish = lambda: (go.set(), finish())

    before_step(run, 5, finish_when_waited_for)
    run.fit()
    first, *others = small.records_of(tmp_path, "checkpoint")
    assert [each["steps"] for each in (first, *others)] == [3, 6, 7, 8]  # the first test is the best so far
    assert first["write_seconds"] >= first["wait_seconds"] > 0
    assert (next(tmp_path.iterdir()) / "summary.json").exists()


def test_an_error_in_the_background_ends_the_run_in_a_later_step(tmp_path, monkeypatch):
    def full(path, tree):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders, "write_tree", full)
    run = trainer(tmp_path, CHECKPOINTED)
    with pytest.raises(CheckpointFailed, match=r"step 3 is not saved: rank 0: .*No space left on device"):
        run.fit()
    assert 3 < run.position.steps <= 6
    (folder,) = tmp_path.iterdir()
    assert list((folder / "checkpoints").iterdir()) == []
    assert not (folder / "summary.json").exists()
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["kind"] == "run"
