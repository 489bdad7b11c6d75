"""What watches a run: in which order hooks are called, what they can do, and what their errors become."""

import inspect
import json
import re
import sys
from unittest.mock import Mock

import keras
import numpy as np
import pytest

from commlib.registry import options_of
from commlib.transport import simulated
from tests.extent import more
from tests.launching import ROOT, errors, launch, tail
from tests.training.small import (
    LINEAR,
    before_steps,
    crash_after,
    metrics_of,
    on_ranks,
    phase,
    records_of,
    trainer,
)
from training.callbacks import CALLBACKS, Callback
from training.callbacks.callback import HOOKS
from training.callbacks.digests import WeightsDiffer, check_equal_weights, digest_of
from training.callbacks.stopping import EarlyStopping
from training.commands.train import train
from training.tasks import Metric

PAGE = (ROOT / "docs" / "callbacks.md").read_text()
MINE = '''
from training.callbacks import Callback, Event

CALLS = []


class Notes(Callback):
    """Notes every hook, and counts steps."""

    def __init__(self, *, label="", fails=None):
        self.label, self.fails, self.steps = label, fails, 0

    def note(self, run, hook):
        CALLS.append(self.label + hook)
        if self.fails == hook:
            raise KeyError("no such thing")

    def on_build(self, run): self.note(run, "build")
    def on_run_begin(self, run): self.note(run, "run_begin")
    def on_resume(self, run): self.note(run, f"resume at {self.steps}")
    def on_phase_begin(self, run, phase): self.note(run, f"phase_begin {phase.number}")
    def on_step_end(self, run, step):
        self.steps += 1
        self.note(run, f"step_end {run.position.steps}")
    def on_test_end(self, run, tested): self.note(run, f"test_end {tested.count}")
    def on_epoch_end(self, run, result): self.note(run, f"epoch_end {result.epoch}")
    def on_checkpoint(self, run, step): self.note(run, f"checkpoint {step}")
    def on_phase_end(self, run, phase): self.note(run, f"phase_end {phase.number}")
    def on_run_end(self, run): self.note(run, "run_end")
    def on_error(self, run, error): self.note(run, f"error {type(error).__name__}")
    def on_event(self, run, event): self.note(run, f"event {event.kind}")
    def state_dict(self): return {"steps": self.steps}
    def load_state_dict(self, state): self.steps = state["steps"]
'''
NOTES = "my_watch.notes:Notes"


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Return what a callback of the user's own notes; it is in the working directory."""
    (tmp_path / "my_watch").mkdir()
    (tmp_path / "my_watch" / "notes.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("my_watch", "my_watch.notes"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return lambda: sys.modules["my_watch.notes"].CALLS


def test_hooks_are_called_in_order_of_the_run_and_of_the_configuration(tmp_path, calls):
    names = f"callbacks=[{{name: '{NOTES}', label: 'a '}}, {{name: '{NOTES}', label: 'b '}}]"
    phases = (phase(steps=2), phase(steps=1, batch=32))
    trainer(tmp_path / "runs", names, "checkpoints={}", phases=phases).fit()
    expected = [
        *("build", "run_begin"),
        *("phase_begin 0", "step_end 1", "step_end 2", "test_end 360", "epoch_end 0", "phase_end 0"),
        *("phase_begin 1", "step_end 3", "test_end 360", "epoch_end 1", "phase_end 1", "run_end"),
    ]
    hooks = [call for call in calls() if "event" not in call]
    saved = [hook for hook in hooks if "checkpoint" in hook]  # which are written in the background
    assert saved == [f"{each} checkpoint {step}" for step in (2, 3) for each in "ab"]
    hooks = [hook for hook in hooks if hook not in saved]
    assert hooks == [each + hook for hook in expected for each in ("a ", "b ")]
    heard = [call.removeprefix("a event ") for call in calls() if call.startswith("a event")]
    kinds = [line["kind"] for line in metrics_of(tmp_path / "runs")]
    assert [*heard, "summary"] == kinds


def test_a_run_that_goes_on_gives_callbacks_their_state(tmp_path, calls):
    words = [f"callbacks=['{NOTES}', '{NOTES}']", "checkpoints={every_steps: 2}"]
    run = trainer(tmp_path / "runs", *words, phases=(phase(steps=5),))
    crash_after(run, 3)
    assert calls()[-2:] == ["error RuntimeError"] * 2
    calls().clear()
    trainer(tmp_path / "runs", *words, "resume=auto", phases=(phase(steps=5),)).fit()
    hooks = [call for call in calls() if not call.startswith("event")]
    assert hooks[2:8:2] == ["run_begin", "resume at 2", "phase_begin 0"]
    assert hooks[3:9:2] == hooks[2:8:2]  # the second of the name has a state of its own
    assert hooks[8] == "step_end 3"


def test_a_hook_that_is_none_is_refused_when_the_class_is_made():
    with pytest.raises(TypeError, match='there is no hook on_epoch_ends, did you mean "on_epoch_end"'):
        type("Mine", (Callback,), {"on_epoch_ends": lambda self, run: None})
    assert len(HOOKS) == 12


def test_an_error_of_a_callback_ends_the_command_with_one_line_and_status_1(tmp_path, calls, capfd):
    (tmp_path / "my.yaml").write_text(small(f"[{{name: '{NOTES}', fails: 'epoch_end 0'}}]"))
    with pytest.raises(SystemExit) as caught:
        train("my.yaml", [LINEAR, f"output={tmp_path / 'runs'}"])
    assert caught.value.code == 1
    said = capfd.readouterr().err.splitlines()
    (line,) = [each for each in said if each.startswith("cloudtrain: callback")]
    what = "on_epoch_end raised KeyError: 'no such thing' (notes.py, line 16)"
    assert line.startswith(f"cloudtrain: callback {NOTES}: {what}")
    assert calls()[-1] == "error CallbackFailed"
    assert not list((tmp_path / "runs").glob("*/summary.json"))


def small(callbacks):
    """Return the text of a configuration with these callbacks."""
    phases = f"[{phase(steps=4)}]"
    return f"name: small\ndataset: digits\nmodel: vgg_tiny\nphases: {phases}\ncallbacks: {callbacks}\n"


def test_callbacks_of_ones_own_are_checked_by_a_run(tmp_path, calls):
    for words, expected in {
        f"{{name: '{NOTES}', lable: x}}": r"callbacks\[0\].lable: .* no such option",
        "'my_watch.notes:CALLS'": r"callbacks\[0\]: .* a subclass of Callback",
        "'my_watch.note:Notes'": r"callbacks\[0\]: .* no module my_watch.note",
    }.items():
        with pytest.raises(ValueError, match=expected):
            trainer(tmp_path / "runs", f"callbacks=[{words}]")


def test_a_dry_run_builds_callbacks_and_calls_nothing_else(tmp_path, calls, capfd):
    (tmp_path / "my.yaml").write_text(small(f"['{NOTES}', {{name: early_stopping, metric: top1}}]"))
    train("my.yaml", [LINEAR], dry_run=True)
    assert calls() == ["build"]
    assert capfd.readouterr().out.endswith("dry run of my.yaml: all is built, and each phase took a step\n")


def first_cells(header):
    (table,) = re.findall(rf"(?m)^\| {header} \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE)
    return [re.findall(r"`([^`]+)`", row.split(" | ")[0]) for row in table.splitlines()]


def test_the_page_has_every_callback_and_its_options():
    assert [name for (name,) in first_cells("name")] == list(CALLBACKS)
    for name, kind in CALLBACKS.items():
        (row,) = re.findall(rf"(?m)^\| `{name}` \| ([^|]*) \|", PAGE)
        found = [option.partition("=")[::2] for option in re.findall(r"`([^`]+)`", row)]
        options = options_of(kind)
        assert [option for option, _ in found] == list(options)
        for option, default in found:
            assert default in ("", str(options[option]))


def test_the_page_has_every_hook():
    *hooks, state = first_cells("hook")
    assert [hook.partition("(")[0] for (hook,) in hooks] == HOOKS
    for (hook,) in hooks:
        name, _, arguments = hook.removesuffix(")").partition("(")
        assert list(inspect.signature(getattr(Callback, name)).parameters) == ["self", *arguments.split(", ")]
    assert state == ["state_dict()", "load_state_dict(state)"]


METRICS = {"top1": Metric("accuracy", "higher", share=True), "perplexity": Metric("perplexity", "lower")}


def judged(stopping, values):
    """Give tests with these values of its metric; return after how many it stops the run, and why."""
    run = Mock()
    run.task.metrics = METRICS
    for number, value in enumerate(values, 1):
        stopping.on_epoch_end(run, Mock(metrics={} if value is None else {stopping._metric: value}))
        if run.stop.called:
            return number, run.stop.call_args.args[0]
    return None, None


NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "options", "stops"),
    [
        ([0.1, 0.2, 0.2, 0.2, 0.9], {"metric": "top1", "patience": 2}, 4),
        ([0.1, 0.14, 0.16, 0.2], {"metric": "top1", "patience": 2, "min_delta": 0.05}, None),
        ([0.1, 0.14, 0.15, 0.2], {"metric": "top1", "patience": 2, "min_delta": 0.0501}, 3),
        ([9.0, 8.0, 8.0, 7.0, 7.5], {"metric": "perplexity", "patience": 1}, 3),
        ([9.0, None, None, 8.0], {"metric": "perplexity", "patience": 1}, None),  # not tested
        ([NAN, NAN, NAN], {"metric": "top1", "patience": 3}, 3),
    ],
)
def test_early_stopping_counts_the_tests_that_are_no_better(values, options, stops):
    assert judged(EarlyStopping(**options), values)[0] == stops


