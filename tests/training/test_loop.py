"""What a run does with its phases, its tests and its target, and tells; and what keeps one from beginning."""

import json
from dataclasses import replace
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from commlib import Topology, transport
from commlib.errors import UseAfterClose
from datacache import Arrays
from tests.launching import DIGITS
from tests.training.refusal import refused
from tests.training.replicas import weights_of
from tests.training.small import ALONE, RATE, before_steps, metrics_of, phase, records_of, trainer
from tests.training.test_local_steps import noted
from tests.training.test_stages import Clock
from tests.training.test_summary import TASK
from tests.training.test_summary import epoch as epoch_result
from training.callbacks.files import DawnBench
from training.callbacks.stopping import TrainingDiverged
from training.config.config import Config, load
from training.results import Position, Slowest, StageMeans
from training.run import build, events
from training.run.data import Data
from training.run.events import live_line
from training.run.trainer import Trainer
from training.run_folder import RunFolder
from training.tasks.image_classification import ImageClassification

EPOCH_STEPS = 1437 // 64
GTOPK = "{name: gtopk, density: 0.01}"


def noted_paces(run):
    paces, optimizer = [], run.parts.optimizer.optimizer
    update = run.parts.optimizer._update

    def note(mean):
        paces.append((float(optimizer.learning_rate.numpy()), float(optimizer.momentum.numpy())))
        update(mean)

    run.parts.optimizer._update = note
    return paces


def test_every_step_is_taken_at_the_rate_and_momentum_of_its_phase(tmp_path):
    first = phase(
        steps=6,
        rate="learning_rate: {start: 0.4, end: 0.1, per_batch: 32, warmup: {start: 0.0, steps: 2}}",
        momentum="{start: 0.9, end: 0.4}",
    )
    second = phase(steps=3, rate="learning_rate: {schedule: step, start: 0.3, factor: 0.5, at_steps: [2]}")
    run = trainer(tmp_path, "optimizer={name: sgd, momentum: 0.7}", "log_every=1", phases=(first, second))
    paces = noted_paces(run)
    run.fit()
    rates = [0.0, 0.4, 0.8, 0.6, 0.4, 0.2, 0.3, 0.3, 0.15]  # 64 samples a step: twice what is given
    momenta = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.7, 0.7, 0.7]
    np.testing.assert_allclose(paces, np.transpose([rates, momenta]), rtol=1e-6)
    steps = records_of(tmp_path, "step")
    assert [line["learning_rate"] for line in steps] == pytest.approx(rates)
    assert [line["momentum"] for line in steps] == pytest.approx(momenta)
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6, 1, 2, 3]  # of their phase


def test_a_phase_may_have_momentum_where_the_optimizer_has_none(tmp_path):
    phases = (phase(steps=2, momentum=0.8), phase(steps=2))
    run = trainer(tmp_path, "optimizer={name: sgd, momentum: 0}", phases=phases)
    paces = noted_paces(run)
    run.fit()
    assert [momentum for _, momentum in paces] == pytest.approx([0.8, 0.8, 0, 0])


def test_densities_begin_high_and_are_the_phases_own_in_the_end(tmp_path):
    warmup = phase(epochs=3, batch=400, reducer=GTOPK, density_warmup="{start: 0.25, epochs: 2}")
    cut = phase(epochs=1, batch=400, reducer=GTOPK, density_warmup="{start: 0.25, epochs: 1}")
    again = phase(epochs=1, batch=400, reducer=GTOPK)
    run = trainer(tmp_path, phases=(warmup, cut, again))
    densities = []
    before_steps(run, lambda *_: densities.append(run.parts.exchange.gradients.exchange.density))
    run.fit()
    assert densities[::3] == pytest.approx([0.25, 0.05, 0.01, 0.25, 0.01])


