"""A part of a run that has state: a checkpoint is the states of the parts by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from training.checkpoint.stored import Checkpoint


class OtherModel(ValueError):
    """A checkpoint is of another model; one line names the first tensor that differs."""


class OtherOptimizer(ValueError):
    """A checkpoint is of another optimizer; one line with what was expected."""


@dataclass(frozen=True)
class PartState:
    """The state of a part, by name: ``shared`` is equal on all ranks, ``own`` is of this rank."""

    shared: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)


class Part(Protocol):
    """A part of a run with state: the model, the optimizer, the exchange."""

    def state_dict(self) -> PartState:
        """Return the state, whose names differ from those of other parts; collective."""

    def check_state(self, shared: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` where the shared state of a checkpoint is of another run; change nothing."""

    def load_state_dict(self, checkpoint: Checkpoint) -> list[str]:
        """Restore the part from a checkpoint; return a line for each difference.

        ``checkpoint.own`` is ``None`` where another number of ranks wrote the checkpoint.
        """
