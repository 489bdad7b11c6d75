"""What watches a run: records, early stopping, and writers to other tools, a file each."""

from training.callbacks.callback import Callback, Event
from training.callbacks.early_stopping import EarlyStopping

__all__ = ["CALLBACKS", "Callback", "Event"]

CALLBACKS: dict[str, type[Callback]] = {
    "early_stopping": EarlyStopping,
}
