"""Samples from memory, at the size that a phase asks for."""

import numpy as np
import pytest

from datacache import ArraySource, DataCache, resize


def source(samples: int = 10) -> ArraySource:
    """Image ``i`` is all ``i``, label ``100 + i``."""
    images = np.broadcast_to(
        np.arange(samples, dtype=np.uint8)[:, None, None, None], (samples, 8, 8, 1)
    ).copy()
    return ArraySource(images, np.arange(samples) + 100)


@pytest.mark.parametrize("input_size", [1, 6, 8, 13])
def test_batches_hold_the_resized_images_with_their_own_labels(input_size):
    cache = DataCache(source(), input_size)
    batches = list(cache.batches(rank=1, size=2, epoch=5, batch_size=2, seed=3))
    assert len(batches) == 2
    for batch in batches:
        assert batch.images.shape == (2, input_size, input_size, 1)
        assert batch.images.dtype == np.uint8
        assert (batch.images == (batch.labels - 100)[:, None, None, None]).all()


def test_evaluation_has_a_fixed_order_and_a_last_batch_that_is_not_full():
    cache = DataCache(source(), 8)
    labels = [batch.labels.tolist() for batch in cache.evaluation_batches(rank=0, size=1, batch_size=4)]
    assert labels == [[100, 101, 102, 103], [104, 105, 106, 107], [108, 109]]


def test_resizing_keeps_the_mean_brightness_and_every_channel_apart():
    generator = np.random.default_rng(5)
    images = generator.integers(0, 256, (3, 24, 24, 3)).astype(np.uint8)
    small = resize(images, 12)
    # halving averages areas; rounding to uint8 shifts a mean by at most one half
    np.testing.assert_allclose(small.mean((1, 2)), images.mean((1, 2)), atol=3)
    assert (resize(images[..., :1], 12) == small[..., :1]).all()


def test_the_source_is_read_once():
    class Counted(ArraySource):
        reads = 0

        def read(self, ids):
            self.reads += len(ids)
            return super().read(ids)

    counted = Counted(np.zeros((10, 8, 8, 1), np.uint8), np.arange(10))
    cache = DataCache(counted, 6)
    for epoch in range(3):
        assert len(list(cache.batches(0, 1, epoch, batch_size=5, seed=1))) == 2
    assert counted.reads == 10


def test_what_a_caller_does_to_a_batch_does_not_reach_the_cache():
    cache = DataCache(source(), 8)
    for batch in cache.evaluation_batches(0, 1, batch_size=10):
        batch.images[...] = 255
    assert [batch.images.max() for batch in cache.evaluation_batches(0, 1, batch_size=10)] == [9]


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (
            np.zeros((2, 8, 8), np.uint8),
            np.zeros(2, int),
            r"images: expected uint8 .*, got uint8 \(2, 8, 8\)",
        ),
        (np.zeros((2, 8, 8, 1)), np.zeros(2, int), r"images: expected uint8 .*, got float64"),
        (np.zeros((2, 8, 8, 1), np.uint8), np.zeros(3, int), r"labels: expected shape \(2,\), got \(3,\)"),
    ],
)
def test_arrays_that_are_no_images_are_refused(images, labels, message):
    with pytest.raises(ValueError, match=message):
        ArraySource(images, labels)
