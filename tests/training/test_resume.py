"""A run that was stopped goes on as if it had not been, to the bit."""

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from datacache.order import Order
from datacache.text_orders import Windows
from tests.extent import more
from tests.launching import MPIRUN, python_on_ranks, run, tail
from tests.training import small
from tests.training.resuming import SCENARIOS, STEPS
from tests.training.stored import OWN, SHARED, manifest_of, write_manifest
from training.checkpoint.serialization import Written, read_tree, write_tree
from training.config.config import ConfigurationError
from training.results import Position
from training.run.checkpointing import Checkpointer, _moved

LONG = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resuming")


@pytest.fixture(scope="module")
def facts(folder):
    program = f"from tests.training import resuming; resuming.on_two_ranks({str(folder)!r})"
    # Eight runs one after the other: minutes where the cores have other work.
    result = run(*MPIRUN, "2", sys.executable, "-c", program, timeout=1400)
    assert result.returncode == 0, tail(result)
    found = {}
    for line in result.stdout.splitlines():
        if line.startswith("FACTS "):
            found.update(json.loads(line.removeprefix("FACTS ")))
    return found


@pytest.mark.launch
@LONG
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_stopped_run_goes_on_to_the_bit(facts, name):
    fact = facts[name]
    assert fact["moved"]  # between the stop and the end, so that equal ends say something
    assert (fact["began at"], fact["steps"]) == ([SCENARIOS[name].stop] * 2, STEPS)
    # weights, optimizer, average, loss scale; on each rank reducer, random states and statistics
    assert fact["differ"] == [[], []]
    assert fact["same samples"]
    assert fact["equal epochs"]  # losses, accuracies and bytes, also of the one that it stopped in


@pytest.mark.launch
@LONG
def test_statistics_of_the_inputs_are_each_ranks_own_until_a_test_makes_them_their_mean(facts):
    between_tests, at_the_end = facts["sgd, hitopk then dense"]["statistics"]
    assert between_tests > 1e-3
    assert at_the_end == 0


@pytest.mark.parametrize(
    ("order", "end"), [(Order(10, 1, 2, seed=1), "step 3 of 5"), (Windows([100], 4, 2, seed=1), "others not")]
)
def test_a_resumption_with_other_batches_says_where_it_goes_on(order, end):
    phase = SimpleNamespace(global_batch=2, epoch_steps=5, data=SimpleNamespace(order=order))
    (line,) = _moved(Position(step=1), Position(step=2), phase)
    assert line.startswith(f"a step takes 2 {order.unit} now: ")
    assert line.endswith(end)


@pytest.mark.launch
@LONG
@pytest.mark.parametrize("size", [1, *more(3)])
@pytest.mark.usefixtures("facts")  # leaves the checkpoints of two ranks
def test_in_another_world_residuals_keep_their_sum_and_no_sample_is_read_twice(folder, size, capfd):
    program = f"from tests.training.resuming import in_another_world; in_another_world({str(folder)!r})"
    if size == 1:
        exec(program, {})
        said = capfd.readouterr().out
    else:
        result = python_on_ranks(size, program)
        assert result.returncode == 0, tail(result)
        said = result.stdout
    (line,) = [line for line in said.splitlines() if line.startswith("FACTS ")]
    fact = json.loads(line.removeprefix("FACTS "))
    assert fact["began at"] == 17
    assert fact["largest residual"] > 0
    # each entry is rounded once to float32
    assert fact["largest error"] <= fact["largest residual"] * np.finfo(np.float32).eps
    before, then = fact["read before"], fact["read then"]
    assert len(before) == len(set(before)) == 3 * 2 * 48  # 14 steps are an epoch: three of the second
    assert len(then) == len(set(then)) > 0
    assert not set(before) & set(then)
    assert fact["ended at"][1] == 2  # both phases
    assert f"2 ranks have become {size}: what they held back goes into the next step" in said
    assert f"a step takes {48 * size} samples now: 288 of the epoch are read" in said


RESUMABLE = ("checkpoints={every_steps: 2, every_epochs: null}",)
AVERAGED = ("average=0.5", "optimizer=adam", "phases.0.learning_rate=0.001")


def trainer(folder, *words):
    return small.trainer(folder, "model=vgg_tiny", *words, phases=(small.phase(steps=8, batch=200),))


def fit_until(step, folder, *words):
    """Train until before a step, with a checkpoint after every second one."""
    small.crash_after(trainer(folder, *RESUMABLE, *words), step)
    (path,) = Path(folder).iterdir()
    return path


