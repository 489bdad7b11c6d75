"""Import TensorFlow for a run without its start-up messages."""

import os
from importlib.util import find_spec

from commlib.tf_logging import without_noise


def import_tensorflow() -> None:
    """Import TensorFlow, Keras on it, and Horovod if installed; afterwards they log errors only."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    with without_noise():
        import keras  # noqa: F401
        import tensorflow as tf

        if find_spec("horovod") is not None:
            import horovod.tensorflow  # noqa: F401

        tf.config.list_physical_devices()  # the search for GPUs logs lines of its own
