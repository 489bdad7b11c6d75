"""Callbacks of ``model.fit`` on many ranks, for models compiled with ``DistributedOptimizer``.

Each is given to ``fit`` on all ranks, in the same order.
"""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import keras
import numpy as np

from commlib.arrays import to_host
from commlib.errors import InvalidArgument, RanksDisagree
from commlib.keras.optimizer import DistributedOptimizer
from commlib.keras.ranks import Ranks, SyncBatchNormalization, weighted_means

Logs = dict[str, Any] | None


def optimizer_of(model: Any) -> DistributedOptimizer:
    """Return the model's optimizer; ``InvalidArgument`` where it is not distributed."""
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, DistributedOptimizer):
        name = type(optimizer).__name__
        raise InvalidArgument(f"model: expected one compiled with DistributedOptimizer, got {name}")
    return optimizer


def built_optimizer_of(model: Any) -> DistributedOptimizer:
    """Return the model's optimizer, built on all ranks together."""
    if not model.built:
        raise InvalidArgument(
            f"model: expected one that is built: give {model.name} a keras.Input, or call it on a batch"
        )
    optimizer = optimizer_of(model)
    optimizer.build(model.trainable_variables)
    return optimizer


class DistributedCallback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Base of the callbacks in which ranks exchange something; XLA compiles no steps of their model."""

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        optimizer_of(model)
        if model.jit_compile:
            model.jit_compile = False
            warnings.warn("jit_compile: XLA compiles no step that exchanges gradients: off", stacklevel=2)

    @property
    def ranks(self) -> Ranks:
        return optimizer_of(self.model).ranks


class BroadcastVariables(DistributedCallback):
    """Gives all ranks the weights and the optimizer's state of rank 0, before the first step.

    If only the first batch builds the model, the broadcast follows that batch (``steps_per_execution``: the
    first call), as in Horovod: each rank has computed its gradient with its own weights, and training goes on
    from rank 0's. States of random generators are not broadcast: each rank draws its own dropout.
    """

    _is_due = False

    def on_train_begin(self, logs: Logs = None) -> None:
        self._is_due = not self.model.built
        if self._is_due:
            optimizer_of(self.model).compared = True  # first weights differ
        else:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self._is_due:
            self._is_due = False
            self._broadcast()

    def _broadcast(self) -> None:
        optimizer = built_optimizer_of(self.model)
        optimizer.ranks.broadcast([*self.model.weights, *optimizer.variables])


class SynchronizeEpochs(DistributedCallback):
    """Ends every epoch on all ranks together; refuses ranks that end ``fit`` alone.

    A rank that has fewer batches joins the steps of the others with gradients of zero, before its validation:
    see :meth:`DistributedOptimizer.join`. Where the ranks know before an epoch (from arrays, a
    ``cardinality``, ``steps_per_epoch``) that all have equally many, steps exchange only gradients.
    ``SyncBatchNormalization`` requires this.
    """

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        steps = self.ranks.gather(f"the beginning of epoch {epoch}", (self.params or {}).get("steps"))
        uneven = None in steps or len(set(steps)) > 1
        layers = self.model._flatten_layers(include_self=False)  # of models in a model, too
        if uneven and any(isinstance(layer, SyncBatchNormalization) for layer in layers):
            fewest = min((each for each in steps if each is not None), default="…")
            raise RanksDisagree(
                f"steps: expected as many on all ranks in epoch {epoch}, as SyncBatchNormalization needs, "
                f"got {', '.join(f'{each} on rank {rank}' for rank, each in enumerate(steps))} "
                f"(give each rank as many batches, or fit(steps_per_epoch={fewest}))"
            )
        optimizer_of(self.model).uneven = uneven

    def on_test_begin(self, logs: Logs = None) -> None:
        self._join()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._join()

    def _join(self) -> None:
        optimizer = optimizer_of(self.model)
        if optimizer.uneven:
            optimizer.join(self.model.trainable_variables)

    def on_train_end(self, logs: Logs = None) -> None:
        self.ranks.gather("the end of fit", None)


class AverageMetrics(DistributedCallback):
    """Averages the metrics of an epoch over the ranks, weighted by the samples of each.

    Callbacks after it, such as ``EarlyStopping``, ``ReduceLROnPlateau`` and ``ModelCheckpoint``, then see
    the same on all ranks. What some ranks alone report (validation on rank 0) is given to all.
    """

    _trained = _tested = 0.0  # samples of this epoch

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._trained = self._tested = 0.0

    def on_test_begin(self, logs: Logs = None) -> None:
        self._trained = self._counted()

    def on_test_end(self, logs: Logs = None) -> None:
        self._tested = self._counted()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        logs = {} if logs is None else logs
        numbers = (int, float, np.number)
        own = {name: float(value) for name, value in logs.items() if isinstance(value, numbers)}
        trained = self._trained or self._counted()
        weights = {name: self._tested if name.startswith("val_") else trained for name in own}
        logs.update(weighted_means(self.ranks.gather(f"the metrics of epoch {epoch}", (own, weights))))

    def _counted(self) -> float:
        """Return the samples that the loss was averaged over; 0 if they are not counted."""
        for metric in self.model.metrics:
            if metric.name == "loss" and isinstance(metric, keras.metrics.Mean):
                return float(metric.count)
        return 0.0


class AverageMovingStatistics(DistributedCallback):
    """Averages the statistics that layers gather from batches over the ranks, as of BatchNormalization.

    Once an epoch: before the validation, or else at the end. The statistics of one rank describe its part of
    the data alone.
    """

    _is_due = False

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._is_due = True

    def on_test_begin(self, logs: Logs = None) -> None:
        self._average()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._average()

    def _average(self) -> None:
        """Average the floating-point variables without gradients that are not equal on all ranks."""
        if not self._is_due:
            return
        self._is_due = False
        weights = self.model.non_trainable_weights
        variables = [each for each in weights if keras.backend.is_float_dtype(each.dtype)]
        differing = [variables[number] for number in self.ranks.differing(variables)]
        if differing:
            means = self.ranks.average("the moving averages", [each.numpy() for each in differing])
            for variable, mean in zip(differing, means, strict=True):
                variable.assign(mean)


class _LearningRate(DistributedCallback):
    """Base of callbacks that set the learning rate; ``_counts_steps``: they need the steps of an epoch."""

    _counts_steps = True

    def __init__(self, learning_rate: float, steps_per_epoch: int | None) -> None:
        super().__init__()
        if not learning_rate > 0:
            raise InvalidArgument(f"learning_rate: expected one above 0, got {learning_rate!r}")
        self._rate, self._given_steps = learning_rate, steps_per_epoch
        self._steps, self._epoch = steps_per_epoch, 0

    def on_train_begin(self, logs: Logs = None) -> None:
        """Refuse a data set without a number of steps, and an optimizer with a schedule."""
        self._steps = self._given_steps or (self.params or {}).get("steps")  # each fit has its own
        if self._steps is None and self._counts_steps:
            raise InvalidArgument(
                "steps_per_epoch: expected a number, as the data set has no length, got None"
            )
        if isinstance(optimizer_of(self.model).inner_optimizer.get_config()["learning_rate"], dict):
            raise InvalidArgument("learning_rate: expected a number in the optimizer, got a schedule")

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch = epoch

    def _epochs_at(self, batch: int) -> float:
        """Return the epochs before a batch, with the share of this one."""
        assert self._steps is not None
        return self._epoch + batch / self._steps


class LearningRateWarmup(_LearningRate):
    """Raises the learning rate with every step, over some epochs, from the rate of one rank.

    It begins at ``learning_rate/P`` and reaches ``learning_rate``, usually ``P`` times that of one rank
    (Goyal et al. 2017, section 2.2), after ``epochs``; later epochs are left to other callbacks.
    ``steps_per_epoch``: needed where ``fit`` does not know it.
    """

    def __init__(self, learning_rate: float, epochs: float = 5, steps_per_epoch: int | None = None) -> None:
        super().__init__(learning_rate, steps_per_epoch)
        if not epochs > 0:
            raise InvalidArgument(f"epochs: expected a number above 0, got {epochs!r}")
        self._epochs = epochs

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        if self._epoch < self._epochs:
            share = min(1.0, self._epochs_at(batch + 1) / self._epochs)
            start = self._rate / self.ranks.size
            self.model.optimizer.learning_rate = start + share * (self._rate - start)


class LearningRateSchedule(_LearningRate):
    """Sets ``learning_rate`` times ``multiplier`` from ``start_epoch`` on, until before ``end_epoch``.

    ``learning_rate`` is usually ``P`` times that of one rank. ``multiplier``: a number, or a function of the
    completed epochs: a whole number with ``staircase``, else a fraction that grows with every step. Several
    schedules may follow each other, after ``LearningRateWarmup``, if their epochs do not overlap.
    ``steps_per_epoch``: needed where ``fit`` does not know it and ``staircase`` is false.

    The momentum that SGD has gathered stays as it is: it is not multiplied with the rate.
    """

    def __init__(
        self,
        learning_rate: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        *,
        staircase: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__(learning_rate, steps_per_epoch)
        if end_epoch is not None and end_epoch <= start_epoch:
            raise InvalidArgument(f"end_epoch: expected one above start_epoch={start_epoch}, got {end_epoch}")
        self._multiplier, self._staircase = multiplier, staircase
        self._first, self._end = start_epoch, end_epoch
        self._counts_steps = not staircase

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_begin(epoch)
        if self._staircase:
            self._set(epoch)

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        if not self._staircase:
            self._set(self._epochs_at(batch))

    def _set(self, epochs: float) -> None:
        if self._first <= self._epoch and (self._end is None or self._epoch < self._end):
            factor = self._multiplier(epochs) if callable(self._multiplier) else self._multiplier
            self.model.optimizer.learning_rate = self._rate * factor


class BackupAndRestore(keras.callbacks.BackupAndRestore):  # type: ignore[misc]  # Keras has no types
    """Keras' callback of that name, with the reducer's residual.

    Rank 0 writes and restores the model and the epoch, and gives them to the others; every rank keeps its own
    residual in a file of its own in ``backup_dir``, a folder on its machine or one that all share. A residual
    that is missing, or of another step than the model, starts at zero, with a warning. Put this callback
    after ``default_callbacks()``, which end an epoch on all ranks before it is saved. ``options``: those of
    Keras' callback.
    """

    def on_train_begin(self, logs: Logs = None) -> None:
        optimizer = built_optimizer_of(self.model)
        ranks = optimizer.ranks
        is_there = ranks.rank == 0 and Path(self._weights_path).exists()
        if ranks.rank == 0:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "optimizer: its state was loaded")
                super().on_train_begin(logs)
        is_there, epoch = ranks.gather("a backup", (is_there, self.model._initial_epoch))[0]
        if is_there:
            self.model._initial_epoch = epoch
            ranks.broadcast([*self.model.weights, *optimizer.variables])
            self._restore_residual()

    def on_train_end(self, logs: Logs = None) -> None:
        ranks = optimizer_of(self.model).ranks
        if self.delete_checkpoint:
            self._residual_path.unlink(missing_ok=True)
        ranks.gather("the end of backups", None)
        if ranks.rank == 0:
            super().on_train_end(logs)

    @property
    def _residual_path(self) -> Path:
        ranks = optimizer_of(self.model).ranks
        return Path(self.backup_dir) / f"residual-{ranks.rank}-of-{ranks.size}.npz"

    def _save_model(self) -> None:
        optimizer = optimizer_of(self.model)
        # Before Keras, which fails where another rank makes the folder at the same time.
        self._residual_path.parent.mkdir(parents=True, exist_ok=True)
        if optimizer.ranks.rank == 0:
            super()._save_model()
        assert optimizer.gradients is not None
        aside = self._residual_path.with_suffix(".new")
        with aside.open("wb") as file:
            residual = optimizer.gradients.exchange.residual
            np.savez(file, residual=to_host(residual), step=int(optimizer.iterations))
        os.replace(aside, self._residual_path)

    def _restore_residual(self) -> None:
        optimizer = optimizer_of(self.model)
        assert optimizer.gradients is not None
        try:
            with np.load(self._residual_path) as kept:
                residual, step = kept["residual"], int(kept["step"])
        except (OSError, EOFError, BadZipFile, ValueError, KeyError) as error:
            why = str(error)
        else:
            if step == int(optimizer.iterations):
                optimizer.gradients.exchange.add_residual(residual)
                return
            why = f"it is of step {step}, the model of {int(optimizer.iterations)}"
        warnings.warn(f"residual: {self._residual_path} is not used, it begins at zero: {why}", stacklevel=2)


def default_callbacks() -> list[DistributedCallback]:
    """Return the callbacks that every ``fit`` on many ranks needs, to be put before others."""
    return [BroadcastVariables(), SynchronizeEpochs(), AverageMovingStatistics(), AverageMetrics()]
