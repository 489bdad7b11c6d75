"""The packages of cloudtrain under one name: ``cloudtrain.Trainer``, ``cloudtrain.commlib``, and so on.

``training`` and ``pto`` are names that a project may have, too. Where a folder of such a name comes first on
``sys.path``, an access here raises an ``ImportError`` that names it::

    import cloudtrain

    summary = cloudtrain.Trainer("configs/digits.yaml").fit()
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import commlib
    import datacache
    import pto
    import training
    from training.run.trainer import Trainer

__all__ = ["Trainer", "commlib", "datacache", "pto", "training"]


def __getattr__(name: str) -> Any:
    """Import a package when it is accessed; only ``Trainer`` loads TensorFlow."""
    if name not in __all__:
        raise AttributeError(f"module 'cloudtrain' has no attribute {name!r}")
    return _package("training").Trainer if name == "Trainer" else _package(name)


def _package(name: str) -> Any:
    """Import one of the packages beside this file; ``ImportError`` where another of its name comes first."""
    module = import_module(name)
    here, found = Path(__file__).parent / name, [Path(folder) for folder in module.__path__]
    if here.resolve() not in [folder.resolve() for folder in found]:
        raise ImportError(
            f"{name}: expected the package of cloudtrain in {here}, found another in {found[0]}, which comes "
            f"first on sys.path: rename it, or start where it is not seen"
        )
    return module


def main() -> None:
    """Run the command line."""
    try:
        _package("training")
    except ImportError as error:
        sys.exit(f"cloudtrain: {error}")
    from training.__main__ import main as run

    run()
