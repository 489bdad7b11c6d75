"""The memory of a rank: weights, optimizer, gradient, residual and what the reducer works with."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commlib import LinkBytes
from commlib.reducers import ResidualReducer, reducer_class, reducer_options
from commlib.selection import EVERYTHING
from commlib.vectors import VALUE_BYTES
from commlib.wire import VALUE_CODECS
from pto import rules
from training.config.config import Config
from training.process.tf_logging import import_tensorflow

GRADIENTS = 2  # the layers' tensors, and the flat vector of them
RESIDUALS = 2  # that of the step before, and the next one, which is made in it
SELECTING = 0.25  # of the vector that is selected from
SELECTED = 10  # numbers for each entry that is selected
HELD = 3  # times what is sent: messages, what is decoded, their sum; a dense vector at most


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. Activations are not among them.

    ``weights``: with those that are not trained, and with the moving average. ``reducer``: an estimate, of
    the mean, what is selected from, and messages.
    """

    weights: int
    optimizer: int
    gradient: int
    residual: int
    reducer: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


@dataclass(frozen=True)
class Kept:
    """Bytes that a rank keeps for a gradient: the residual, and two parts that the reducer works with.

    ``vectors``: the mean, and shards of other ranks of the node. ``entries``: selected entries and messages.
    """

    residual: int
    vectors: int
    entries: int = 0

    @property
    def reducer(self) -> int:
        return self.vectors + self.entries


def kept_by(
    reducer: str,
    options: Mapping[str, Any],
    nodes: Sequence[Sequence[int]],
    size: int,
    sent: LinkBytes | None,
) -> Kept:
    """Return what a reducer keeps for a gradient of ``size`` entries on the ranks of ``nodes``.

    ``sent``: by one rank in a step, ``None``: not known. The reducer's part is an estimate.
    """
    kind: type[Any] = reducer_class(reducer)
    known = reducer_options(reducer) | dict(options)
    vector = VALUE_BYTES * size
    if sum(map(len, nodes)) == 1:
        return Kept(0, vector)
    streams = min(map(len, nodes))
    of_node = issubclass(kind, ResidualReducer) and bool(known.get("hierarchical"))
    of_shards = of_node or reducer == "torus2d"
    own = vector // streams if of_shards else vector
    values = options.get("values", "fp32") if reducer in ("dense", "torus2d") else "fp32"
    rounds = not VALUE_CODECS[values].lossless and (len(nodes) > 1 or reducer == "dense")
    has_residual = rounds or (kind.sparse and options.get("selector") != EVERYTHING)
    residuals = RESIDUALS + (options.get("decay", 1.0) != 1)  # the decayed one is a third
    wrappers = [each["name"] for each in options.get("wrappers", ())]
    residual = residuals * own * has_residual + vector * wrappers.count("momentum_correction")
    shards = vector - vector // streams if of_shards else 0
    selecting = int((SELECTING + SELECTED * float(known.get("density", 0.0))) * own) * kind.sparse
    held = 0
    if kind.sparse and sent is not None:
        entries = sent.intra + sent.inter - (shards if of_node else 0)
        held = max(min(HELD * entries, vector), entries)  # an all-gather holds all messages
    return Kept(residual, vector + shards, selecting + held)


@dataclass(frozen=True)
class Weights:
    """Shapes of trainable variables, in the order of the layers; ``others``: entries of those not trained."""

    shapes: Sequence[tuple[int, ...]]
    others: int = 0

    @property
    def size(self) -> int:
        return sum(map(math.prod, self.shapes))


def weights_of(config: Config, dataset: Any) -> Weights:
    """Return the weights of the model for a data set; ``ValueError`` of one line if it cannot be built."""
    import_tensorflow()
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")  # they may belong to a run
    model = config.task.make().make_model(config, dataset)
    others = sum(math.prod(each.shape) for each in model.non_trainable_variables)
    return Weights([tuple(each.shape) for each in model.trainable_variables], others)


def slots_of(config: Config) -> int:
    """Return how many numbers the optimizer keeps for each weight."""
    settings = config.optimizer
    rule = getattr(rules, type(settings).__name__)
    if not hasattr(settings, "momentum"):
        return len(rule().slots)
    has_momentum = settings.momentum or any(phase.momentum for phase in config.phases)
    return len(rule(momentum=0.9 if has_momentum else 0.0).slots)