def test_early_stopping_says_what_the_best_was_and_keeps_its_count():
    reason = "early stopping: top1 was no better than "
    once = EarlyStopping(metric="top1", patience=1)
    assert judged(once, [0.25, 0.2]) == (2, f"{reason}25.00% in 1 test")
    before, after = EarlyStopping(metric="top1", patience=2), EarlyStopping(metric="top1", patience=2)
    assert judged(before, [0.5, 0.4]) == (None, None)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert judged(after, [0.5]) == (1, f"{reason}50.00% in 2 tests in a row")


def test_a_metric_that_the_task_has_not_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="callback early_stopping: metric: expected one of top1, top5"):
        trainer(tmp_path, "callbacks=[{name: early_stopping, metric: top2}]")
    assert list(tmp_path.iterdir()) == []


def test_an_early_stop_ends_the_run_with_all_its_files(tmp_path):
    still = phase(epochs=9, batch=200, rate="learning_rate: {start: 1.0e-9, end: 1.0e-9}")
    words = ["callbacks=[{name: early_stopping, metric: top1, patience: 2}]", "checkpoints={}"]
    run = trainer(tmp_path / "runs", *words, phases=(still, still))
    reason = run.fit().stopped
    assert reason.startswith("early stopping: top1 was no better than ")
    assert (run.position.phase, run.position.run_epoch) == (0, 3)
    (stop,) = records_of(tmp_path / "runs", "stop")
    assert (stop["epoch"], stop["reason"]) == (2, reason)
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "summary.json").read_text())["stopped"] == reason
    assert (folder / "model.weights.h5").exists()
    assert (folder / "checkpoints" / f"step-{run.position.steps:08}").exists()


