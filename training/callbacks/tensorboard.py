"""The numbers of a run for TensorBoard."""

from collections.abc import Mapping
from typing import Any

from training.callbacks.callback import RunView
from training.callbacks.writer import Writer
from training.results import EpochResult

FOLDER = "tensorboard"


class TensorBoard(Writer):
    """Writes event files into the folder ``tensorboard`` of the run's: ``tensorboard --logdir runs``."""

    def __init__(self) -> None:
        self._writer: Any = None

    def on_run_begin(self, run: RunView) -> None:
        """Open a file."""
        if run.folder is not None:
            import tensorflow as tf

            self._writer = tf.summary.create_file_writer(str(run.folder.path / FOLDER))

    def write(self, numbers: Mapping[str, float], steps: int) -> None:
        """Write scalars."""
        import tensorflow as tf

        with self._writer.as_default(steps):
            for name, value in numbers.items():
                tf.summary.scalar(name, value)

    def on_epoch_end(self, run: RunView, result: EpochResult) -> None:
        """Write the numbers of the epoch, and all that is not on the disk yet."""
        super().on_epoch_end(run, result)
        if self._writer is not None:
            self._writer.flush()

    def on_run_end(self, run: RunView) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def on_error(self, run: RunView, error: BaseException) -> None:
        """Close the file."""
        self.on_run_end(run)
