"""The weights of a configuration's model, which is built to count them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pto import rules
from training.config.config import Config
from training.process.tf_logging import import_tensorflow


@dataclass(frozen=True)
class Weights:
    """Entries of each trainable variable, in the order of the layers; ``others``: of those not trained."""

    sizes: Sequence[int]
    others: int = 0

    @property
    def size(self) -> int:
        """Return the entries of the gradient."""
        return sum(self.sizes)


def weights_of(config: Config, dataset: Any) -> Weights:
    """Return the weights of the model for a data set; ``ValueError`` of one line if it cannot be built."""
    import_tensorflow()
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")  # they may belong to a run
    model = config.task.make().make_model(config, dataset)
    trained = [_entries(variable) for variable in model.trainable_variables]
    return Weights(trained, sum(map(_entries, model.variables)) - sum(trained))


def _entries(variable: Any) -> int:
    return int(variable.shape.num_elements())


def slots_of(config: Config) -> int:
    """Return how many numbers the optimizer keeps for each weight."""
    settings = config.optimizer
    rule = getattr(rules, type(settings).__name__)
    if not hasattr(settings, "momentum"):
        return len(rule().slots)
    has_momentum = settings.momentum or any(phase.momentum for phase in config.phases)
    return len(rule(momentum=0.9 if has_momentum else 0.0).slots)
