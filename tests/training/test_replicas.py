"""Statistics that are made the same on all ranks."""

from types import SimpleNamespace

import keras
import numpy as np

from commlib.transport import simulated
from training.run.model import average_statistics


def test_statistics_become_their_mean_over_all_ranks_and_weights_stay():
    def body(comm):
        rng = np.random.default_rng(comm.rank)
        trained, moving = (keras.Variable(rng.normal(size=shape), dtype="float32") for shape in (3, (2, 5)))
        own = [trained.numpy(), moving.numpy()]
        model = SimpleNamespace(weights=[trained, moving], non_trainable_weights=[moving])
        average_statistics(model, comm)
        return own, [trained.numpy(), moving.numpy()]

    ranks = simulated.run(body, 3)
    mean = np.mean([own[1].astype(np.float64) for own, _ in ranks], axis=0)
    for own, (trained, moving) in ranks:
        np.testing.assert_array_equal(trained, own[0])
        np.testing.assert_array_equal(moving, mean.astype(np.float32))
