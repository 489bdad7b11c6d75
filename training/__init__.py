"""Training with Horovod: one run of a configuration, phase after phase.

    from training import Trainer

    summary = Trainer("configs/digits.yaml").fit()

on all ranks, or ``cloudtrain launch -np 4 configs/digits.yaml``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.run.trainer import Trainer

__all__ = ["Trainer"]


def __getattr__(name: str) -> Any:
    """Import the names that need TensorFlow only when they are accessed."""
    if name != "Trainer":
        raise AttributeError(f"module 'training' has no attribute {name!r}")
    from training.run.trainer import Trainer

    return Trainer
