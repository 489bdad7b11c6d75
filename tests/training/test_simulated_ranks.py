"""Training on simulated ranks is training with the gradients and the reducers of so many ranks."""

import json

import keras
import pytest

from tests.launching import DIGITS, run, tail
from tests.training import small
from tests.training.small import ALONE, phase, trainer
from training import Trainer
from training.bench import simulated_ranks
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
    summary, seen = simulated_ranks.train(config(tmp_path / "ranks"), [2, 2])
    alone = trainer(tmp_path / "alone", "accumulate=4", phases=(phase(steps=STEPS),)).fit()
    assert summary.metrics == alone.metrics
    ours, others = last_epoch(tmp_path / "ranks"), last_epoch(tmp_path / "alone")
    assert ours["loss"] == pytest.approx(others["loss"], rel=1e-6)
    assert seen == []  # dense reducers select nothing


def test_each_rank_carries_the_state_of_its_own_streams(tmp_path):
    (tmp_path / "lstm.yaml").write_text(LSTM)
    made = load(tmp_path / "lstm.yaml", [f"output={tmp_path}/ranks"])
    simulated_ranks.train(made, [1, 1])
    keras.utils.clear_session()
    Trainer(load(tmp_path / "lstm.yaml", [f"output={tmp_path}/alone"])).fit()
    ours, others = last_epoch(tmp_path / "ranks"), last_epoch(tmp_path / "alone")
    for metric in ("loss", "perplexity"):
        assert ours[metric] == pytest.approx(others[metric], rel=1e-5)


def test_a_batch_that_ranks_cannot_share_is_refused(tmp_path):
    refused = r"accumulate: expected a divisor of phases\[0\]\.batch_size = 66, got 4"
    with pytest.raises(ValueError, match=refused):
        simulated_ranks.train(config(tmp_path, batch=66), [2, 2])


def test_where_all_is_selected_nothing_is_held_back_and_all_ranks_select_the_same(tmp_path):
    _, seen = simulated_ranks.train(
        config(tmp_path, reducer="{name: allgather, density: 1.0}", batch=66), [1, 2], look_every=5
    )
    assert [each.step for each in seen] == [0, 5, 10]
    for each in seen:
        assert each.target == each.selected == each.applied
        assert (each.residual, each.fill_in, each.overlap) == (0.0, 1.0, 1.0)
        assert each.xi == pytest.approx(0.0, abs=1e-6)


def test_a_reducer_selects_its_share_and_holds_back_the_rest(tmp_path):
    _, seen = simulated_ranks.train(
        config(tmp_path, reducer="{name: allgather, density: 0.1}", batch=66), [3], look_every=1
    )
    assert len(seen) == STEPS
    for each in seen:
        assert each.target == each.selected
        assert each.target <= each.applied <= 3 * each.target
        assert 1.0 <= each.fill_in <= 3.0
        # of three ranks' selections each entry is counted once, twice or three times
        assert each.overlap == pytest.approx((3 - each.fill_in) / 2, abs=0.5)
        assert each.residual > 0


def test_phases_switch_reducers_and_densities_of_all_ranks(tmp_path):
    warming = "{start: 0.5, epochs: 1}"
    sparse = phase(epochs=2, reducer="{name: oktopk, density: 0.1}", density_warmup=warming, batch=256)
    dense = phase(steps=3, reducer="dense", batch=256)
    words = [f"phases=[{sparse}, {dense}]", f"output={tmp_path}"]
    _, seen = simulated_ranks.train(load(DIGITS, [*ALONE, "model=linear", *words]), [2], look_every=1)
    assert len({each.target for each in seen}) == 2
    assert [each.target for each in seen] == sorted((each.target for each in seen), reverse=True)


@pytest.mark.launch
@pytest.mark.slow
def test_two_simulated_ranks_train_as_two_real_ones(tmp_path):
    reducer = "{name: oktopk, density: 0.1}"
    model = "model=tests.training.small:linear"
    made = config(tmp_path / "simulated", model, reducer=reducer, batch=32)
    simulated_ranks.train(made, [2])
    real = config(tmp_path / "real", model, reducer=reducer, batch=16)
    (tmp_path / "real.yaml").write_text(real.to_yaml())
    result = run("cloudtrain", "launch", "-np", "2", str(tmp_path / "real.yaml"))
    assert result.returncode == 0, tail(result)
    ours, theirs = last_epoch(tmp_path / "simulated"), last_epoch(tmp_path / "real")
    assert ours["top1"] == theirs["top1"]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)  # means in another order
