"""Crops: held against a float64 reference, against Pillow, and to what was promised of their randomness."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from datacache.augmentation import Augmentation, CentreCrop
from datacache.resampling import PackedImages
from tests.extent import more

SHAPES = [(1, 1), (1, 9), (9, 1), (2, 2), (3, 5), (8, 8), (33, 47), (128, 171), (150, 100)]


def images_of(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, shape, dtype=np.uint8) for shape in shapes]


def applied(crop, images, ids=None, epoch=0, seed=1):
    """What ``crop`` makes of these images, whose ids are 0, 1, … unless told."""
    ids = np.arange(len(images)) if ids is None else np.array(ids)
    out = np.empty((len(images), crop.input_size, crop.input_size, images[0].shape[2]), crop.dtype)
    crop.apply(PackedImages.of(images), ids, epoch, seed, out)
    return out


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


def of_pillow(image, box, size):
    """The levels of a crop as Pillow computes them on images of float32."""
    planes = [Image.fromarray(image[:, :, channel].astype(np.float32)) for channel in range(image.shape[2])]
    resized = [plane.resize((size, size), Image.Resampling.BILINEAR, box=tuple(box)) for plane in planes]
    return np.stack([np.asarray(plane) for plane in resized], axis=2)


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
    boxes, mirrored = crop.boxes(PackedImages.of(images).shapes, np.arange(len(images)), 0, 1)
    assert mirrored.any() and not mirrored.all()
    for image, box, mirror, levels in zip(images, boxes, mirrored, applied(crop, images), strict=True):
        expected = reference(image, box, size)
        expected = expected[:, ::-1] if mirror else expected
        assert np.abs(levels - expected).max() <= rounding(image, size)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [7, *more(1, 96)])
def test_levels_are_those_of_pillow(size, channels):
    images = images_of([(*shape, channels) for shape in SHAPES])
    crop = Augmentation(size, mirror=False)
    boxes, _ = crop.boxes(PackedImages.of(images).shapes, np.arange(len(images)), 0, 1)
    for image, box, levels in zip(images, boxes, applied(crop, images), strict=True):
        # Pillow takes a box as float32: an edge is off by 2^-24 of its place at most, and a level changes by
        # no more than twice the 255 for each pixel that the box moves.
        moved = 2 * 2 * 255 * 2.0**-24 * max(image.shape)
        assert np.abs(levels - of_pillow(image, box, size)).max() <= rounding(image, size) + moved


@pytest.mark.parametrize("level", [1, 255])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_an_image_of_one_level_stays_of_that_level_up_to_rounding(level, dtype):
    images = [np.full((*shape, 3), level, np.uint8) for shape in SHAPES]
    inputs = applied(Augmentation(11, dtype=dtype), images)
    # Float32 weights add up to one but for their rounding; a level of uint8 rounds that away.
    tolerance = 0 if dtype == "uint8" else max(rounding(image, 11) for image in images)
    assert np.abs(inputs.astype(np.float64) - level).max() <= tolerance


def test_shrinking_does_not_alias():
    stripes = np.zeros((64, 64, 1), np.uint8)
    stripes[:, ::2] = 200
    inner = applied(CentreCrop(8, ratio=1.0), [stripes])[0, :, 1:-1]
    assert np.abs(inner - 100).max() <= rounding(stripes, 8)  # without a filter: all 0, or all 200


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


@pytest.mark.parametrize(("height", "width"), [(128, 128), (128, 171), (171, 128), (100, 300)])
def test_areas_and_aspects_are_those_of_boxes_drawn_until_they_fit(height, width):
    boxes, _ = boxes_of(Augmentation(96), height, width)
    sides = np.stack([boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]])
    drawn = sides[:, (sides[0] < width) & (sides[1] < height)]  # the box of last resort fills one side
    rng = np.random.default_rng(5)
    areas = rng.uniform(0.08, 1, 400_000) * height * width
    aspects = np.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3), 400_000))
    expected = np.sqrt(areas * np.stack([aspects, 1 / aspects]))
    expected = expected[:, (expected[0] <= width) & (expected[1] <= height)]
    for measure in (np.multiply, np.divide):
        ours, theirs = measure(*drawn), measure(*expected)
        # Both are samples: six standard deviations of the mean of the smaller one.
        assert abs(ours.mean() - theirs.mean()) < 6 * theirs.std() / math.sqrt(len(ours))


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


def test_neighbours_draw_unrelated_boxes():
    boxes, mirrored = boxes_of(Augmentation(96), 128, 171)
    for column in [*boxes.T, mirrored]:
        assert abs(np.corrcoef(column[:-1], column[1:])[0, 1]) < 5 / math.sqrt(20_000)


def test_an_input_depends_on_its_image_and_id_only():
    images = images_of([(*SHAPES[i % len(SHAPES)], 3) for i in range(40)])
    ids = np.random.default_rng(2).integers(0, 10**12, 40)
    crop = Augmentation(20)
    together = applied(crop, images, ids)
    order = np.random.default_rng(1).permutation(40)
    assert (applied(crop, [images[i] for i in order], ids[order]) == together[order]).all()
    for i in range(40):
        assert (applied(crop, [images[i]], [ids[i]])[0] == together[i]).all()


def test_threads_make_the_same_inputs():
    images = images_of([(*SHAPES[i % len(SHAPES)], 3) for i in range(64)])
    crop = Augmentation(48)
    with ThreadPoolExecutor(8) as pool:
        inputs = list(pool.map(lambda epoch: applied(crop, images, epoch=epoch), list(range(6)) * 4))
    for i, made in enumerate(inputs):
        assert (made == applied(crop, images, epoch=i % 6)).all()


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


def test_images_may_lie_anywhere_in_their_buffer():
    images = images_of([(5, 6, 3), (7, 4, 3)])
    pixels = np.full(1000, 99, np.uint8)
    pixels[10:100], pixels[500:584] = images[0].reshape(-1), images[1].reshape(-1)
    pixels.flags.writeable = False  # as a database's pages are
    packed = PackedImages(pixels, np.array([500, 10]), np.array([[7, 4, 3], [5, 6, 3]]))
    out = np.empty((2, 8, 8, 3), np.float32)
    Augmentation(8).apply(packed, np.array([1, 0]), 0, 1, out)
    assert (out == applied(Augmentation(8), images)[::-1]).all()


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
    ("out", "ids", "error"),
    [
        (np.empty((1, 8, 8, 3), np.float32), 1, r"out: expected C-contiguous float32 \(2, 8, 8, 3\)"),
        (np.empty((2, 8, 9, 3), np.float32), 2, r"out: expected C-contiguous float32 \(2, 8, 8, 3\)"),
        (np.empty((2, 8, 8, 3), np.float16), 2, "out: expected C-contiguous float32 .*, got float16"),
        (np.empty((2, 8, 3, 8), np.float32).swapaxes(2, 3), 2, "out: expected C-contiguous"),
        (np.empty((2, 8, 8, 1), np.float32), 2, "images: expected 1 channels, as out has, got 3"),
        (np.empty((2, 8, 8, 3), np.float32), 1, "ids: expected 2, as many as images, got 1"),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(out, ids, error):
    images = PackedImages.of(images_of([(5, 6, 3), (7, 4, 3)]))
    with pytest.raises(ValueError, match=error):
        Augmentation(8).apply(images, np.arange(ids if "ids" in error else 2), 0, 1, out)


def test_a_mean_for_other_channels_is_refused():
    with pytest.raises(ValueError, match="mean, std: expected 1 or 3 numbers, as out's channels, got 2"):
        applied(Augmentation(8, (1.0, 2.0), (1.0, 2.0)), images_of([(5, 6, 3)]))


@pytest.mark.parametrize(
    ("start", "shape", "error"),
    [
        (-1, (2, 2, 3), "starts: expected images within 12 bytes, got -1 to 11"),
        (1, (2, 2, 3), "starts: expected images within 12 bytes, got 1 to 13"),
        (0, (2, 0, 3), r"shapes: expected height, width and channels of at least 1, got \[2 0 3\]"),
    ],
)
def test_a_buffer_that_does_not_hold_its_images_is_refused(start, shape, error):
    with pytest.raises(ValueError, match=error):
        PackedImages(np.zeros(12, np.uint8), np.array([start]), np.array([shape]))


@pytest.mark.parametrize("image", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3), np.float32)])
def test_what_is_no_image_is_refused(image):
    with pytest.raises(ValueError, match=r"images: expected uint8 \(height, width, channels\), got"):
        PackedImages.of([image])
