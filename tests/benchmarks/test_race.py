"""The race: Horovod's own path trains as dense does, and a quick race on a cluster ends."""

import json

import pytest

from benchmarks.race_plan import RACED
from tests.launching import ROOT, python_on_ranks, run, tail
from tests.test_cluster import commands, skip_where_no_cluster_can_be_made

# ------------------------------------------------------------- Horovod's own path

HOROVOD_AND_DENSE = """
import sys
from pathlib import Path
import numpy as np
from training.process.tf_logging import import_tensorflow
import_tensorflow()
import keras
import horovod.tensorflow as hvd
hvd.init()
from benchmarks.horovod_exchange import build_horovod
from training.config.config import Config
from training.run.build import build
from training.run.trainer import Trainer

phase = {"steps": 3, "input_size": 8, "batch_size": 16, "learning_rate": 0.1}
found = []
for parts in (build, build_horovod):
    keras.utils.clear_session()
    given = {"name": "x", "dataset": "digits", "model": "vgg_tiny", "output": sys.argv[1]}
    given["phases"] = [phase] * 2
    trainer = Trainer(Config.model_validate(given).resolved(), build=parts)
    before = np.concatenate([each.numpy().ravel() for each in trainer.parts.model.variables])
    trainer.fit()
    found.append(np.concatenate([each.numpy().ravel() for each in trainer.parts.model.variables]))
    assert np.abs(found[-1] - before).max() > 1e-3
if trainer.rank == 0:
    print("differ by", np.abs(found[0] - found[1]).max())
    print("overlaps", trainer.parts.exchange.gradients.overlaps)
trainer.topology.world.barrier()
hvd.shutdown()
"""


@pytest.mark.large
@pytest.mark.launch
def test_horovod_s_own_path_trains_as_dense_does(tmp_path):
    program = f"import sys; sys.argv[1:] = [{str(tmp_path)!r}]\n{HOROVOD_AND_DENSE}"
    result = python_on_ranks(2, program)
    assert result.returncode == 0, tail(result)
    (differ,) = (line for line in result.stdout.splitlines() if line.startswith("differ by"))
    assert float(differ.split()[-1]) < 1e-6
    assert "overlaps True" in result.stdout


# ------------------------------------------------------------- the whole of it


@pytest.mark.cluster
@pytest.mark.launch
def test_on_a_real_cluster_the_quick_race_ends_and_nothing_is_left(tmp_path):
    skip_where_no_cluster_can_be_made()
    result = run(
        *("env", f"TMPDIR={tmp_path}", "python", "-m", "benchmarks.race", "--quick", "--json"),
        *("--rate", "10gbit"),  # the links are not what is looked at
        cwd=ROOT,
    )
    assert result.returncode == 0, tail(result)
    told = [json.loads(line) for line in result.stdout.splitlines()]
    steps = {each["subject"]: each for each in told if each["case"]["unit"] == "seconds a step"}
    runs = {each["subject"]: each for each in told if each["case"]["unit"] != "seconds a step"}
    assert list(runs) == ["horovod", "horovod, ring", "dense", "hitopk"]
    assert list(steps) == [*runs, "dense, overlap off", "hitopk, overlap off"]
    for record in told:
        assert record["case"]["ranks_of_nodes"] == [1, 1]
        assert record["case"]["weights"] == 10_020_874
        is_ring = record["settings"]["environment"].get("OMPI_MCA_coll_tuned_allreduce_algorithm") == "4"
        assert is_ring == (record["subject"] == "horovod, ring")
    dense = 4 * 10_020_874  # one other rank: all entries once
    for name in ("horovod", "horovod, ring", "dense", "dense, overlap off"):
        assert dense < steps[name]["card_bytes"] < 1.1 * dense
    assert steps["dense"]["bytes"]["inter"] == pytest.approx(dense, rel=0.001)
    assert steps["hitopk"]["bytes"]["inter"] == pytest.approx(dense / 50, rel=0.001)
    assert steps["hitopk"]["card_bytes"] < dense / 10
    overlapping = {name for name, each in steps.items() if each["overlap"]}
    assert overlapping == {"horovod", "horovod, ring", "dense", "hitopk"}
    assert runs["dense"]["final_accuracy"] == runs["horovod"]["final_accuracy"]  # two ranks: the same sums
    assert RACED["mlp"].target > runs["dense"]["target"]
    assert not any(str(tmp_path) in command for command in commands().values())
    assert list(tmp_path.iterdir()) == []
