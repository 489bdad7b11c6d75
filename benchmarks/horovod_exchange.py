"""Training with Horovod's own all-reduce, as its users have it: a baseline of ``bench train --cluster``.

In the backward graph each gradient has an asynchronous ``hvd.allreduce`` of its own: Horovod's thread fuses
those that are ready, and exchanges them while others are still computed. No run imports this.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from commlib import Report, Topology
from commlib.reducers import StageSeconds
from commlib.tensorflow import DistributedGradients
from commlib.topology import Traffic
from datacache import Batch
from training.config.config import Config
from training.config.schema import ConfigurationError
from training.results import StepHyperparameters
from training.run.learner import Learner
from training.run.steps import Backward


class HorovodGradients(DistributedGradients):
    """Submits gradients to Horovod; what ``submit`` returns are the means, one tensor a variable."""

    def __init__(self, topology: Topology, variables: Sequence[Any], config: Mapping[str, Any]) -> None:
        super().__init__(topology, variables, config)
        import horovod.tensorflow as hvd

        self._horovod = hvd
        self.overlaps = True  # the exchange is in the backward graph

    def submit(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the means, which the graph waits for at its end."""
        hvd = self._horovod
        return [
            hvd.allreduce(tensor, op=hvd.Average, name=f"gradient.{number}")
            for number, tensor in enumerate(self._layout.tensors(gradients)[0])
        ]


class HorovodLearner(Learner):
    """A learner whose gradients go through Horovod, which runs while it takes steps.

    As with Horovod, nothing looks for a NaN in the mean, and each variable is updated from its own tensor.
    The bytes that it sends are not known.
    """

    def __init__(self, config: Config, topology: Topology, *more: Any) -> None:
        _check(config)
        super().__init__(config, topology, *more)
        self.gradients.close()
        self.gradients = HorovodGradients(topology, self.variables, self.gradients.config)
        signature = [[tf.TensorSpec(variable.shape, tf.float32) for variable in self.variables]]

        @tf.function(input_signature=signature)
        def apply(means: Any) -> None:
            self.optimizer.apply(means, self.variables)

        self._apply_means = apply

    def step(
        self, backward: Backward, batch: Batch, hyperparameters: StepHyperparameters
    ) -> tuple[float, Report]:
        """See :meth:`training.run.learner.Learner.step`."""
        with self.stopwatch.measure("forward_backward"):
            loss, means = backward(*batch.arrays)
        with self.stopwatch.measure("update"):
            self._set(hyperparameters)
            self._apply_means(means)
        size = self.gradients.size
        return loss, Report(
            finite=True, selected=size, applied=size, traffic=Traffic(), seconds=StageSeconds()
        )


def _check(config: Config) -> None:
    """Raise ``ConfigurationError`` for what this learner would leave out."""
    expected = {
        "accumulate": 1,
        "clip_norm": None,
        "average": None,
        "precision": "float32",
        "sparse_tables": False,
    }
    wrong = {key: value for key, value in expected.items() if getattr(config, key) != value}
    if any(config.reducer_name(phase) != "dense" for phase in config.phases):
        wrong["reducer"] = "dense"
    if any(phase.local_steps for phase in config.phases):
        wrong["local_steps"] = None
    for key, value in wrong.items():
        raise ConfigurationError(f"{key}: expected {value or 'none'} with Horovod's own all-reduce")
