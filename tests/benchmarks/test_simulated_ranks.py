"""Training on simulated ranks is training with the gradients and the reducers of so many ranks."""

import json

import pytest

from benchmarks import simulated_ranks
from tests import extent
from tests.launching import DIGITS, run, tail
from tests.training.small import ALONE, phase
from training.callbacks import Callback
from training.config.config import load

LINEAR = "model=tests.training.small:linear"
REDUCER = "{name: oktopk, density: 0.1}"


def config(folder, **others):
    phases = f"phases=[{phase(steps=12, reducer=REDUCER, **others)}]"
    return load(DIGITS, [*ALONE, LINEAR, phases, f"output={folder}"])


def last_epoch(folder):
    (path,) = folder.glob("*/metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["kind"] == "epoch"][-1]


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
    made = config(tmp_path / "simulated", batch=32, **more)
    simulated_ranks.train(made, [2])
    real = config(tmp_path / "real", batch=16, **more)
    (tmp_path / "real.yaml").write_text(real.to_yaml())
    result = run("cloudtrain", "launch", "-np", "2", str(tmp_path / "real.yaml"))
    assert result.returncode == 0, tail(result)
    ours, theirs = last_epoch(tmp_path / "simulated"), last_epoch(tmp_path / "real")
    assert ours["top1"] == theirs["top1"]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)  # means in another order


STREAMED = {"local_steps": 6, "local": "rank", "outer": "{rate: 0.7, fragments: 2, delay: 2}"}
EARLY = "target={metric: top1, at_least: 0.01}"
# After step 21, of 22 in an epoch, the second fragment leaves.
FAILS = "callbacks=[{name: 'tests.benchmarks.test_simulated_ranks:FailsAfter', step: 22}]"


class FailsAfter(Callback):
    """Raises on the last rank, after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, run, step) -> None:
        if run.position.steps == self._step and run.rank == run.size - 1:
            raise RuntimeError("no more")


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.parametrize("word", [EARLY, FAILS], ids=["target", "error"])
def test_a_run_may_end_or_fail_while_a_fragment_is_under_way(tmp_path, word):
    phases = f"phases=[{phase(epochs=2, batch=32, **STREAMED)}]"
    made = load(DIGITS, [*ALONE, LINEAR, phases, f"output={tmp_path}", word])
    (tmp_path / "real.yaml").write_text(made.to_yaml())
    result = run("cloudtrain", "launch", "-np", "2", str(tmp_path / "real.yaml"))
    assert (result.returncode == 0) == (word == EARLY), tail(result)
    assert ("no more" in result.stderr) == (word == FAILS), tail(result)
