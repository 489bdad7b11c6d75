"""Training on simulated ranks is training with the gradients and the reducers of so many ranks."""

import json
import sys

import pytest

from benchmarks import simulated_ranks
from tests import extent
from tests.launching import DIGITS, mpirun, tail
from tests.training.small import ALONE, phase
from training.callbacks import Callback
from training.config.config import load

REDUCER = "{name: oktopk, density: 0.1}"
CASES = [
    {"local_steps": 4, "local": "rank", "outer": "{rate: 0.7, momentum: 0.5, fragments: 2, delay: 1}"},
    *extent.more({}, {"local_steps": 5, "local": "rank", "outer": "{rate: 0.7, momentum: 0.5}"}),
]
STREAMED = {"local_steps": 6, "local": "rank", "outer": "{rate: 0.7, fragments: 2, delay: 2}"}
EARLY = "target={metric: top1, at_least: 0.01}"
# After step 21, of 22 in an epoch, the second fragment leaves.
FAILS = "callbacks=[{name: 'tests.benchmarks.test_simulated_ranks:FailsAfter', step: 22}]"
TRAINS_ALL = """
import sys
from training.process.tf_logging import import_tensorflow
import_tensorflow()
import keras
from training.config.config import load
from training.run.trainer import Trainer

for path in sys.argv[1:]:
    keras.utils.clear_session()
    Trainer(load(path)).fit()
"""


class FailsAfter(Callback):
    """Raises on the last rank, after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, run, step) -> None:
        if run.position.steps == self._step and run.rank == run.size - 1:
            raise RuntimeError("no more")


def config(folder, *words, **others):
    given = ["model=tests.training.small:linear", f"phases=[{phase(**others)}]", f"output={folder}"]
    return load(DIGITS, [*ALONE, *given, *words])


def last_epoch(folder):
    (path,) = folder.glob("*/metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["kind"] == "epoch"][-1]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Return the folder of runs of two real ranks, in turn, of which the last fails; and the job."""
    folder = tmp_path_factory.mktemp("real")
    configs = {
        str(number): config(folder / str(number), steps=12, reducer=REDUCER, batch=16, **case)
        for number, case in enumerate(CASES)
    }
    for name, word in (("early", EARLY), ("fails", FAILS)):
        configs[name] = config(folder / name, word, epochs=2, batch=32, **STREAMED)
    for name, each in configs.items():
        (folder / f"{name}.yaml").write_text(each.to_yaml())
    return folder, mpirun(2, sys.executable, "-c", TRAINS_ALL, *(f"{folder}/{name}.yaml" for name in configs))


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)))
def test_two_simulated_ranks_train_as_two_real_ones(real, tmp_path, number):
    simulated_ranks.train(config(tmp_path, steps=12, reducer=REDUCER, batch=32, **CASES[number]), [2])
    folder, job = real
    assert (folder / str(number)).exists(), tail(job)
    ours, theirs = last_epoch(tmp_path), last_epoch(folder / str(number))
    assert ours["top1"] == theirs["top1"]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)  # means in another order


@pytest.mark.launch
@pytest.mark.slow
def test_a_run_may_end_or_fail_while_a_fragment_is_under_way(real):
    folder, job = real
    assert len(list(folder.glob("early/*/summary.json"))) == 1, tail(job)
    assert list(folder.glob("fails/*/summary.json")) == []
    assert job.returncode == 1, tail(job)
    assert "no more" in job.stderr
