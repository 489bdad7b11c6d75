"""What the loop asks of a task: metrics over ranks, arrays of any length, state carried over batches."""

import math
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib import Topology, transport
from commlib.tensorflow import DistributedGradients
from commlib.transport.mpi import world
from datacache import Batch
from tests.launching import DIGITS
from tests.training.small import phase, trainer
from training.config.config import load
from training.results import StepHyperparameters
from training.run.backward import Backward
from training.run.model import OtherRun, load_carried
from training.run.parts import import_parts
from training.tasks import Means
from training.tasks.image_classification import ImageClassification

REMEMBERING = "task=tests.training.test_tasks:Remembering"


class Remembering(ImageClassification):
    """Each row of the batch remembers the sum of the mean levels that it has seen, which scales its loss."""

    def make_model(self, config, dataset):
        self.carried = [tf.Variable(tf.zeros((config.phases[0].batch_size, 1)))]
        return super().make_model(config, dataset)

    def losses(self, model, arrays, phase):
        means = tf.reduce_mean(tf.cast(arrays[0], tf.float32), axis=(1, 2)) / 255
        memory = self.carried[0].assign_add(means)
        return super().losses(model, arrays, phase) * (1 + memory[:, 0] / 10)


def batches_of(numbers, size):
    """Return numbers in batches of ``size``, the last one padded by numbers that do not count."""
    for start in range(0, len(numbers), size):
        part = numbers[start : start + size]
        padded = np.concatenate([part, np.full(size - len(part), 1e9)])
        yield Batch((padded,), np.arange(size), np.arange(size) < len(part))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_means_are_those_of_all_samples_whatever_each_rank_has(world_size):
    numbers = np.random.default_rng(3).standard_normal(101) * 10.0 ** np.arange(101).clip(0, 6)
    parts = np.split(numbers, np.sort(np.random.default_rng(world_size).integers(1, 101, world_size - 1)))
    means = Means(
        lambda batch: {"plain": batch.arrays[0][batch.counts], "squares": batch.arrays[0][batch.counts] ** 2}
    )

    def evaluate(comm):
        return means.evaluate(batches_of(parts[comm.rank], 7), comm)

    results = transport.simulated.run(evaluate, world_size)
    assert all(result == results[0] for result in results)
    assert results[0].count == 101
    # float64 sums in another order than fsum's
    assert results[0].values["plain"] == pytest.approx(math.fsum(numbers) / 101, rel=1e-12)
    assert results[0].values["squares"] == pytest.approx(math.fsum(numbers**2) / 101, rel=1e-12)


def test_one_graph_takes_batches_of_any_length():
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    tokens = keras.Input((None,), dtype="int32")
    model = keras.Model(tokens, keras.layers.Embedding(5, 1)(tokens))
    traced = []

    def losses(arrays):
        traced.append(1)
        ids, weights = arrays
        return tf.reduce_sum(model(ids)[:, :, 0] * weights, axis=1)

    gradients = DistributedGradients(Topology(world()), model.trainable_variables, {"name": "dense"})
    specs = [tf.TensorSpec((None, None), tf.int32), tf.TensorSpec((None, None))]
    backward = Backward(model, losses, specs, gradients)
    before = model.get_weights()[0]
    backward.prepare()
    for rows, length in ((2, 3), (4, 1), (3, 7)):
        ids = np.arange(rows * length).reshape(rows, length) % 5
        weights = np.linspace(0, 1, rows * length, dtype=np.float32).reshape(rows, length)
        loss, (gradient,) = backward(ids.astype(np.int32), weights)
        expected = np.zeros(5)
        np.add.at(expected, ids, weights.astype(np.float64) / rows)
        np.testing.assert_allclose(gradient, expected, rtol=1e-6)
        assert loss == pytest.approx(float(expected @ before[:, 0]), rel=1e-5)
    assert len(traced) == 1


def remembered(run, batches):
    return sum(batch.images.astype(np.float64).mean(axis=(1, 2)) / 255 for batch in batches)


def test_state_is_carried_over_batches_and_begins_each_epoch_as_zero(tmp_path):
    run = trainer(tmp_path, REMEMBERING, phases=(phase(epochs=2, batch=400),))
    (only,), (memory,) = run.phases, run.task.carried
    for epoch in range(2):
        run.parts.model.restart_carried()
        batches = list(only.data.training_batches(epoch))
        for number, batch in enumerate(batches, 1):
            run.parts.step.take(only.backward, batch, StepHyperparameters(0.1, 0.9))
            np.testing.assert_allclose(memory.numpy(), remembered(run, batches[:number]), rtol=1e-5)
    summary = run.fit()
    assert summary.tested == 360
    np.testing.assert_allclose(memory.numpy(), remembered(run, only.data.training_batches(1)), rtol=1e-5)


def test_a_step_that_is_skipped_leaves_what_is_carried(tmp_path):
    run = trainer(tmp_path, REMEMBERING)
    (only,), (memory,) = run.phases, run.task.carried
    batches = only.data.training_batches(0)
    run.parts.step.take(only.backward, next(batches), StepHyperparameters(0.1, 0.9))
    before, submit_inputs = memory.numpy(), run.parts.exchange.gradients.submit_inputs
    run.parts.exchange.gradients.submit_inputs = lambda given: submit_inputs([given[0] * np.float32(np.nan)])
    _, report = run.parts.step.take(only.backward, next(batches), StepHyperparameters(0.1, 0.9))
    assert not report.finite
    np.testing.assert_array_equal(memory.numpy(), before)
    only.close()


@pytest.mark.parametrize(("before", "after"), [(1, 4), (2, 3), (3, 1)])
def test_other_ranks_divide_the_streams(before, after):
    streams = np.arange(12 * 2, dtype=np.float32).reshape(12, 2)
    saved = [{"carried": [part]} for part in np.split(streams, before)]
    checkpoint = SimpleNamespace(world_size=before, own_of=saved.__getitem__)
    found = []
    for rank in range(after):
        carried = tf.Variable(np.zeros((12 // after, 2), np.float32))
        assert load_carried([carried], checkpoint, rank, after) == []
        found.append(carried.numpy())
    np.testing.assert_array_equal(np.concatenate(found), streams)


def test_other_streams_begin_again_and_a_line_says_so():
    checkpoint = SimpleNamespace(
        world_size=1, own_of=lambda rank: {"carried": [np.ones((12, 2), np.float32)]}
    )
    carried = tf.Variable(np.zeros((8, 2), np.float32))
    (line,) = load_carried([carried], checkpoint, 0, 2)
    assert line.endswith("begins again: expected the shape (16, 2) over all ranks, got (12, 2)")
    assert not carried.numpy().any()


def test_a_task_without_what_every_task_has_is_refused(tmp_path, monkeypatch):
    methods = ("describe", "inputs", "specs", "losses", "evaluation")
    body = "\n".join(f"    def {name}(self, *_): ..." for name in methods)
    (tmp_path / "half.py").write_text(f"from training.tasks import Task\nclass Half(Task):\n{body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="Half does not define Phase, signature, metrics"):
        import_parts(load(DIGITS, ["task=half:Half"]))


def test_a_checkpoint_of_another_task_is_refused(tmp_path):
    model = trainer(tmp_path).parts.model
    saved = model.state_dict().shared
    model.check_state(saved)
    with pytest.raises(OtherRun, match="of another task: expected image_classification, got translation"):
        model.check_state({**saved, "task": "translation abd"})
