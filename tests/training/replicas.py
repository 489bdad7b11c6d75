"""A rank's model, optimizer and exchange, as tests of single steps use them."""

import keras

from commlib import Topology
from training.config.records import Phase
from training.run.build import build
from training.run.checkpointing import restore, states_of
from training.run.data import Data


def replica_of(comm, config, layout=None):
    """Return the replica of a rank that is a thread; all of them begin with the same weights."""
    topology = Topology(comm, ranks_per_node=layout)
    data = Data(config, topology, config.make_dataset())
    keras.utils.set_random_seed(3)  # and no other rank, a thread, has its turn before the model is there
    return Replica(config, topology, data)


class Replica:
    """The parts of a run on one rank, without its loop."""

    def __init__(self, config, topology, data):
        self._use(build(config, topology, data))

    @classmethod
    def of(cls, parts):
        """Return the replica of a run that is built already."""
        replica = cls.__new__(cls)
        replica._use(parts)
        return replica

    def _use(self, parts):
        self.parts = parts
        self.config, self.topology = parts.config, parts.topology
        self.model, self.variables = self.parts.model.keras, self.parts.model.variables
        self.gradients, self.scale = self.parts.exchange.gradients, self.parts.optimizer.scale
        self.stopwatch, self.record = self.parts.step.stopwatch, self.parts.step.record
        step = self.parts.step
        self.step, self.begin, self.settle = step.take, step.begin, step.settle
        self.common_weights = self.parts.exchange.common_weights

    @property
    def optimizer(self):
        return self.parts.optimizer.optimizer

    def optimizer_state(self):
        return self.parts.optimizer.state_dict().shared["optimizer"]

    @property
    def local(self):
        return self.parts.exchange.local

    def backward_of(self, phase: Phase):
        """Return the compiled gradient computation of a phase, made once."""
        backwards = vars(self).setdefault("_backwards", {})
        if id(phase) not in backwards:
            overlaps = self.gradients.overlaps and phase.local_steps is None
            given = (phase, self.gradients, self.scale)
            backwards[id(phase)] = self.parts.model.backward(*given, overlaps=overlaps)
        return backwards[id(phase)]

    def shared_state(self):
        return states_of(self.parts)[0]

    def own_state(self):
        return states_of(self.parts)[1]

    def restore(self, checkpoint):
        return restore(self.parts, checkpoint)
