"""Training on simulated ranks is training with the gradients and the reducers of so many ranks."""

import json

import keras
import numpy as np
import pytest

from benchmarks import simulated_ranks
from tests import extent
from tests.launching import DIGITS, run, tail
from tests.training import small
from tests.training.small import ALONE, phase, trainer
from training import Trainer
from training.config.config import load
from training.models import MODELS

STEPS = 12
LSTM = """
name: lstm
task: {name: language_model, streams: true}
dataset: {name: synthetic_text, tokens: 25, samples: 60, test_samples: 20, words: 8}
model: {name: lstm_lm_small, units: 8, layers: 1}
optimizer: {name: sgd, momentum: 0.0}
reducer: dense
phases:
  - {epochs: 2, sequence_length: 6, batch_size: 4, learning_rate: 1.0}
"""


@pytest.fixture(autouse=True)
def linear(monkeypatch):
    monkeypatch.setitem(MODELS, "linear", small.linear)


def config(folder, *words, reducer="{name: dense}", **others):
    given = [f"phases=[{phase(steps=STEPS, reducer=reducer, **others)}]", f"output={folder}", *words]
    return load(DIGITS, [*ALONE, "model=linear", *given])


def last_epoch(folder):
    (path,) = folder.glob("*/metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["kind"] == "epoch"][-1]


def test_dense_ranks_train_as_one_rank_that_adds_up_as_many_parts(tmp_path):
    trained = simulated_ranks.train(config(tmp_path / "ranks"), [2, 2])
    alone = trainer(tmp_path / "alone", "accumulate=4", phases=(phase(steps=STEPS),)).fit()
    assert trained.summary.metrics == alone.metrics
    ours, others = last_epoch(tmp_path / "ranks"), last_epoch(tmp_path / "alone")
    assert ours["loss"] == pytest.approx(others["loss"], rel=1e-6)


def test_each_rank_carries_the_state_of_its_own_streams(tmp_path):
    (tmp_path / "lstm.yaml").write_text(LSTM)
    made = load(tmp_path / "lstm.yaml", [f"output={tmp_path}/ranks"])
    simulated_ranks.train(made, [1, 1])
    keras.utils.clear_session()
    Trainer(load(tmp_path / "lstm.yaml", [f"output={tmp_path}/alone"])).fit()
    ours, others = last_epoch(tmp_path / "ranks"), last_epoch(tmp_path / "alone")
    for metric in ("loss", "perplexity"):
        assert ours[metric] == pytest.approx(others[metric], rel=1e-5)


def test_phases_switch_reducers_and_densities_of_all_ranks(tmp_path):
    warming = "{start: 0.5, epochs: 1}"
    sparse = phase(epochs=2, reducer="{name: allgather, density: 0.1}", density_warmup=warming, batch=256)
    dense = phase(steps=3, reducer="dense", batch=256)
    words = [f"phases=[{sparse}, {dense}]", f"output={tmp_path}"]
    trained = simulated_ranks.train(load(DIGITS, [*ALONE, "model=linear", *words]), [2])
    of_epoch, size = 1437 // 256, trained.weights
    expected = of_epoch * (round(0.5 * size) + round(0.1 * size)) + 3 * size
    assert [each.selected for each in trained.totals] == [expected] * 2


def softmax_gradient(weights, bias, images, labels):
    """The gradient of the mean cross-entropy of a linear model, in float64."""
    scores = images @ weights + bias
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    shares[np.arange(len(labels)), labels] -= 1
    return images.T @ shares / len(labels), shares.mean(axis=0)


@pytest.fixture
def watched(monkeypatch):
    """The batches of the ranks of each step, and the variables of the model with their first values."""
    batches, models, parts_of = [], [], simulated_ranks.parts_of

    def taken(batch, parts):
        batches.append(parts_of(batch, parts))
        return batches[-1]

    class Watched(simulated_ranks.RanksStep):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            values = [variable.numpy().astype(np.float64) for variable in self.model.variables]
            models.append((self.model, values))

    monkeypatch.setattr(simulated_ranks, "parts_of", taken)
    monkeypatch.setattr(simulated_ranks, "RanksStep", Watched)
    return batches, models


def test_each_round_begins_with_the_mean_of_what_the_ranks_came_to(tmp_path, watched):
    batches, models = watched
    plain = "optimizer={name: sgd, momentum: 0.0}"
    made = config(tmp_path, plain, batch=66, local_steps=5)  # rounds of 5, 5 and 2
    trained = simulated_ranks.train(made, [1, 1, 1])
    ((model, common),) = models
    features = keras.Model(model.keras.input, model.keras.get_layer("logits").input)
    for first in range(0, STEPS, 5):
        came_to = []
        for rank in range(3):
            own = common
            for parts in batches[first : first + 5]:
                images, labels = parts[rank]
                gradients = softmax_gradient(*own, features(images).numpy().astype(np.float64), labels)
                own = [each - 0.1 * gradient for each, gradient in zip(own, gradients, strict=True)]
            came_to.append(own)
        common = [np.mean(each, axis=0) for each in zip(*came_to, strict=True)]
    for variable, expected in zip(model.variables, common, strict=True):
        np.testing.assert_allclose(variable.numpy(), expected, rtol=0, atol=1e-6)  # 12 steps in float32
    assert [rank.exchanges for rank in trained.totals] == [3, 3, 3]


def test_ranks_have_optimizers_of_their_own_and_an_outer_one(tmp_path):
    """One rank: its rounds at an outer rate of 1 are steps, and at another rate they are not."""
    adam = "optimizer={name: adam}"
    losses = {}
    for name, keys in {"none": {}, "one": {"outer": "{rate: 1.0}"}, "half": {"outer": "{rate: 0.5}"}}.items():
        more = {"local_steps": 4, **keys} if keys else {}
        simulated_ranks.train(config(tmp_path / name, adam, batch=66, **more), [1])
        losses[name] = last_epoch(tmp_path / name)["loss"]
    assert losses["one"] == pytest.approx(losses["none"], rel=1e-6)
    assert losses["half"] > losses["none"] * 1.001


def weights_after(folder, models, phases, *words):
    made = load(DIGITS, [*ALONE, "model=linear", f"phases=[{', '.join(phases)}]", f"output={folder}", *words])
    simulated_ranks.train(made, [1, 1, 1])
    model, _ = models[-1]
    return np.concatenate([variable.numpy().ravel() for variable in model.variables])


def test_with_a_frozen_variance_a_mean_of_the_ranks_own_steps_is_a_step_along_the_mean(tmp_path, watched):
    """A step is linear then; with a variance of each rank it is not, and the mean is another."""
    _, models = watched
    dense, own = phase(steps=4, batch=66), phase(steps=8, batch=66, local_steps=1)
    frozen = "optimizer={name: adam, freeze_variance: 4}"
    together = weights_after(tmp_path / "1", models, [dense, phase(steps=8, batch=66)], frozen)
    apart = weights_after(tmp_path / "2", models, [dense, own], frozen)
    np.testing.assert_allclose(apart, together, rtol=0, atol=1e-6)  # 8 differences of weights in float32
    adam = "optimizer={name: adam}"
    together = weights_after(tmp_path / "3", models, [dense, phase(steps=8, batch=66)], adam)
    assert np.abs(weights_after(tmp_path / "4", models, [dense, own], adam) - together).max() > 1e-4


def test_what_ranks_hold_back_of_gradients_is_applied_before_their_first_differences(tmp_path, monkeypatch):
    seen, settle = [], simulated_ranks.RanksStep.settle

    def watched(self, pace):
        residuals = [np.copy(gradients.exchange.residual) for gradients in self.ranks.gradients]
        before = np.concatenate([variable.numpy().ravel() for variable in self.model.variables])
        sent = settle(self, pace).sent
        after = np.concatenate([variable.numpy().ravel() for variable in self.model.variables])
        seen.append((np.mean(residuals, axis=0, dtype=np.float64), before - after, sent.inter))
        assert not any(gradients.exchange.residual.any() for gradients in self.ranks.gradients)
        return settle(self, pace)  # there is nothing left to apply

    monkeypatch.setattr(simulated_ranks.RanksStep, "settle", watched)
    sparse = phase(steps=4, batch=66, reducer="{name: allgather, density: 0.1}")
    local = phase(steps=2, batch=66, local_steps=1, reducer="{name: allgather, density: 0.1}")
    words = [f"phases=[{sparse}, {local}]", "optimizer={name: sgd, momentum: 0.0}", f"output={tmp_path}"]
    simulated_ranks.train(load(DIGITS, [*ALONE, "model=linear", *words]), [1, 1, 1])
    ((held_back, moved, sent),) = seen
    assert held_back.any()
    assert sent > 0
    np.testing.assert_allclose(moved, 0.1 * held_back, rtol=0, atol=1e-7)  # float32


def test_a_round_with_bad_numbers_on_one_rank_is_skipped_by_all(tmp_path, watched, monkeypatch):
    _, models = watched
    submit, found = simulated_ranks.LocalSteps.submit, []

    def spoiled(self, bucket, gradient):
        found.append(self)
        submit(self, bucket, gradient * (np.nan if len(found) == 2 else 1))  # of rank 1 in the first step

    monkeypatch.setattr(simulated_ranks.LocalSteps, "submit", spoiled)
    made = config(tmp_path, batch=64, local_steps=STEPS)
    trained = simulated_ranks.train(made, [1, 1])
    ((model, first),) = models
    for variable, expected in zip(model.variables, first, strict=True):
        np.testing.assert_array_equal(variable.numpy(), expected)
    assert sum(phase.skipped_steps for phase in trained.summary.phases) == STEPS


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{"local_steps": 5, "local": "rank", "outer": "{rate: 0.7, momentum: 0.5}"}, *extent.more({})]
)
def test_two_simulated_ranks_train_as_two_real_ones(tmp_path, more):
    reducer = "{name: oktopk, density: 0.1}"
    model = "model=tests.training.small:linear"
    made = config(tmp_path / "simulated", model, reducer=reducer, batch=32, **more)
    simulated_ranks.train(made, [2])
    real = config(tmp_path / "real", model, reducer=reducer, batch=16, **more)
    (tmp_path / "real.yaml").write_text(real.to_yaml())
    result = run("cloudtrain", "launch", "-np", "2", str(tmp_path / "real.yaml"))
    assert result.returncode == 0, tail(result)
    ours, theirs = last_epoch(tmp_path / "simulated"), last_epoch(tmp_path / "real")
    assert ours["top1"] == theirs["top1"]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)  # means in another order
