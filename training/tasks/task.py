"""The interface of a task to the rest of training: what samples, batches, losses and metrics are.

The loop knows no task by name. docs/own_parts.md shows how to write one.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from commlib import Communicator
from commlib.errors import InvalidArgument, shown
from datacache import Batch, BatchOrder, Collation, Manifest, Preprocessing
from training.config.records import AnyConfig, DatasetRecord, Phase
from training.datasets import Dataset
from training.models import Signature, check_model


@dataclass(frozen=True)
class Metric:
    """A metric of the test: its label in lines of progress, and which values are better.

    ``share``: whether it is shown in percent. ``column``: its name in ``dawnbench.tsv``, by default its own.
    """

    label: str
    better: Literal["higher", "lower"]
    share: bool = False
    column: str = ""

    def shown(self, value: float, digits: int = 1) -> str:
        """Return a value as lines show it.

        >>> Metric("test accuracy", "higher", share=True).shown(0.9876), Metric("loss", "lower").shown(2.5)
        ('98.8%', '2.500')
        """
        return f"{value:.{digits}%}" if self.share else f"{value:.{digits + 2}f}"

    def reaches(self, value: float, goal: float) -> bool:
        """Return whether a value is as good as ``goal``, or better."""
        return value >= goal if self.better == "higher" else value <= goal


@dataclass(frozen=True)
class Reading:
    """How one part of a data set is read."""

    order: BatchOrder
    collation: Collation
    preprocessing: Preprocessing


@dataclass(frozen=True)
class Inputs:
    """What a phase reads to train and to test."""

    training: Reading
    test: Reading


@dataclass(frozen=True)
class Samples:
    """The data of a run. ``dataset``: of the kind that the task takes. ``ranks``: that train together."""

    config: AnyConfig
    dataset: Any
    training: Manifest
    test: Manifest
    ranks: int


@dataclass(frozen=True)
class Tested:
    """The result of a test over all ranks.

    ``count``: samples or tokens over which metrics are means. ``examples``: answers of the model to show,
    each a few named texts.
    """

    values: Mapping[str, float]
    count: int
    examples: Sequence[Mapping[str, str]] = ()


class Evaluation(ABC):
    """The test of a model."""

    @abstractmethod
    def evaluate(self, batches: Iterable[Batch], comm: Communicator) -> Tested:
        """Return the metrics over the batches of all ranks, equal on all; collective."""


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a graph of a function for all shapes, traced without AutoGraph, as Keras traces models."""
    import tensorflow as tf

    return tf.function(function, reduce_retracing=True, autograph=False)


class Means(Evaluation):
    """Metrics that are means over samples or tokens.

    ``numbers(batch)`` returns, by metric, the numbers of the samples or tokens of this rank's batch that
    count, in arrays of equal length. Sums are float64 and added up in the order of the ranks. Means over none
    are NaN.
    """

    def __init__(self, numbers: Callable[[Batch], Mapping[str, npt.NDArray[Any]]]) -> None:
        self._numbers = numbers

    def evaluate(self, batches: Iterable[Batch], comm: Communicator) -> Tested:
        own, count = dict[str, float](), 0
        for batch in batches:
            numbers = self._numbers(batch)
            count += len(next(iter(numbers.values())))
            for name, values in numbers.items():
                own[name] = own.get(name, 0.0) + float(np.sum(values, dtype=np.float64))
        of_ranks = comm.allgather_objects((own, count))
        total = sum(count for _, count in of_ranks)
        names = dict.fromkeys(name for sums, _ in of_ranks for name in sums)  # a rank may have no batch
        sums = {name: sum(each.get(name, 0.0) for each, _ in of_ranks) for name in names}
        means = {name: each / total if total else math.nan for name, each in sums.items()}
        return Tested(means, total)


@dataclass(frozen=True)
class EpochSize:
    """The steps of an epoch, and the global batch of its order."""

    steps: int
    global_batch: int


@dataclass(frozen=True)
class Tiny:
    """What a dry run trains on: few samples, and phases of small inputs and batches.

    ``epochs``: for each phase, the size of an epoch of the real run, which its schedules are checked for.
    """

    dataset: DatasetRecord
    phases: Sequence[Phase]
    epochs: Sequence[EpochSize]


