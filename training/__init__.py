"""Training with Horovod: one run of a configuration, phase after phase.

    import cloudtrain

    summary = cloudtrain.Trainer("configs/digits.yaml").fit()

on all ranks, or ``cloudtrain launch -np 4 configs/digits.yaml``.
"""

import os
from typing import TYPE_CHECKING, Any

# Where colorama is installed (sacrebleu requires it), Numba makes it print escape sequences to standard
# output when a process exits, even after JSON. Numba reads this variable when it is imported.
os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")

if TYPE_CHECKING:
    from training.run.trainer import Trainer

__all__ = ["Trainer"]


def __getattr__(name: str) -> Any:
    """Import the names that need TensorFlow only when they are accessed."""
    if name != "Trainer":
        raise AttributeError(f"module 'training' has no attribute {name!r}")
    from training.run.trainer import Trainer

    return Trainer