def test_without_anything_to_go_on_with_a_run_begins_and_says_so(tmp_path, capsys):
    run = trainer(tmp_path, *RESUMABLE, "resume=auto")
    run.fit()
    assert "resume: no unfinished run of digits exists: this one is new" in capsys.readouterr().out
    assert run.position.steps == 8
    again = trainer(tmp_path, *RESUMABLE, "resume=auto")  # the first has ended
    again.fit()
    assert len(list(tmp_path.iterdir())) == 2
    assert "resumed" not in capsys.readouterr().out


def test_a_run_without_a_checkpoint_begins_anew_in_its_folder(tmp_path, capsys):
    path = fit_until(1, tmp_path)
    (path / "checkpoints").mkdir(exist_ok=True)
    trainer(tmp_path, *RESUMABLE, "resume=auto").fit()
    assert "resume: there is no checkpoint yet: the run begins again" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [path]
    assert (path / "summary.json").exists()


def rewrite(checkpoint, name, change):
    body = manifest_of(checkpoint)
    tree = read_tree(checkpoint / name, Written(**body["files"][name]))
    (checkpoint / name).unlink()
    body["files"][name] = asdict(write_tree(checkpoint / name, change(tree)))
    write_manifest(checkpoint, body)


def without(key):
    return lambda tree: {name: value for name, value in tree.items() if name != key}


def put(key, value):
    return lambda tree: tree | {key: value}


def deeper(key, change):
    return lambda tree: tree | {key: change(tree[key])}


def in_float64(weights):
    path = next(iter(weights))
    return weights | {path: weights[path].astype("f8")}


OWN_0 = OWN.format(0)
WRONG = {
    "no tree of names": (SHARED, lambda tree: [1, 2], "expected the state of a run, got"),
    "a position of text": (SHARED, deeper("position", put("step", "6")), "position.step: expected a valid"),
    "a summary of a list": (SHARED, put("summary", []), "expected the fields of a Summary, got []"),
    "weights of other numbers": (SHARED, deeper("weights", in_float64), "weights[0]: expected float32 of "),
    "no optimizer": (SHARED, without("optimizer"), "expected 'optimizer' in the state of a run, got none"),
    "no reducer": (OWN_0, without("reducer"), "expected 'reducer' in the state of a run, got none"),
    "random states too many": (OWN_0, put("random", [np.zeros(2)]), "random: expected 2 arrays, got 1"),
}


