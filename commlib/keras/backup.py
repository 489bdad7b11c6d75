"""Going on with a run that was ended, with what each rank had not sent yet."""

import os
import warnings
from pathlib import Path
from zipfile import BadZipFile

import keras
import numpy as np

from commlib.arrays import to_host
from commlib.keras.callbacks import Logs, built_optimizer_of, optimizer_of


class BackupAndRestore(keras.callbacks.BackupAndRestore):  # type: ignore[misc]  # Keras has no types
    """Keras' callback of that name, with the reducer's residual.

    Rank 0 writes and restores the model and the epoch, and gives them to the others; every rank keeps its own
    residual in a file of its own in ``backup_dir``, a folder on its machine or one that all share. A residual
    that is missing, or of another step than the model, is zero, and that is said. Before or in place of
    ``BroadcastVariables``; ``options``: those of Keras' callback.
    """

    def on_train_begin(self, logs: Logs = None) -> None:
        """Restore what there is; all ranks together."""
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
        """Remove the files where Keras does so."""
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
        if optimizer.ranks.rank == 0:
            super()._save_model()
        assert optimizer.gradients is not None
        self._residual_path.parent.mkdir(parents=True, exist_ok=True)
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
            self._say_that_it_is_lost(str(error))
            return
        if step != int(optimizer.iterations):
            self._say_that_it_is_lost(f"it is of step {step}, the model of {int(optimizer.iterations)}")
            return
        optimizer.gradients.exchange.add_residual(residual)

    def _say_that_it_is_lost(self, why: str) -> None:
        warnings.warn(f"residual: {self._residual_path} is not used, it begins at zero: {why}", stacklevel=3)
