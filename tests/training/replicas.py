"""A rank's model, optimizer and exchange, as tests of single steps use them."""

from itertools import chain

import keras
import numpy as np
from keras import layers

from commlib import Topology
from commlib.rounds import Schedule
from datacache import Batch
from tests.launching import DIGITS
from tests.training.small import phase
from tests.training.stored import newest, save_whole
from training.checkpoint.folders import Checkpoints
from training.checkpoint.places import Folder
from training.config.config import load
from training.models.images import image_input
from training.results import ALL_FRAGMENTS, StepHyperparameters
from training.run.build import build
from training.run.checkpointing import restore, states_of
from training.run.data import Data
from training.run.parts import import_parts

RATE = 0.1


def named_layers(channels, classes, *, normalised=False):
    """Return a small model whose weights have the same names on all ranks."""
    images, x = image_input(channels, normalised=normalised)
    x = layers.Flatten(name="flat")(layers.Resizing(4, 4, interpolation="area", name="small")(x))
    x = layers.Dense(8, activation="relu", name="hidden")(x)
    x = layers.BatchNormalization(name="norm")(x)
    return keras.Model(images, layers.Dense(classes, dtype="float32", name="logits")(x))


named_layers.smallest_side = 4


def config_of(*phases, words=()):
    """Return a configuration of that model with these phases, each a dictionary of keys."""
    lists = ", ".join(phase(size=8, batch=8, steps=100, **each) for each in phases)
    model = "model=tests.training.replicas:named_layers"
    plain = (model, "reducer=dense", "cache={}", "ranks_per_node=null")
    return import_parts(load(DIGITS, [f"phases=[{lists}]", *plain, *words]))


def replica_of(comm, config, layout=None):
    """Return the replica of a rank that is a thread; all of them begin with the same weights."""
    topology = Topology(comm, ranks_per_node=layout)
    data = Data(config, topology, config.make_dataset())
    keras.utils.set_random_seed(3)  # and no other rank, a thread, has its turn before the model is there
    return Replica(build(config, topology, data))


class Replica:
    """The parts of a run on one rank, without its loop. ``passed_over``: the steps that :func:`take` was."""

    def __init__(self, parts):
        self.parts, self.config, self.topology = parts, parts.config, parts.topology
        self.model, self.variables = parts.model.keras, parts.model.variables
        self.gradients, self.scale = parts.exchange.gradients, parts.optimizer.scale
        self.record = parts.step.record
        self.step, self.begin, self.settle = parts.step.take, parts.step.begin, parts.step.settle
        self.common_weights = parts.exchange.common_weights
        self.passed_over, self._backwards = [], {}

    @property
    def optimizer(self):
        return self.parts.optimizer.optimizer

    @property
    def local(self):  # each phase has its own
        return self.parts.exchange.local

    def optimizer_state(self):
        return self.parts.optimizer.state_dict().shared["optimizer"]

    def backward_of(self, phase):
        """Return the compiled gradient computation of a phase, made once."""
        if id(phase) not in self._backwards:
            overlaps = self.gradients.overlaps and phase.local_steps is None
            given = (phase, self.gradients, self.scale)
            self._backwards[id(phase)] = self.parts.model.backward(*given, overlaps=overlaps)
        return self._backwards[id(phase)]

    def save(self, folder, step):
        save_whole(Checkpoints(Folder(folder), self.topology.world), step, *states_of(self.parts))

    def restore_from(self, folder):
        """Restore what was saved; return its step, and the lines of what is not as it was."""
        checkpoint = newest(Checkpoints(Folder(folder), self.topology.world))
        return checkpoint.step, restore(self.parts, checkpoint)


def batch_of(rank, step):
    random = np.random.default_rng((rank, step))
    images = random.integers(0, 256, (8, 8, 8, 1), np.uint8)
    return Batch((images, random.integers(0, 10, 8)), np.arange(8), np.ones(8, bool))


def pace(only, step, last=1000):
    """Return the hyperparameters of a step of a phase, numbered from 1, of which there are ``last``."""
    schedule = only.schedule or Schedule(1)
    if step == last:
        return StepHyperparameters(RATE, 0.9, schedule.since(step), ALL_FRAGMENTS)
    ends = schedule.since(step) if schedule.arrives(step) else 0
    return StepHyperparameters(RATE, 0.9, ends, schedule.leaving(step))


def take(replica, step, last=1000, *, number=0, spoilt=False):
    """Take or pass over a step of phase ``number``; return the report.

    ``spoilt``: without a gradient that is finite, after which the weights are finite again.
    """
    only, steps, bias = replica.config.phases[number], replica.parts.step, replica.variables[-1]
    if steps.passes_over():
        replica.passed_over.append(step)
        return steps.pass_over(pace(only, step, last))
    before = bias.numpy()
    if spoilt:
        bias.assign(np.full(bias.shape, np.nan, np.float32))
    batch = batch_of(replica.topology.world.rank, step)
    report = steps.take(replica.backward_of(only), batch, pace(only, step, last))[1]
    if spoilt:
        bias.assign(before)
    steps.stopwatch.restart()
    return report


def weights_of(variables):
    return np.concatenate([variable.numpy().ravel() for variable in variables])


def flat(replica):
    return weights_of(replica.variables)


def state_of(replica):
    """Return the bits of optimizer, statistics and reducer of a rank.

    Those of the reducer are left out where a thread may be about to change them.
    """
    optimizer, local = replica.optimizer, replica.local
    parts = [optimizer.iterations, *chain(*optimizer.slots), *replica.model.non_trainable_weights]
    own = [each.numpy().tobytes() for each in parts]
    is_changing = local is not None and local.rounds.leaving is not None
    return own if is_changing else [*own, replica.gradients.exchange.residual.tobytes()]


def seen_of(replica):
    return flat(replica).tobytes(), int(replica.optimizer.iterations.numpy()), state_of(replica)


def saved(comm, config, folder, last, at, *, made=replica_of, note=lambda replica: None):
    """Take all steps, with checkpoints after the steps ``at``; return weights, count and state by step.

    ``note``: what it returns of a replica at a checkpoint is there under ``(step, "noted")``.
    """
    replica, seen = made(comm, config), {}
    for step in range(1, last + 1):
        take(replica, step, last)
        if step in at:
            replica.save(folder / str(step), step)
            seen[step, "noted"] = note(replica)
        seen[step] = seen_of(replica)
    return seen


def resumed(comm, config, folder, last, *, made=replica_of):
    """Go on from a checkpoint; return lines, what :func:`saved` does, the last report, the first residual."""
    replica = made(comm, config)
    begun, lines = replica.restore_from(folder)
    seen, residual = {begun: seen_of(replica)}, replica.gradients.exchange.residual
    for step in range(begun + 1, last + 1):
        report = take(replica, step, last)
        seen[step] = seen_of(replica)
    return lines, seen, report.finite, residual


def check_same(whole, again, at, last):
    """Expect ranks that went on from a checkpoint to have had the bits of those that had not stopped."""
    for expected, (lines, seen, *_) in zip(whole, again, strict=True):
        assert seen == {step: expected[step] for step in range(at, last + 1)}
        assert lines == []
