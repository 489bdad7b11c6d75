"""Payloads become arrays: every kind of picture, every way to be broken."""

import io
import random
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from datacache.errors import BadSample
from datacache.preprocessing import Preprocessing
from tests.extent import more

RED = (200, 30, 90)


def encoded(picture: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def photograph(width: int, height: int) -> Image.Image:
    """A smooth picture: red rises from left to right, green from top to bottom, blue is constant."""
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[..., 0] = np.linspace(0, 255, width)[None, :]
    pixels[..., 1] = np.linspace(0, 255, height)[:, None]
    pixels[..., 2] = 77
    return Image.fromarray(pixels)


@pytest.mark.parametrize("side", [31, 300, *more(48, 96, 128, 375)])
@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), *more((375, 375), (1200, 380))])
def test_the_shorter_side_is_what_was_asked_for_and_the_aspect_is_kept(width, height, side):
    pixels = Preprocessing("image", side).apply(encoded(photograph(width, height), "JPEG"))
    assert min(pixels.shape[:2]) == side
    assert pixels.dtype == np.uint8
    assert pixels.shape[2] == 3
    assert pixels.shape[1] / pixels.shape[0] == pytest.approx(width / height, rel=0.5 / side)


@pytest.mark.parametrize("side", [24, 100, *more(60, 64, 187)])
def test_decoding_a_jpeg_at_a_part_of_its_size_gives_what_decoding_it_whole_gives(side):
    picture = photograph(500, 375)
    fast = Preprocessing("image", side).apply(encoded(picture, "JPEG", quality=95))
    whole = Preprocessing("image", side).apply(encoded(picture, "PNG"))
    # JPEG at quality 95 errs by two or three of 256 levels; the border of a smooth ramp by a few more
    difference = np.abs(fast.astype(int) - whole)
    assert difference.mean() < 1
    assert difference.max() <= 8


@pytest.mark.parametrize("side", [200, 375, 4000, None])
def test_a_picture_is_never_enlarged(side):
    picture = photograph(250, 200)
    pixels = Preprocessing("image", side).apply(encoded(picture, "PNG"))
    assert (pixels == np.asarray(picture)).all()


def test_shrinking_averages_instead_of_dropping_pixels():
    checks = np.indices((256, 256)).sum(0) % 2 * 255
    payload = encoded(Image.fromarray(checks.astype(np.uint8)), "PNG")
    small = Preprocessing("image", 32).apply(payload)
    assert np.abs(small[2:-2, 2:-2].astype(int) - 127).max() <= 2


def _palette_with_transparency() -> bytes:
    picture = Image.new("P", (40, 30), 1)
    picture.putpalette([0, 0, 0, *RED])
    return encoded(picture, "PNG", transparency=bytes([255, 10]))


PLAIN = Image.new("RGB", (40, 30), RED)
PLAIN_PICTURES = {
    "PNG": (encoded(PLAIN, "PNG"), 0),
    "BMP": (encoded(PLAIN, "BMP"), 0),
    "PPM": (encoded(PLAIN, "PPM"), 0),
    "TIFF": (encoded(PLAIN, "TIFF"), 0),
    "GIF": (encoded(PLAIN, "GIF"), 0),
    "alpha": (encoded(Image.new("RGBA", (40, 30), (*RED, 5)), "PNG"), 0),
    "palette": (encoded(PLAIN.quantize(4), "PNG"), 0),
    "transparent palette": (_palette_with_transparency(), 0),
    "CMYK in JPEG": (encoded(PLAIN.convert("CMYK"), "JPEG"), 3),
    "CMYK in TIFF": (encoded(PLAIN.convert("CMYK"), "TIFF"), 3),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("payload", "levels_off"), PLAIN_PICTURES.values(), ids=PLAIN_PICTURES)
def test_colours_survive_every_format(payload, levels_off):
    pixels = Preprocessing("image", 30).apply(payload)
    assert pixels.shape == (30, 40, 3)
    assert np.abs(pixels.astype(int) - RED).max() <= levels_off


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_grey_pictures_have_three_equal_channels(kind):
    pixels = Preprocessing("image", 30).apply(encoded(photograph(60, 40).convert("L"), kind))
    assert pixels.shape == (30, 45, 3)
    assert (pixels == pixels[..., :1]).all()


def test_sixteen_bits_are_scaled_and_not_cut_off():
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)
    pixels = Preprocessing("image").apply(encoded(Image.fromarray(np.tile(ramp, (4, 1))), "PNG"))
    assert (pixels[0, :, 0] == np.arange(256)).all()


