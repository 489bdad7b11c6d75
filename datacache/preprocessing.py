"""From the bytes in central storage to the array in memory: all processing before the first random step.

>>> halves = Preprocessing("array", shorter_side=2)
>>> halves.apply(bytes([0, 0, 8, 8] * 4), (4, 4))[:, :, 0]
array([[1, 7],
       [1, 7]], dtype=uint8)
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import PIL
from PIL import Image, UnidentifiedImageError

from datacache.errors import BadSample

PAYLOADS = ("image", "array", "text")

# Only these decoders are tried: others are slow to reject a payload, and one of them (EPS) starts a program.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM", "TIFF")

# A header of a few bytes can claim any size, and decoding takes memory and time by pixels: 3 bytes or more
# each. Photographs have fewer.
MOST_PIXELS = 1 << 26

# Photographs are 4:3 or 3:2; longer ones are rare, so that the sum over all samples is an upper bound.
PLANNED_ASPECT = 1.5

# Part of the fingerprint: to be raised when `apply` returns other values for the same payload.
VERSION = 1

_SIXTEEN_BITS = ("I", "I;16", "I;16B", "I;16L")


@dataclass(frozen=True)
class Preprocessing:
    """The deterministic processing of each sample, done once.

    ``payload``: "image" (an encoded picture), "array" (raw uint8 values) or "text" (not changed).
    ``shorter_side``: pictures and arrays are shrunk until their shorter side has this many pixels, with the
    same aspect ratio, antialiased; smaller ones are not enlarged. ``None``: nothing is shrunk.
    """

    payload: str
    shorter_side: int | None = None

    def __post_init__(self) -> None:
        if self.payload not in PAYLOADS:
            raise ValueError(f"payload: expected one of {', '.join(PAYLOADS)}, got {self.payload!r}")
        if self.shorter_side is not None and self.shorter_side < 1:
            raise ValueError(f"shorter_side: expected 1 pixel or more, got {self.shorter_side}")
        if self.payload == "text" and self.shorter_side is not None:
            raise ValueError(f"shorter_side: text has no sides, expected none, got {self.shorter_side}")

    @property
    def fingerprint(self) -> str:
        """All that the result depends on besides the payload, with the decoder's version; fit for file names.

        >>> Preprocessing("text").fingerprint
        'text-v1'
        """
        side = [] if self.shorter_side is None else [str(self.shorter_side)]
        decoder = [] if self.payload == "text" else [f"pillow{PIL.__version__}"]
        return "-".join([self.payload, *side, *decoder, f"v{VERSION}"])

    def apply(self, payload: bytes, shape: Sequence[int] = ()) -> npt.NDArray[np.uint8]:
        """Return the sample, uint8 ``(height, width, channels)``; text as a vector of its bytes.

        ``shape``: of an array, ``(height, width)`` or ``(height, width, channels)``. Pictures get three
        channels, red, green, blue: grey and CMYK are converted, 16-bit values scaled to 8, alpha and EXIF's
        orientation ignored, as is usual for ImageNet. A sample that is not shrunk may be a read-only view of
        ``payload``. Raises :class:`BadSample` with the fault of the payload; also for a picture of more than
        ``MOST_PIXELS``, before it is decoded.
        """
        if self.payload == "text":
            return np.frombuffer(payload, np.uint8)
        if self.payload == "image":
            return _decode(payload, self.shorter_side)
        if len(shape) not in (2, 3) or min(shape) < 1:
            expected = "(height, width) or (height, width, channels)"
            raise BadSample(f"shape: expected {expected}, got {tuple(shape)}")
        if len(payload) != math.prod(shape):
            raise BadSample(f"array {tuple(shape)}: expected {math.prod(shape)} bytes, got {len(payload)}")
        return _shrink(np.frombuffer(payload, np.uint8).reshape(*shape[:2], -1), self.shorter_side)

    def planned_bytes(
        self, sizes: npt.NDArray[np.int64], shape: Sequence[int] | None = None
    ) -> npt.NDArray[np.int64]:
        """Return an estimate of the bytes of each result, from the payloads' ``sizes`` in bytes.

        Exact for arrays (all of ``shape``) and text. For pictures, whose aspect ratio is known only after
        decoding, the sum is an upper bound if they are not longer than 3:2 on average.
        """
        if self.payload == "text":
            return sizes.astype(np.int64)
        if self.payload == "array":
            if shape is None:
                raise ValueError("shape: expected that of the arrays, got None")
            height, width = shrunk(shape[0], shape[1], self.shorter_side)
            return np.full(len(sizes), math.prod([height, width, *shape[2:]]), np.int64)
        if self.shorter_side is None:
            raise ValueError("shorter_side: expected one, to estimate the bytes of pictures, got None")
        return np.full(len(sizes), math.ceil(3 * PLANNED_ASPECT * self.shorter_side**2), np.int64)


def shrunk(height: int, width: int, shorter_side: int | None) -> tuple[int, int]:
    """Return height and width with the shorter side shrunk to ``shorter_side``, in the same aspect ratio.

    >>> shrunk(375, 500, 128), shrunk(500, 375, 128), shrunk(20, 30, 128)
    ((128, 171), (171, 128), (20, 30))
    """
    shorter = min(height, width)
    if shorter_side is None or shorter <= shorter_side:
        return height, width
    # in integers, half up: the same on every machine
    longer = (2 * max(height, width) * shorter_side + shorter) // (2 * shorter)
    return (shorter_side, longer) if height <= width else (longer, shorter_side)


def _shrink(pixels: npt.NDArray[np.uint8], shorter_side: int | None) -> npt.NDArray[np.uint8]:
    """Return the array with its shorter side shrunk, channel by channel, as there may be any number."""
    height, width, channels = pixels.shape
    size = shrunk(height, width, shorter_side)
    if size == (height, width):
        return pixels
    small = np.empty((*size, channels), np.uint8)
    for channel in range(channels):
        picture = Image.fromarray(np.ascontiguousarray(pixels[:, :, channel]))
        small[:, :, channel] = np.asarray(picture.resize(size[::-1], Image.Resampling.BILINEAR))
    return small


def _decode(payload: bytes, shorter_side: int | None) -> npt.NDArray[np.uint8]:
    """Return the picture decoded and shrunk; any error of the decoder becomes a :class:`BadSample`."""
    begin = f" that begin with {payload[:8].hex(' ')}" if payload else ""
    what = f"no picture: {len(payload)} bytes{begin}"
    try:
        picture = Image.open(io.BytesIO(payload), formats=FORMATS)  # reads the header only
        what = f"{picture.format} of {picture.width} × {picture.height}, {len(payload)} bytes"
        _check_pixels(picture)
        height, width = shrunk(picture.height, picture.width, shorter_side)
        # JPEG can be decoded at ½, ¼ or ⅛ of its size, at as much less cost; never below the size needed
        picture.draft("RGB", (width, height))
        colours = _as_rgb(picture)
        if colours.size != (width, height):
            colours = colours.resize((width, height), Image.Resampling.BILINEAR)
        return np.asarray(colours)
    except MemoryError:
        raise
    except UnidentifiedImageError as error:
        raise BadSample(f"{what}; known: {', '.join(FORMATS)}") from error
    except Exception as error:  # decoders raise many kinds of errors for damaged bytes
        raise BadSample(f"{what}: {error}") from error


def _check_pixels(picture: Image.Image) -> None:
    if picture.width * picture.height > MOST_PIXELS:
        raise BadSample(f"expected at most {MOST_PIXELS:,} pixels")


def _as_rgb(picture: Image.Image) -> Image.Image:
    """Return the picture in red, green, blue, 8 bits each; alpha is dropped, not blended."""
    if picture.mode in _SIXTEEN_BITS:
        values = np.asarray(picture)
        if values.min() < 0 or values.max() > 65535:
            raise BadSample(f"values from {values.min()} to {values.max()}: expected 0 to 65535")
        picture = Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))
    if picture.mode == "F":
        raise BadSample("floating-point values, whose range is unknown: expected integers")
    if picture.mode == "P":
        picture = picture.convert("RGBA")  # a transparent palette converted at once makes Pillow warn
    return picture if picture.mode == "RGB" else picture.convert("RGB")
