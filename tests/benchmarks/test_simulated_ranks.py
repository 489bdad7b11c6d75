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
from training.config.config import load
from training.models import MODELS

STEPS = 12


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
