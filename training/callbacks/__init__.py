"""What watches a run: records, early stopping, and writers to other tools, a file each."""

from training.callbacks.callback import Callback, Event, PhaseView, RunView
from training.callbacks.early_stopping import EarlyStopping
from training.callbacks.mlflow import MLflow
from training.callbacks.mllog import MLLog
from training.callbacks.tensorboard import TensorBoard
from training.callbacks.wandb import WeightsAndBiases

__all__ = ["CALLBACKS", "Callback", "Event", "PhaseView", "RunView"]

CALLBACKS: dict[str, type[Callback]] = {
    "early_stopping": EarlyStopping,
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "mllog": MLLog,
}
