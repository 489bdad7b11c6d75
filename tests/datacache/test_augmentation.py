"""Crops: held against a float64 reference, against Pillow, and to what was promised of their randomness."""

import math

import numpy as np
import pytest

from datacache.augmentation import Augmentation, CentreCrop, _resample
from datacache.batches import BatchSpec, Pools
from tests.extent import more

SHAPES = [(1, 1), (1, 9), (9, 1), (2, 2), (3, 5), (8, 8), (33, 47), (128, 171), (150, 100)]


def images_of(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, shape, dtype=np.uint8) for shape in shapes]


def applied(crop, images, ids=None, epoch=0, seed=1):
    """What ``crop`` makes of these images, whose ids are 0, 1, … unless told."""
    ids = np.arange(len(images)) if ids is None else np.array(ids)
    spec = BatchSpec(ids, np.ones(len(ids), bool), epoch, step=0, rank=0, world_size=1, seed=seed)
    return crop.arrays(images, ids, spec, Pools())[0]


def boxes_of(crop, height, width, samples=20_000, seed=1, epoch=0):
    shapes = np.tile(np.array([height, width, 3]), (samples, 1))
    return crop.boxes(shapes, np.arange(samples), epoch, seed)


def weights(length, low, high, size):
    """The documented filter as a float64 matrix ``(size, length)``, every pixel asked."""
    step = (high - low) / size
    centres = low + (np.arange(size) + 0.5) * step
    distances = np.abs(np.arange(length) + 0.5 - centres[:, np.newaxis])
    triangle = np.maximum(0, 1 - distances / max(step, 1))
    return triangle / triangle.sum(axis=1, keepdims=True)


def reference(image, box, size):
    """The levels of a crop in float64."""
    left, top, right, bottom = box
    rows, columns = weights(image.shape[0], top, bottom, size), weights(image.shape[1], left, right, size)
    return np.einsum("yh,hwc,xw->yxc", rows, image.astype(np.float64), columns)


def rounding(image, size):
    """What float32 may be off: each tap's weight, product and sum are rounded by at most 2^-24 of 255."""
    taps = sum(math.ceil(2 * max(length / size, 1)) for length in image.shape[:2])
    return 2 * taps * 255 * 2.0**-24


# -------------------------------------------------------------------------------------- levels


@pytest.mark.parametrize("channels", [1, 3, *more(2, 4)])
@pytest.mark.parametrize("size", [1, 32, *more(7, 96)])
def test_levels_are_those_of_the_documented_filter(size, channels):
    images = images_of([(*shape, channels) for shape in SHAPES])
    crop = Augmentation(size)
    boxes, mirrored = crop.boxes(np.array([image.shape for image in images]), np.arange(len(images)), 0, 1)
    assert mirrored.any() and not mirrored.all()
    for image, box, mirror, levels in zip(images, boxes, mirrored, applied(crop, images), strict=True):
        expected = reference(image, box, size)
        expected = expected[:, ::-1] if mirror else expected
        assert np.abs(levels - expected).max() <= rounding(image, size)


def test_a_centre_crop_is_the_centre_of_the_resized_image():
    image = images_of([(128, 192, 3)])[0]
    # The shorter side to 112 / 0.875 = 128: as it is; then the centre.
    assert (applied(CentreCrop(112, ratio=0.875), [image])[0] == image[8:120, 40:152]).all()


# ------------------------------------------------------------------------- normalisation, types


def test_levels_are_normalised_by_channel():
    image = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    mean, std = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
    inputs = applied(CentreCrop(16, mean, std, ratio=1.0), [image])[0]
    expected = (image - np.array(mean)) / std
    # Roundings of mean (up to 124), difference (up to 152) and quotient, by 2^-24 of each.
    assert np.abs(inputs - expected).max() <= 2.0**-24 * (124 + 152 + 3 * 152) / min(std)
    exact = (image - np.float32(mean)) * np.float32(1 / np.array(std))
    assert (inputs == exact).all()


def test_every_float16_and_what_is_between_two_rounds_to_the_nearest_even():
    # Enlarging nothing, the levels themselves are normalised: all 256, by many means and deviations.
    image = np.arange(256, dtype=np.uint8).reshape(16, 16, 1)
    rng = np.random.default_rng(3)
    for std in 2.0 ** rng.uniform(-7, 30, 300):
        values = {"mean": (float(rng.uniform(0, 255)),), "std": (float(std),), "ratio": 1.0}
        wide, narrow = (
            applied(CentreCrop(16, dtype=dtype, **values), [image]) for dtype in ("float32", "float16")
        )
        assert (narrow.view(np.uint16) == wide.astype(np.float16).view(np.uint16)).all()