def test_phases_in_steps_end_in_the_middle_of_an_epoch_and_the_next_begins_another(tmp_path):
    phases = (phase(steps=EPOCH_STEPS + 3), phase(steps=2, size=6), phase(epochs=1))
    run = trainer(tmp_path, phases=phases)
    read = []

    def note(backward, batch, hyperparameters):
        read.append((run.position.run_epoch, batch.images.shape[1], batch.ids.tolist()))

    before_steps(run, note)
    run.fit()
    lengths = [EPOCH_STEPS, 3, 2, EPOCH_STEPS]
    assert [epoch for epoch, _, _ in read] == [
        epoch for epoch, steps in enumerate(lengths) for _ in range(steps)
    ]
    assert {(epoch, size) for epoch, size, _ in read} == {(0, 4), (1, 4), (2, 6), (3, 4)}
    orders = [[ids for each, _, ids in read if each == epoch][0] for epoch in range(4)]
    assert len({tuple(ids) for ids in orders}) == 4  # each epoch has an order of its own
    epochs = records_of(tmp_path, "epoch")
    assert [line["steps"] for line in epochs] == lengths
    assert (run.position.steps, run.position.phase) == (sum(lengths), 3)


def test_epochs_are_tested_now_and_then_and_at_the_end_of_each_phase(tmp_path, capsys):
    phases = (phase(epochs=3, batch=400), phase(epochs=2, batch=400))
    run = trainer(tmp_path, "evaluate_every=2", phases=phases)
    summary = run.fit()
    epochs = records_of(tmp_path, "epoch")
    assert [line["top1"] is not None for line in epochs] == [False, True, True, True, True]
    assert [line["tested"] for line in epochs] == [0, 360, 360, 360, 360]
    assert summary.metrics == {name: epochs[-1][name] for name in ("top1", "top5")}
    assert capsys.readouterr().out.count("not tested") == 1


def test_the_lines_of_a_run_tell_what_happened(tmp_path):
    phases = (phase(steps=12, reducer="hitopk"), phase(steps=3))
    run = trainer(tmp_path, "checkpoints={every_steps: 5}", phases=phases)
    summary = run.fit()
    lines = metrics_of(tmp_path)
    assert [line["kind"] for line in lines if line["kind"] != "checkpoint"] == [
        *("run", "prepare", "step", "epoch", "stall", "epoch", "cache", "summary")
    ]
    by_kind = {line["kind"]: line for line in lines}
    checkpoints = records_of(tmp_path, "checkpoint")
    assert [line["steps"] for line in checkpoints] == [5, 10, 12, 15]
    for line in checkpoints:  # written in the background
        assert line["copy_seconds"] > 0
    stall = by_kind["stall"]["stall_seconds"]
    assert by_kind["stall"]["phase"] == 1
    assert [each.stall_seconds for each in summary.phases] == [None, stall]
    assert stall >= 0
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "summary.json").read_text())["tested"] == 360


def test_a_run_closes_the_communicator_that_it_has_made(tmp_path):
    run = trainer(tmp_path, phases=(phase(steps=1),))
    run.fit()
    with pytest.raises(UseAfterClose):
        run.topology.world.allgather_objects(None)


def test_a_boundary_that_takes_long_is_measured_as_long(tmp_path):
    run = trainer(tmp_path, phases=(phase(steps=3), phase(steps=3)))
    clock = Clock()
    run.topology.world.now = clock
    run.parts.step.begin = clock.taking(5, run.parts.step.begin)
    run.parts.step.take = clock.taking(1, run.parts.step.take)
    assert run.fit().phases[1].stall_seconds == 5  # from which a step is subtracted


def test_the_average_of_the_weights_is_tested_and_saved(tmp_path):
    run = trainer(tmp_path, "average=0.99")
    variables = run.parts.model.variables
    before = [variable.numpy() for variable in variables]
    _, tested = noted(run)
    run.fit()
    averages = run.parts.model.average.averages
    assert tested == [weights_of(averages).tobytes()]
    for variable, average, first in zip(variables, averages, before, strict=True):
        distance = np.abs(average.numpy() - variable.numpy()).max()
        assert distance > 10 * np.abs(average.numpy() - first).max() > 0  # it has hardly moved yet
    averaged = [average.numpy() for average in averages]
    (folder,) = tmp_path.iterdir()
    run.model.load_weights(folder / "model.weights.h5")
    for variable, average in zip(variables, averaged, strict=True):
        np.testing.assert_array_equal(variable.numpy(), average)


