"""The race: Horovod's own path trains as dense does."""

import pytest

from tests.launching import python_on_ranks, tail

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
