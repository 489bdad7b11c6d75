"""TensorFlow imported for a run: without the lines of its start."""

import os

from commlib.tf_logging import without_noise


def import_tensorflow() -> None:
    """Import TensorFlow, Keras on it, and Horovod; from here on they log errors only."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    with without_noise():
        import horovod.tensorflow
        import keras  # noqa: F401
        import tensorflow as tf

        tf.config.list_physical_devices()  # the search for GPUs has its own lines
        assert horovod.tensorflow.size is not None