def test_steps_that_are_not_finite_are_counted_and_too_many_end_the_run(tmp_path):
    run = trainer(tmp_path, phases=(phase(epochs=2),))
    submit_inputs = run.parts.exchange.gradients.submit_inputs

    def spoiled(inputs):
        submit_inputs([each * np.float32(np.nan) for each in inputs] if run.position.steps != 1 else inputs)

    run.parts.exchange.gradients.submit_inputs = spoiled
    before = [variable.numpy() for variable in run.parts.model.variables]
    said = "20 steps in a row had a NaN or an infinity .* the learning rate is 0.1: try a smaller one"
    with pytest.raises(TrainingDiverged, match=said):
        run.fit()
    assert run.position.steps == 22  # the first one was not in that row
    assert run.summary.phases[0].skipped_steps == 21
    for variable, value in zip(run.parts.model.variables, before, strict=True):
        assert np.isfinite(variable.numpy()).all()
        assert (variable.numpy() != value).any()


TARGET = "target={metric: top5, at_least: 0.6}"
ENTRY = "dawnbench={author: Somebody, author_email: a@b.c, code_url: 'https://x', cost_per_hour: 1.5}"


def test_a_target_ends_the_run_and_is_told_as_dawnbench_wants_it(tmp_path, capsys):
    rate = "learning_rate: {start: 0.5, end: 0.5}"
    run = trainer(tmp_path, TARGET, ENTRY, phases=(phase(epochs=50, rate=rate), phase(epochs=2)))
    summary = run.fit()
    assert summary.reached
    assert summary.best == summary.metrics["top5"] >= 0.6
    assert run.position.phase == 0
    assert "reaches the target of 60.00% after" in capsys.readouterr().out
    epochs = records_of(tmp_path, "epoch")
    assert len(epochs) < 50
    assert all(line["top5"] < 0.6 for line in epochs[:-1])

    (folder,) = tmp_path.iterdir()
    header, *lines = [line.split("\t") for line in (folder / "dawnbench.tsv").read_text().splitlines()]
    assert header == ["epoch", "hours", "top1Accuracy", "top5Accuracy"]
    assert [int(line[0]) for line in lines] == [line["epoch"] + 1 for line in epochs]
    found = np.array([[float(value) for value in line[1:]] for line in lines])
    expected = [(line["run_seconds"] / 3600, 100 * line["top1"], 100 * line["top5"]) for line in epochs]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert (np.diff(found[:, 0]) > 0).all()

    about = json.loads((folder / "dawnbench.json").read_text())
    assert (about["author"], about["authorEmail"], about["codeURL"]) == ("Somebody", "a@b.c", "https://x")
    assert (about["costPerHour"], about["model"]) == (1.5, "tests.training.small:linear")
    assert about["hardware"].startswith("1 rank on ")
    assert about["misc"]["config"]["target"] == {"metric": "top5", "at_least": 0.6}