class Task(ABC):
    """What a sample, a batch, the loss and the metrics are. Its options are keywords of the constructor.

    The constructor imports no framework; methods from :meth:`make_model` on may. ``phase`` and ``dataset``
    are of the kinds that the task names. (Many methods: one for each question of the loop.)
    """

    Phase: ClassVar[type[Phase]]
    """The keys of a phase: those of all tasks, and its own."""
    dataset: ClassVar[type[Dataset]] = Dataset
    """The kind of data set that it takes."""
    signature: ClassVar[Signature]
    """How it calls the builders of its models; arguments are attributes of the data set."""
    unit: ClassVar[str] = "samples"
    """What throughput counts."""
    rows: str = "samples"
    """What a phase's ``batch_size``, if it has this key, counts."""
    metrics: ClassVar[Mapping[str, Metric]]
    """By name; the best checkpoint is the best by the first one, unless the target names another."""
    takes: ClassVar[frozenset[str]] = frozenset()
    """The keys among ``normalise`` and ``cache.shards`` that this task supports; not every task does."""

    carried: Sequence[Any] = ()
    """The variables of this rank that a step changes, such as an LSTM's state, made by :meth:`make_model`.

    Axis 0 of each is that of the rank's streams or rows. They are zero when an epoch begins, and saved in
    checkpoints; a skipped step leaves them unchanged."""

    def check(self, config: AnyConfig) -> None:  # noqa: B027 - most tasks have nothing to check
        """Raise a ``ValueError`` of one line, ``key: …``, for keys that do not go together."""

    def check_accumulate(self, config: AnyConfig) -> None:
        """Raise a ``ValueError`` of one line unless ``accumulate`` divides the batches of all phases."""
        for number, phase in enumerate(config.phases):
            if phase.batch_size % config.accumulate:
                expected = f"a divisor of phases[{number}].batch_size = {phase.batch_size}"
                raise ValueError(f"accumulate: expected {expected}, got {config.accumulate}")

    @abstractmethod
    def describe(self, phase: Any) -> str:
        """Return the size of a phase's inputs as lines of progress show it, such as ``28 px``."""

    def describe_batch(self, phase: Any) -> str:
        """Return the size of a batch of one rank; by default there is a key ``batch_size``."""
        return f"{phase.batch_size} {self.rows}"

    def tiny(self, config: AnyConfig, ranks: int) -> Tiny:
        """Return what a dry run trains on, by default the data set and phases as they are.

        Raises a ``ValueError`` of one line where a phase's epoch has no step.
        """
        return Tiny(config.dataset, config.phases, self.epochs(config, config.make_dataset(), ranks))

    def epochs(self, config: AnyConfig, dataset: Any, ranks: int) -> list[EpochSize]:
        """Return the size of an epoch of each phase on a data set; errors as of ``tiny``."""
        samples = Samples(config, dataset, dataset.manifest("training"), dataset.manifest("test"), ranks)
        self.check_samples(samples)
        orders = [self.inputs(phase, samples).training.order for phase in config.phases]
        return [EpochSize(order.steps(), order.global_batch) for order in orders]

    def check_samples(self, samples: Samples) -> None:
        """Raise a ``ValueError`` of one line, ``key: …``, unless every phase can train on these samples."""
        for number, phase in enumerate(samples.config.phases):
            if self.inputs(phase, samples).training.order.steps() < 1:
                raise ValueError(
                    f"phases[{number}]: expected at most the {len(samples.training)} training samples in a "
                    f"step of all {samples.ranks} ranks, got {self.describe_batch(phase)} on each"
                )

    def notes(self, samples: Samples) -> Iterable[str]:
        """Return lines on the samples to show when a run begins, such as how many are left out."""
        return ()

    @abstractmethod
    def inputs(self, phase: Any, samples: Samples) -> Inputs:
        """Return what a phase reads."""

    def size(self, batch: Batch) -> int:
        """Return how many of its ``unit`` a batch of one rank has."""
        return int(batch.counts.sum())

    def identity(self, dataset: Any) -> str:
        """Return what weights belong to, such as a vocabulary: a checkpoint with another one is refused."""
        return ""

    def make_model(self, config: AnyConfig, dataset: Any) -> Any:
        """Return a new model; ``ValueError`` of one line if it is invalid."""
        import keras

        name, options, signature = config.model.name, config.model.options, self.signature
        arguments = [getattr(dataset, each) for each in signature.arguments]
        given = {keyword: getattr(config, key) is not None for keyword, key in signature.given.items()}
        model = check_model(name, options, signature)(*arguments, **given, **options)
        if not isinstance(model, keras.Model):
            raise InvalidArgument(f"model {name}: expected {signature}, got {shown(model)} from it")
        return model

    @abstractmethod
    def specs(self, phase: Any, samples: Samples) -> Sequence[Any]:
        """Return a ``tf.TensorSpec`` for each array of a rank's batch; dimensions may be ``None``."""

    @abstractmethod
    def losses(self, model: Any, arrays: Sequence[Any], phase: Any) -> Any:
        """Return the loss of each row of a batch. Ranks minimize the mean of their means.

        Traced without AutoGraph: a condition on a tensor is ``keras.ops.cond``.
        """

    @abstractmethod
    def evaluation(self, model: Any, samples: Samples) -> Evaluation:
        """Return what tests the model."""
