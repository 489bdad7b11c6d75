"""Training on simulated ranks is training with the gradients and the reducers of so many ranks."""

import json

import pytest

from benchmarks import simulated_ranks
from tests import extent
from tests.launching import DIGITS, run, tail
from tests.training import small
from tests.training.refusal import refused
from tests.training.small import ALONE, phase, trainer
from training.callbacks import Callback
from training.config.config import ConfigurationError, load
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


@pytest.mark.parametrize(
    ("key", "words", "phase"),
    [
        ("phases[0].round_seconds", [], {"local_steps": 4, "round_seconds": 2}),
        ("checkpoints", ["checkpoints.every_steps=4"], {}),
    ],
)
def test_what_is_not_simulated_is_refused(tmp_path, key, words, phase):
    with refused(f"{key}: expected none on simulated ranks", ConfigurationError):
        simulated_ranks.train(config(tmp_path, *words, **phase), [1, 1])


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"local_steps": 4, "local": "rank", "outer": "{rate: 0.7, momentum: 0.5, fragments: 2, delay: 1}"},
        *extent.more({}, {"local_steps": 5, "local": "rank", "outer": "{rate: 0.7, momentum: 0.5}"}),
    ],
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


STREAMED = {"local_steps": 6, "local": "rank", "outer": "{rate: 0.7, fragments: 2, delay: 2}"}
EPOCH_STEPS = 1437 // 64  # 22: the second fragment leaves after step 21
EARLY = "target={metric: top1, at_least: 0.01}"
FAILS = "callbacks=[{name: 'tests.benchmarks.test_simulated_ranks:FailsAfter', step: 22}]"


class FailsAfter(Callback):
    """Raises on the last rank, after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, run, step) -> None:
        if run.position.steps == self._step and run.rank == run.size - 1:
            raise RuntimeError("no more")


def streaming(folder, *words, batch=64):
    phases = f"phases=[{phase(epochs=2, batch=batch, **STREAMED)}]"
    return load(DIGITS, [*ALONE, "model=tests.training.small:linear", phases, f"output={folder}", *words])


def test_a_run_may_end_while_a_fragment_is_under_way(tmp_path):
    trained = simulated_ranks.train(streaming(tmp_path, EARLY), [1, 1])
    assert trained.summary.reached
    assert last_epoch(tmp_path)["steps"] == EPOCH_STEPS
    assert [each.exchanges for each in trained.totals] == [6, 6]  # arrived after the steps 5, 8, …, 20


def test_a_run_may_fail_while_a_fragment_is_under_way(tmp_path):
    with pytest.raises(RuntimeError, match="no more"):
        simulated_ranks.train(streaming(tmp_path, FAILS), [1, 1])


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.parametrize("word", [EARLY, FAILS], ids=["target", "error"])
def test_so_may_a_run_of_real_ranks(tmp_path, word):
    made = streaming(tmp_path, word, batch=32)
    (tmp_path / "real.yaml").write_text(made.to_yaml())
    result = run("cloudtrain", "launch", "-np", "2", str(tmp_path / "real.yaml"))
    assert (result.returncode == 0) == (word == EARLY), tail(result)
    assert ("no more" in result.stderr) == (word == FAILS), tail(result)