def test_an_epoch_that_is_trained_again_has_one_line(tmp_path):
    config = trainer(tmp_path, TARGET).config
    result = epoch_result(epoch=0, metrics={"top1": 0.25, "top5": 0.75}, tested=4, run_seconds=36.0)
    ranks = SimpleNamespace(hardware="this")
    run = SimpleNamespace(folder=RunFolder(config), config=config, task=ImageClassification, ranks=ranks)
    before, resumed = DawnBench(), DawnBench()
    before.on_run_begin(run)
    for number in (0, 1, 2):
        before.on_epoch_end(run, replace(result, epoch=number))
    resumed.on_run_begin(run)
    resumed.on_epoch_end(run, replace(result, epoch=1, metrics={"top1": 0.5, "top5": 0.75}))
    resumed.on_epoch_end(run, replace(result, epoch=2, metrics={}, tested=0))  # was not tested
    assert (run.folder.path / "dawnbench.tsv").read_text().splitlines()[1:] == [
        "1\t0.01\t25\t75",
        "2\t0.01\t50\t75",
    ]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rate": f"{RATE[:-1]}, warmup: {{start: 0, steps: 4}}}}"}, "learning_rate.warmup.steps: expected"),
        ({"batch": 1438}, "batch_size: expected at most the 1437 training samples"),
        ({"reducer": "gtopk", "density_warmup": "{start: 0.25, epochs: 3}"}, "density_warmup.epochs: exp"),
    ],
)
def test_what_does_not_fit_a_phase_is_one_line_with_its_key(tmp_path, keys, message):
    with refused(f"phases[1].{message}"):
        trainer(tmp_path, phases=(phase(steps=4), phase(steps=4, **keys)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("test", "message"),
    [
        (Arrays(np.zeros((0, 8, 8, 1), np.uint8), np.zeros(0, np.int64)), "test samples"),
        (
            Arrays(np.zeros((3, 8, 8, 1), np.uint8), np.array([0, 10, 1])),
            "labels: expected 0 … 9 (10 classes), got 10 for sample 1",
        ),
    ],
    ids=["empty", "label"],
)
def test_samples_to_test_on_that_are_none_or_of_no_class_are_refused(tmp_path, test, message):
    run = trainer(tmp_path)
    dataset = replace(run.parts.data.dataset, test=test)
    with refused(message):
        Data(run.config, run.topology, dataset)


def test_a_configuration_that_was_not_read_from_a_file_is_completed(tmp_path):
    whole = trainer(tmp_path, phases=(phase(steps=2, reducer="gtopk"),)).config
    plain = whole.model_dump(exclude_none=True)
    del plain["phases"][0]["reducer"]
    keras.utils.clear_session()
    config = Config.model_validate({**plain, "reducer": {"name": "gtopk", "density": 0.5}})
    run = Trainer(config, topology=Topology(transport.mpi.world()))
    assert (run.config.phases[0].reducer.name, run.config.phases[0].reducer.density) == ("gtopk", 0.5)
    run.fit()


def test_a_switch_tells_what_is_held_back_in_a_line_and_a_record_that_json_can_hold():
    event = events.switched("hitopk", "dense", 0.12345)
    line = "switch from hitopk to dense: the residual (norm 0.123 on rank 0) goes into the next step"
    assert list(event.lines()) == [line]
    assert json.loads(json.dumps(event.record(), allow_nan=False)) == event.record()


def test_the_record_of_an_epoch_is_flat_and_its_line_counts_the_epochs_of_all_phases():
    this = SimpleNamespace(steps=40, epoch_steps=20, epochs=2, result=SimpleNamespace(reducer="hitopk"))
    result = epoch_result(stages=StageMeans({"select": 0.5}, 0.25, 0.75, Slowest(3, 0.125)))
    ended = events.epoch_ended(result, TASK, [this], Position(phase_steps=20))
    record = ended.record()
    assert (record["top1"], record["images_per_second"]) == (0.9, 1234.5)
    assert not {"stages", "metrics", "throughput"} & set(record)
    assert (record["stage_seconds"], record["slowest"]) == ({"select": 0.5}, {"rank": 3, "excess": 0.125})
    assert (record["hidden_seconds"], record["hidden_share"]) == (0.25, 0.75)
    # two epochs have ended before the third, whose phase has another
    assert [line[:12] for line in ended.lines()] == ["epoch  3/4  "]


def test_the_live_line_tells_the_time_that_is_left_of_the_phase():
    line = "epoch 5  step 23/40 of hitopk at 6 px  loss 0.250 (rank 0)"
    phases = [SimpleNamespace(steps=40, result=SimpleNamespace(reducer="hitopk", input="6 px"))] * 2
    at = Position(phase=1, epoch=2, step=3, phase_steps=23, steps=43, samples=192, run_epoch=4)
    assert live_line(phases, at, 0.25, None) == line
    times = "  hidden 83%  slowest rank 3 (+12%)"
    timed = live_line(phases, at, 0.25, 3725.4, times)
    assert timed == f"{line}{times}  1:02:05 left of phase 2/2"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (10, "the second moment is frozen after 10 of the 10 steps of phase 1"),
        (11, "the second moment is frozen after 1 of the 2,000 steps of phase 2"),
        (2011, "optimizer.freeze_variance=2011 has no effect: the run has 2010 steps"),
    ],
)
def test_a_run_tells_when_the_variance_is_frozen(given, line):
    config = load(DIGITS, [*ALONE, "optimizer=adam", f"optimizer.freeze_variance={given}"])
    assert build.how_the_variance_is_frozen(config, [10, 2000]) == [line]
    assert build.how_the_variance_is_frozen(load(DIGITS, list(ALONE)), [10]) == []
