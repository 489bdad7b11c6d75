"""Training with Horovod's own all-reduce, as its users have it: a baseline of the race.

In the backward graph each gradient has an asynchronous ``hvd.allreduce`` of its own: Horovod's thread fuses
those that are ready, and exchanges them while others are still computed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from commlib import Report, Topology
from commlib.reducers import StageSeconds
from commlib.tensorflow import DistributedGradients
from commlib.topology import Traffic
from datacache import Batch
from training.config.config import Config
from training.results import StepHyperparameters
from training.run.backward import Backward
from training.run.build import Parts, build
from training.run.data import Data
from training.run.step import TrainingStep


class HorovodGradients(DistributedGradients):
    """Gives gradients to Horovod in the backward graph, which returns the means, one tensor a variable."""

    def __init__(self, topology: Topology, variables: Sequence[Any], config: Mapping[str, Any]) -> None:
        super().__init__(topology, variables, config)
        self.overlaps = True  # the exchange is in the backward graph

    def submit_in_graph(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the means, which the graph waits for at its end."""
        import horovod.tensorflow as hvd

        return [
            hvd.allreduce(tensor, op=hvd.Average, name=f"gradient.{number}")
            for number, tensor in enumerate(self._tensors(gradients))
        ]


class HorovodStep(TrainingStep):
    """A step whose gradients go through Horovod, which runs while it takes steps.

    As with Horovod, nothing looks for a NaN in the mean, and each variable is updated from its own tensor.
    The bytes that it sends are not known.
    """

    apply_means: Callable[[Any], None]

    def take(
        self, backward: Backward, batch: Batch, hyperparameters: StepHyperparameters
    ) -> tuple[float, Report]:
        with self.stopwatch.measure("forward_backward"):
            loss, means = backward(*batch.arrays)
        with self.stopwatch.measure("update"):
            self.optimizer.set(hyperparameters)
            self.apply_means(means)
        size = self.exchange.gradients.size
        return loss, Report(
            finite=True, selected=size, applied=size, traffic=Traffic(), seconds=StageSeconds()
        )


def build_horovod(config: Config, topology: Topology, data: Data) -> Parts:
    """Return the parts of a run that exchanges by Horovod.

    Its step supports float32 alone, and no accumulation, clipping, moving average, local steps or sparse
    tables: where the race and the bench of local steps use Horovod, they set none of these.
    """
    parts = build(config, topology, data)
    variables, optimizer = parts.model.variables, parts.optimizer
    parts.exchange.gradients.close()
    parts.exchange.gradients = HorovodGradients(topology, variables, parts.exchange.gradients.config)
    step = HorovodStep(topology, parts.model, parts.exchange, optimizer)
    signature = [[tf.TensorSpec(variable.shape, tf.float32) for variable in variables]]
    step.apply_means = tf.function(
        lambda means: optimizer.optimizer.apply(means, variables), input_signature=signature
    )
    parts.step = step
    return parts
