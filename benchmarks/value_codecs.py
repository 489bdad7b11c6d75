"""What value codecs lose of selected values, in docs/reducers.md: python -m benchmarks.value_codecs.

Vectors are drawn from four distributions; the 1/64 of largest magnitude is selected and encoded.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drawing.pages import markdown, rewrite
from commlib import SparseVector, select
from commlib.vectors import Float32
from commlib.wire import VALUE_CODECS, make_codec

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reducers.md"
DENSITY = 1 / 64
DRAWN = 1_000_000  # entries of a vector
FOUR_BINS = "four bins"  # of SparseLoCo's published code
CODECS = (
    *("fp16", "qsgd8", "hadamard8", "qsgd4", "hadamard4", "lloyd4", "lloyd3", "qsgd2", FOUR_BINS),
    *("lloyd2", "lloyd1"),
)
DISTRIBUTIONS: dict[str, Callable[[np.random.Generator], Any]] = {
    "normal": lambda generator: generator.standard_normal(DRAWN),
    "Laplace": lambda generator: generator.laplace(size=DRAWN),
    "normal·exp(0.6·normal)": lambda generator: (
        generator.standard_normal(DRAWN) * np.exp(0.6 * generator.standard_normal(DRAWN))
    ),
    "Student's t, 3": lambda generator: generator.standard_t(3, DRAWN),
}


def lost(distribution: str) -> dict[str, float]:
    """Return the share of the sum of squares of the selected values that each codec loses."""
    drawn = DISTRIBUTIONS[distribution](np.random.default_rng(0)).astype(np.float32)
    values = select("exact", drawn, round(DENSITY * DRAWN)).values
    exact = values.astype(np.float64)
    return {name: float(((exact - decoded(name, values)) ** 2).sum() / (exact**2).sum()) for name in CODECS}


def decoded(codec: str, values: Float32) -> Any:
    if codec == FOUR_BINS:
        return four_bins(values)
    made = VALUE_CODECS[codec]()
    return made.decode(made.encode(values), len(values))


def four_bins(values: Float32) -> Any:
    """Return what SparseLoCo's published code makes of values: bins of 1.5 deviations, the mean of each."""
    mean = values.mean(dtype=np.float64)
    centred = values - mean
    bins = np.clip(np.rint(centred / (6 * centred.std(ddof=1) / 4)) + 2, 0, 3).astype(int)
    sums, counts = np.bincount(bins, centred, minlength=4), np.bincount(bins, minlength=4)
    return (sums / np.maximum(counts, 1))[bins] + mean


def bits(codec: str) -> tuple[float, float]:
    """Return the bits a value takes, and with its index in ``gap`` at density 1 %, spread at random."""
    if codec == FOUR_BINS:
        return 2.0, 14.0  # as published, with indices of 12 bits
    count, size = 25_600, 2_560_000
    of_value = 8 * VALUE_CODECS[codec]().message_bytes(count) / count
    indices = np.sort(np.random.default_rng(0).choice(size, count, replace=False)).astype(np.int32)
    vector = SparseVector(size, indices, np.ones(count, np.float32))
    return of_value, 8 * len(make_codec(f"gap+{codec}").encode(vector)) / count


def blocks() -> dict[str, str]:
    shares = [lost(name) for name in DISTRIBUTIONS]
    rows = []
    for codec in CODECS:
        of_bits = [f"{each:.2f}" for each in bits(codec)]
        shown = codec if codec == FOUR_BINS else f"`{codec}`"
        rows.append([shown, *of_bits, *(f"{100 * each[codec]:.2f} %" for each in shares)])
    return {"value codecs": markdown(["codec", "bits a value", "with `gap`", *DISTRIBUTIONS], rows)}


if __name__ == "__main__":
    rewrite(PAGE, blocks())