def test_uint8_is_the_level_rounded_to_the_nearest():
    images = images_of([(*shape, 3) for shape in SHAPES])
    levels = applied(Augmentation(24), images)
    assert (applied(Augmentation(24, dtype="uint8"), images) == np.floor(levels + np.float32(0.5))).all()


# ------------------------------------------------------------------------------------- randomness


@pytest.mark.parametrize(
    ("height", "width"), [(1, 1), (1, 50), (128, 128), (128, 171), (375, 500), (500, 20)]
)
def test_boxes_are_within_the_image_and_of_the_area_and_aspect_asked_for(height, width):
    boxes, _ = boxes_of(Augmentation(96, area=(0.2, 0.9), aspect=(0.5, 2.5)), height, width)
    left, top, right, bottom = boxes.T
    assert (left >= 0).all() and (top >= 0).all() and (right <= width).all() and (bottom <= height).all()
    aspects, areas = (right - left) / (bottom - top), (right - left) * (bottom - top) / (height * width)
    # A side is the difference of two float64 of at most 500: right to 2^-43 of at least 0.3 pixels.
    assert aspects.min() >= 0.5 - 1e-9 and aspects.max() <= 2.5 + 1e-9
    last_resort = min(width, 2.5 * height) * min(height, width / 0.5) / (width * height)
    assert areas.min() >= min(0.2, last_resort) - 1e-9 and areas.max() <= 0.9 + 1e-9