def test_orientation_in_exif_is_ignored():
    exif = Image.Exif()
    exif[0x0112] = 6  # "rotate by 90°"
    pixels = Preprocessing("image", 30).apply(encoded(photograph(80, 60), "JPEG", exif=exif))
    assert pixels.shape == (30, 40, 3)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "no picture: 0 bytes"),
        (b"hello", r"no picture: 5 bytes that begin with 68 65 6c 6c 6f; known: JPEG, PNG"),
        (encoded(photograph(100, 80), "JPEG")[:700], r"JPEG of 100 × 80, 700 bytes: image file is truncated"),
        (encoded(photograph(100, 80), "PNG")[:-60], r"PNG of 100 × 80, .*"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no picture"),
        (encoded(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"), "TIFF of 4 × 4.*floating-point"),
        (
            encoded(Image.fromarray(np.full((4, 4), 70_000, np.int32)), "TIFF"),
            "from 70000 to 70000: expected 0 to 65535",
        ),
    ],
)
def test_what_is_no_picture_is_named(payload, message):
    with pytest.raises(BadSample, match=message):
        Preprocessing("image", 32).apply(payload)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # Pillow remarks on damaged TIFF tags
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP"])
def test_damaged_bytes_give_a_picture_or_a_bad_sample_and_nothing_else(kind):
    whole = encoded(photograph(64, 48), kind)
    randomness = random.Random(7)
    bad = 0
    for _ in range(150):
        broken = bytearray(whole[: randomness.randint(1, len(whole))])
        for _ in range(randomness.randint(0, 4)):
            broken[randomness.randrange(min(len(broken), 200))] = randomness.randrange(256)
        try:
            pixels = Preprocessing("image", 16).apply(bytes(broken))
        except BadSample:
            bad += 1
        else:
            assert pixels.dtype == np.uint8
            assert pixels.shape[2] == 3
    assert bad > 30


def test_arrays_are_views_of_the_payload_with_their_channels_last():
    values = np.arange(8 * 6 * 2, dtype=np.uint8)
    for side in (None, 6, 8):
        assert (
            Preprocessing("array", side).apply(values.tobytes(), (8, 6, 2)) == values.reshape(8, 6, 2)
        ).all()
    assert Preprocessing("array").apply(values.tobytes(), (8, 12)).shape == (8, 12, 1)


def test_arrays_are_shrunk_each_channel_for_itself():
    pixels = np.empty((40, 60, 5), np.uint8)
    pixels[...] = np.arange(5) * 50
    small = Preprocessing("array", 8).apply(pixels.tobytes(), pixels.shape)
    assert small.shape == (8, 12, 5)
    assert (small == np.arange(5) * 50).all()


def test_arrays_of_another_size_than_their_shape_are_bad_samples():
    with pytest.raises(BadSample, match=r"array \(8, 8\): expected 64 bytes, got 63"):
        Preprocessing("array").apply(bytes(63), (8, 8))
    with pytest.raises(BadSample, match=r"shape: expected \(height, width\).*, got \(64,\)"):
        Preprocessing("array").apply(bytes(64), (64,))


@pytest.mark.parametrize(
    ("payload", "side", "message"),
    [
        ("images", None, "payload: expected one of image, array, text, got 'images'"),
        ("image", 0, "shorter_side: expected 1 pixel or more, got 0"),
        ("text", 8, "shorter_side: text has no sides, expected none, got 8"),
    ],
)
def test_impossible_preprocessing_is_refused(payload, side, message):
    with pytest.raises(ValueError, match=message):
        Preprocessing(payload, side)


def test_fingerprints_differ_where_results_may_differ():
    ways = [
        Preprocessing("image"),
        Preprocessing("image", 96),
        Preprocessing("image", 128),
        Preprocessing("array"),
        Preprocessing("array", 96),
        Preprocessing("text"),
    ]
    assert len({way.fingerprint for way in ways}) == len(ways)
    assert all("/" not in way.fingerprint for way in ways)
    assert Preprocessing("image", 96).fingerprint == Preprocessing("image", 96).fingerprint


def test_planned_bytes_hold_what_comes_out():
    sizes = np.array([10, 20, 30])
    assert Preprocessing("text").planned_bytes(sizes).tolist() == [10, 20, 30]
    shape = (40, 60, 5)
    planned = Preprocessing("array", 8).planned_bytes(sizes, shape)
    assert planned.tolist() == [Preprocessing("array", 8).apply(bytes(12_000), shape).nbytes] * 3
    for width, height in [(500, 375), (375, 500), (300, 200)]:
        pixels = Preprocessing("image", 100).apply(encoded(photograph(width, height), "JPEG"))
        assert pixels.nbytes <= Preprocessing("image", 100).planned_bytes(sizes)[0]


def test_what_cannot_be_planned_says_why():
    with pytest.raises(ValueError, match="shape: expected that of the arrays, got None"):
        Preprocessing("array").planned_bytes(np.array([64]))
    with pytest.raises(ValueError, match="shorter_side: expected one, to estimate the bytes"):
        Preprocessing("image").planned_bytes(np.array([64]))


def claiming(width: int, height: int) -> bytes:
    """Return a small 16-bit PNG whose header claims a size."""
    data = bytearray(encoded(Image.new("I;16", (1, 1)), "PNG"))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


def jpeg_claiming(width: int, height: int) -> bytes:
    data = bytearray(encoded(Image.new("RGB", (16, 16)), "JPEG"))
    at = data.index(b"\xff\xc0") + 5  # after the length and the precision of the frame's header
    data[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


@pytest.mark.parametrize(
    "payload",
    [
        claiming(8193, 8192),
        claiming(13_000, 13_000),
        claiming(1, (1 << 26) + 1),
        claiming(1 << 30, 2),
        jpeg_claiming(8193, 8192),  # also where decoding it at an eighth would make fewer
    ],
    ids=range(5),
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_picture_of_too_many_pixels_is_refused_before_it_is_decoded(payload, monkeypatch):
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda picture: pytest.fail("it was decoded"))
    with pytest.raises(BadSample, match="expected at most 67,108,864 pixels|decompression bomb"):
        Preprocessing("image", 32).apply(payload)
