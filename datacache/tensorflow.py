"""Batches as a ``tf.data.Dataset``; the only file of datacache that imports TensorFlow."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from datacache.augmentation import Crop
from datacache.batches import Batch


def as_dataset(batches: Callable[[], Iterable[Batch]], crop: Crop, channels: int) -> Any:
    """Return a data set of ``(images, labels, counts)``: one element is one batch, copied once."""
    side = crop.input_size
    signature = (
        tf.TensorSpec((None, side, side, channels), crop.dtype),
        tf.TensorSpec((None,), tf.int64),
        tf.TensorSpec((None,), tf.bool),
    )

    def elements() -> Iterator[tuple[Any, Any, Any]]:
        for batch in batches():
            yield batch.images, batch.labels, batch.counts

    return tf.data.Dataset.from_generator(elements, output_signature=signature)