@pytest.fixture(scope="module")
def stopped_at_6(tmp_path_factory):
    """Return a folder with a run that was stopped after the checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("stopped")
    fit_until(6, folder, *AVERAGED)
    return folder


@pytest.fixture
def path(stopped_at_6, tmp_path):
    (path,) = shutil.copytree(stopped_at_6, tmp_path / "runs").iterdir()
    return path


@pytest.fixture(scope="module")
def resuming(tmp_path_factory):
    """Return a trainer that has not begun, and restores one checkpoint after the other."""
    return trainer(tmp_path_factory.mktemp("resuming"), *RESUMABLE, *AVERAGED)


def go_on(run, path):
    identity = json.loads((path / "run.json").read_text())["identity"]
    Checkpointer(run, path, run.config.checkpoints, identity).resume()
    return identity


@pytest.mark.parametrize("name", WRONG)
def test_a_valid_digest_around_wrong_contents_is_one_line_and_the_one_before_is_used(
    path, resuming, capsys, name
):
    file, change, expected = WRONG[name]
    checkpoint = path / "checkpoints" / "step-00000006"
    rewrite(checkpoint, file, change)
    go_on(resuming, path)
    (line,) = capsys.readouterr().err.splitlines()
    start = "cloudtrain: warning: the checkpoint of step 6 is left out: "
    assert line.startswith(f"{start}{checkpoint}"), line
    assert expected in line
    assert len(line) < 800
    at = resuming.position
    assert (at.steps, at.phase, at.run_epoch) == (4, 0, 0)


def test_a_run_that_fell_back_is_the_one_that_was_not_stopped(path, tmp_path, capsys):
    """What was taken over of the checkpoint that is left out has no effect."""
    whole = trainer(tmp_path / "whole", *AVERAGED)
    whole.fit()
    # the last that is read
    rewrite(path / "checkpoints" / "step-00000006", OWN_0, put("random", [np.zeros(2)]))
    resumed = trainer(tmp_path / "runs", *RESUMABLE, "resume=auto", *AVERAGED)
    resumed.fit()
    assert "resumed from step-00000004: step 4, phase 1, epoch 1" in capsys.readouterr().out
    assert resumed.position.steps == 8
    small.assert_same_weights(resumed, whole)
    expected, averages = (run.parts.model.average.averages for run in (whole, resumed))
    for one, other in zip(averages, expected, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    assert (averages[0].numpy() != resumed.model.trainable_variables[0].numpy()).any()
    expected, losses = (
        [epoch["loss"] for epoch in small.records_of(tmp_path / name, "epoch")] for name in ("whole", "runs")
    )
    assert losses == expected


def test_a_checkpoint_of_another_run_is_left_out_by_name(path, resuming, capsys):
    checkpoint = path / "checkpoints" / "step-00000006"
    write_manifest(checkpoint, manifest_of(checkpoint) | {"run": "another"})
    ours = go_on(resuming, path)
    expected = f"step-00000006/COMPLETE: expected run {ours}, got another\n"
    assert capsys.readouterr().err.endswith(expected)
    assert resuming.position.steps == 4


def test_a_run_none_of_whose_checkpoints_can_be_used_is_not_begun_anew(path, tmp_path, capsys):
    for file in path.glob("checkpoints/*/COMPLETE"):
        file.unlink()
    count = len(list(path.glob("checkpoints/step-*")))
    with pytest.raises(
        ValueError, match="resume: expected a checkpoint that can be used, got none"
    ) as caught:
        trainer(tmp_path / "runs", *RESUMABLE, "resume=auto").fit()
    assert f"among the {count} in {path / 'checkpoints'}; resume=never begins a new run" in str(caught.value)
    assert capsys.readouterr().err.count("cloudtrain: warning: a checkpoint is left out") == count


def test_an_epoch_with_too_few_samples_left_for_a_larger_batch_is_tested(tmp_path, capsys):
    words = ("checkpoints={every_steps: 20}", "log_every=1")
    small.crash_after(small.trainer(tmp_path, *words, phases=(small.phase(epochs=1),)), 21)
    run = small.trainer(tmp_path, *words, "resume=auto", phases=(small.phase(epochs=1, batch=200),))
    summary = run.fit()
    assert "1280 of the epoch are read, too few are left for a step" in capsys.readouterr().out
    (epoch,) = small.records_of(tmp_path, "epoch")
    assert (run.position.steps, epoch["steps"], epoch["tested"], summary.tested) == (20, 20, 360, 360)


def test_steps_between_checkpoints_are_counted_through_ends_of_epochs(tmp_path):
    words = ("checkpoints={every_steps: 7, every_epochs: null}", "evaluate_every=9")
    small.trainer(tmp_path, *words, phases=(small.phase(epochs=3, batch=200),)).fit()
    assert [line["steps"] for line in small.records_of(tmp_path, "checkpoint")] == [7, 14, 21]


def test_a_folder_is_gone_on_with_by_its_name(tmp_path, capsys):
    path = fit_until(5, tmp_path)
    newer = tmp_path / "digits-20990101-000000"
    shutil.copytree(path, newer)
    trainer(tmp_path, *RESUMABLE, f"resume={path}").fit()
    assert "resumed from step-00000004" in capsys.readouterr().out
    assert (path / "summary.json").exists()
    assert not (newer / "summary.json").exists()


def test_resuming_is_refused_from_a_folder_of_no_run_and_without_checkpoints(tmp_path):
    with pytest.raises(ValueError, match="resume: expected auto, never or the folder of a run, got"):
        trainer(tmp_path, *RESUMABLE, f"resume={tmp_path}").fit()
    with pytest.raises(ConfigurationError, match="resume: expected never where there are no checkpoints"):
        trainer(tmp_path, "resume=auto")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        # the first convolutions of both are alike but for the bias, which resnet8 has not
        (
            "model=resnet8",
            r"^the checkpoint is of another model: batch_normalization/gamma: .*\(16,\), got none$",
        ),
        ("optimizer=lamb", "optimizer: the checkpoint is not of lamb and this model: "),
    ],
)
def test_a_checkpoint_of_another_model_or_optimizer_is_refused_in_one_line(tmp_path, word, expected):
    fit_until(3, tmp_path)
    with pytest.raises(ValueError, match=expected):
        trainer(tmp_path, *RESUMABLE, "resume=auto", word).fit()


def test_what_another_reducer_held_back_is_not_lost(tmp_path, capsys):
    fit_until(3, tmp_path)
    run = trainer(tmp_path, *RESUMABLE, "resume=auto", "reducer=hitopk")
    run.fit()
    assert "what the reducer held back goes into the next step: " in capsys.readouterr().out
    assert run.position.steps == 8


def test_a_checkpoint_of_the_end_of_a_density_warm_up_is_taken_as_it_is(tmp_path):
    warmup = "phases.0.density_warmup={start: 0.25, epochs: 1}"
    words = ("reducer={name: hitopk, density: 0.05}", warmup, "checkpoints={every_epochs: 1}")
    fit_until(7, tmp_path, *words)
    run = trainer(tmp_path, *words, "resume=auto")
    run.fit()
    (resumed,) = small.records_of(tmp_path, "resume")
    assert (resumed["steps"], resumed["changes"]) == (7, [])
    assert run.parts.exchange.gradients.exchange.density == 0.05
