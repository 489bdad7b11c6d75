"""Callbacks watch a run; a configuration names them."""

from typing import Annotated

from pydantic import model_validator

from commlib import registry
from training.callbacks.callback import Callback, Event, PhaseView, RunView
from training.callbacks.files import MLLog
from training.callbacks.stopping import EarlyStopping
from training.callbacks.writers import MLflow, TensorBoard, WeightsAndBiases
from training.config.schema import PartRecord, imported, part_in
from training.config.secrets import resolved

__all__ = ["CALLBACKS", "Callback", "CallbackRecord", "Event", "PhaseView", "RunView"]

CALLBACKS: dict[str, type[Callback]] = {
    "early_stopping": EarlyStopping,
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "mllog": MLLog,
}


class CallbackRecord(PartRecord):
    """A callback of a configuration: its name, and its own options."""

    name: Annotated[str, part_in(CALLBACKS, "callback")]
    """A name of ``training.callbacks.CALLBACKS``, or an import path."""

    @model_validator(mode="after")
    def _takes_these_options(self) -> "CallbackRecord":
        if imported(CALLBACKS, "callback", self.name) is not None:
            self.check()
            if self.name in CALLBACKS:
                CALLBACKS[self.name](**self.options)
        return self

    def check(self) -> None:
        """Import it; raise ``InvalidArgument`` unless it is a callback that takes these options."""
        kind = registry.resolve(CALLBACKS, "callback", self.name, subclass_of=Callback)
        registry.check_options(f"callback {self.name}", kind, self.options)

    def make(self) -> Callback:
        """Return the callback; raises a ``ValueError`` of one line if an option is invalid."""
        try:
            self.check()
            return registry.resolve(CALLBACKS, "callback", self.name)(**resolved(self.options))
        except ValueError as error:
            raise ValueError(f"callback {self.name}: {error}") from error