def test_places_are_uniform():
    boxes, _ = boxes_of(Augmentation(96, area=(0.1, 0.3)), 100, 140)
    for low, high, length in [(0, 2, 140), (1, 3, 100)]:
        shares = boxes[:, low] / (length - (boxes[:, high] - boxes[:, low]))
        counts = np.histogram(shares, bins=20, range=(0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 19 + 5 * math.sqrt(2 * 19)


def test_what_never_fits_is_the_largest_box_of_an_allowed_aspect_in_the_centre():
    crop = Augmentation(96, area=(1.0, 1.0), aspect=(1.0, 1.0))
    boxes, _ = boxes_of(crop, 100, 300, samples=50)
    assert boxes.tolist() == [[100, 0, 200, 100]] * 50


def test_half_of_the_images_are_mirrored_independently_of_their_boxes():
    boxes, mirrored = boxes_of(Augmentation(96), 128, 171)
    deviation = 0.5 / math.sqrt(20_000)
    assert abs(mirrored.mean() - 0.5) < 5 * deviation
    for column in boxes.T:
        assert abs(np.corrcoef(column, mirrored)[0, 1]) < 5 * 2 * deviation
    assert not boxes_of(Augmentation(96, mirror=False), 128, 171)[1].any()


@pytest.mark.parametrize("changed", [{"epoch": 1}, {"seed": 2}])
def test_another_epoch_or_seed_draws_other_boxes(changed):
    before, mirrored_before = boxes_of(Augmentation(96), 128, 171)
    after, mirrored_after = boxes_of(Augmentation(96), 128, 171, **changed)
    assert (before != after).any(axis=1).all()
    for column_before, column_after in zip(before.T, after.T, strict=True):
        assert abs(np.corrcoef(column_before, column_after)[0, 1]) < 5 / math.sqrt(20_000)
    assert abs((mirrored_before == mirrored_after).mean() - 0.5) < 5 * 0.5 / math.sqrt(20_000)


def test_an_input_depends_on_its_image_and_id_only():
    images = images_of([(*SHAPES[i % len(SHAPES)], 3) for i in range(40)])
    ids = np.random.default_rng(2).integers(0, 10**12, 40)
    crop = Augmentation(20)
    together = applied(crop, images, ids)
    order = np.random.default_rng(1).permutation(40)
    assert (applied(crop, [images[i] for i in order], ids[order]) == together[order]).all()
    for i in range(40):
        assert (applied(crop, [images[i]], [ids[i]])[0] == together[i]).all()


def test_images_that_are_views_of_one_array_are_cropped_where_they_are():
    base = np.random.default_rng(5).integers(0, 256, 40_000, dtype=np.uint8)
    places, shapes = [17, 9000, 4000, 17], [(33, 47, 3), (20, 20, 3), (40, 40, 3), (5, 9, 3)]
    views = [
        base[at : at + math.prod(shape)].reshape(shape) for at, shape in zip(places, shapes, strict=True)
    ]
    others = [views[0][::-1], np.asfortranarray(views[1]), views[2].astype(np.uint8), views[3][:, ::2]]
    pools, counted = Pools(), np.ones(4, bool)
    spec = BatchSpec(np.arange(4), counted, epoch=0, step=0, rank=0, world_size=1, seed=1)
    for images in (views, [views[2], *others], [image[:, :, 0:3] for image in others[:1]]):
        own = BatchSpec(np.arange(len(images)), counted, epoch=0, step=0, rank=0, world_size=1, seed=1)
        (inputs, _), copied = Augmentation(20).arrays(images, own.ids, own, pools), [*map(np.copy, images)]
        assert (inputs == applied(Augmentation(20), copied)).all()
    Augmentation(20).arrays(views, np.arange(4), spec, only_outputs := Pools())
    assert [shape for shape, _ in only_outputs._free] == [(4, 20, 20, 3)]  # no memory for a copy
    base.flags.writeable = False
    compiled = len(_resample.signatures)
    applied(Augmentation(20), [base[at : at + 300].reshape(10, 10, 3) for at in places])
    assert len(_resample.signatures) == compiled


def test_boxes_are_the_same_for_ever():
    """Golden values: a run that resumes under another version must not see other crops."""
    boxes, mirrored = Augmentation(96).boxes(np.array([[128, 171, 3]] * 3), np.array([0, 1, 10**12]), 3, 7)
    expected = [
        [51.15445880185261, 14.762373231478419, 141.63988993723018, 90.69766362917694],
        [53.350746022058125, 1.241520210577706, 164.82634024860613, 126.84253659359308],
        [26.643857338892275, 4.568121607765727, 85.64095338416745, 77.20177253492234],
    ]
    assert np.abs(boxes - expected).max() < 1e-9  # exp and log of another machine may differ in the last bit
    assert mirrored.tolist() == [False, True, False]


# ----------------------------------------------------------------------------------------- borders


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"ratio": 0.0}, "ratio: expected a share of the shorter side"),
        ({"ratio": math.nan}, "ratio: expected a share of the shorter side"),
        ({"input_size": 0}, "input_size: expected at least 1 pixel, got 0"),
        ({"dtype": "float64"}, "dtype: expected one of uint8, float16, float32, got 'float64'"),
        ({"mean": (1.0,)}, r"mean, std: expected equally many numbers, got \(1.0,\) and None"),
        ({"mean": (1.0,), "std": (0.0,)}, r"std: expected numbers above 0, got \(0.0,\)"),
        ({"mean": (1.0,), "std": (math.nan,)}, "std: expected numbers above 0"),
        ({"mean": (1.0,), "std": (1.0,), "dtype": "uint8"}, "mean, std: expected none for dtype uint8"),
        ({"mean": (0.0,), "std": (1e-3,), "dtype": "float16"}, "that float16 can hold, got 2.55e.05"),
        ({"area": (0.0, 1.0)}, r"area: expected .* got \(0.0, 1.0\)"),
        ({"area": (0.6, 0.5)}, r"area: expected .* got \(0.6, 0.5\)"),
        ({"aspect": (2.0, 1.0)}, r"aspect: expected .* got \(2.0, 1.0\)"),
    ],
)
def test_impossible_settings_are_refused(settings, error):
    with pytest.raises(ValueError, match=error):
        (CentreCrop if "ratio" in settings else Augmentation)(**{"input_size": 8, **settings})


@pytest.mark.parametrize(
    "images",
    [
        [np.zeros((4, 4), np.uint8)],
        [np.zeros((4, 4, 3), np.float32)],
        [np.zeros((4, 4, 1), np.uint8), np.zeros((4, 4, 3), np.uint8)],
    ],
)
def test_what_is_no_image_or_of_other_channels_is_refused(images):
    with pytest.raises(ValueError, match=r"images: expected uint8 \(height, width, channels\), of .*, got"):
        Augmentation(8).arrays(images, np.zeros(len(images)), None, Pools())
    with pytest.raises(ValueError, match="mean, std: expected 1 or 3 numbers, one a channel, got 2"):
        applied(Augmentation(8, (1.0, 2.0), (1.0, 2.0)), images_of([(5, 6, 3)]))
