"""Import TensorFlow for a run, without start-up messages and without optional packages."""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from commlib.tf_logging import without_noise

# Imported by Keras and TensorFlow where they are installed, for data frames, sparse matrices, galleries of
# images and estimators. That is a third of the time of the import, on each rank, at each start.
OPTIONAL = ("matplotlib", "pandas", "scipy.sparse", "sklearn")


def import_tensorflow() -> None:
    """Import TensorFlow, and Keras on it; afterwards they log errors only.

    Keras then takes no data frames of pandas, draws nothing, and has no wrappers for scikit-learn.
    """
    os.environ["KERAS_BACKEND"] = "tensorflow"
    with without_noise(), _without(OPTIONAL), _uncollected():
        import keras  # noqa: F401
        import tensorflow as tf

        tf.config.list_physical_devices()  # the search for GPUs logs lines of its own


@contextmanager
def _without(packages: tuple[str, ...]) -> Iterator[None]:
    """Hide packages from imports in the block, except those that are imported already."""
    hidden = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: there is no such module
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Collect no garbage in the block, and exclude its objects from later collections."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if is_on:
            gc.enable()