def test_one_rank_that_asks_for_it_stops_all_at_the_same_epoch(tmp_path):
    def stop_on_rank_1(run):
        if run.rank == 1:
            run.stop("enough")

    results = on_ranks(tmp_path / "runs", 2, phases=(phase(epochs=5, batch=200),), prepare=stop_on_rank_1)
    assert [(run.position.run_epoch, run.summary.stopped) for run, _ in results] == [(1, "enough")] * 2


@pytest.mark.parametrize("altered", [0, *more(2)])
def test_a_rank_whose_weights_are_altered_is_named_by_all(tmp_path, altered):
    def prepare(run):
        def alter_after_step_3(*_):
            if run.rank == altered and run.position.steps == 3:
                weights = run.parts.model.variables[0]
                weights.assign(np.nextafter(weights.numpy(), np.float32(9)))

        before_steps(run, alter_after_step_3)

    results = on_ranks(tmp_path / "runs", 3, "digest_every=2", phases=(phase(steps=8),), prepare=prepare)
    other = 1 if altered == 0 else 0
    line = f"after step 4, the weights of ranks [{altered}] differ from those of rank {other}"
    assert [str(error) for _, error in results] == [line] * 3
    assert all(isinstance(error, WeightsDiffer) for _, error in results)
    (digest,) = records_of(tmp_path / "runs", "digest")
    assert digest["steps"] == 2


def test_the_digest_of_the_weights_is_recorded(tmp_path):
    run = trainer(tmp_path / "with", "digest_every=2", phases=(phase(steps=3), phase(steps=1)))
    run.fit()
    first, last = records_of(tmp_path / "with", "digest")
    assert (first["steps"], last["steps"]) == (2, 4)
    assert last["digest"] == digest_of(run.model.get_weights()) != first["digest"]
    assert len(last["digest"]) == 16
    trainer(tmp_path / "without", "digest_every=0").fit()
    assert records_of(tmp_path / "without", "digest") == []


def test_digests_with_the_highest_bit_travel_as_well():
    class Model:
        def __init__(self, value):
            self.trainable_variables = [keras.Variable(np.float32([value]))]

    def body(comm):
        return [check_equal_weights(Model(value), comm, "now") for value in range(8)]

    results = simulated.run(body, 2)
    assert results[0] == results[1] == [digest_of([np.float32([value])]) for value in range(8)]
    assert max(results[0]) >= "8" > min(results[0])


@pytest.mark.large
@pytest.mark.launch
def test_a_callback_that_raises_on_one_rank_ends_all_with_one_line(tmp_path):
    (tmp_path / "broken.py").write_text(
        "from training.callbacks import Callback\n\n\n"
        "class Broken(Callback):\n"
        "    def on_step_end(self, run, step):\n"
        "        if run.rank == 1 and run.position.steps == 2:\n"
        "            raise OSError('the disk has gone')\n"
    )
    (tmp_path / "my.yaml").write_text(small("['broken:Broken']"))
    result = launch(2, "my.yaml", cwd=tmp_path)
    assert result.returncode == 1, tail(result)
    (line,) = errors(result).splitlines()
    what = "callback broken:Broken: on_step_end raised OSError: the disk has gone (broken.py, line 7)"
    assert line.startswith(f"cloudtrain: {what} (rank 1 of 2 on ")
