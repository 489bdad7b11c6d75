"""Rows of the shapes of SparCML's data sets, whose columns follow a power law.

A row has the ``j``-th most frequent column with probability ``1 − exp(−(c/j)^s)``. Rows have
L2 norm 1. Labels are the sign of a linear function of the less frequent columns, plus noise.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
from scipy import sparse

from training.linear.kernels import Int64
from training.linear.rows import Rows

BLOCK = 1000  # rows that are drawn together, the same on every rank
STRIDE = 2_654_435_761  # a prime: the distance between columns that follow each other in frequency
NOISE = 0.1  # of the margins that decide the labels


@dataclass(frozen=True)
class Shape:
    """The number of features, how many of them a row has, and the exponent ``s`` of the power law."""

    features: int
    row_entries: int
    exponent: float


# Features and entries as in LibSVM's list of data sets. URL's exponent: so that its 2,396,130 rows together
# have 94 % of the features. Webspam's features are trigrams, few of which occur.
SHAPES = {"url": Shape(3_231_961, 115, 1.2), "webspam": Shape(16_609_143, 3_730, 1.6)}


def generate(shape: Shape, low: int, high: int, seed: int) -> Rows:
    """Return rows ``low … high − 1`` of the data set of a seed."""
    blocks = range(low // BLOCK, max(low // BLOCK + 1, -(-high // BLOCK)))
    drawn = [_block(shape, number, seed) for number in blocks]
    first = low - blocks.start * BLOCK
    columns = sparse.vstack([each for each, _ in drawn], format="csr")[first : first + high - low]
    columns.sort_indices()  # in place: rows whose columns are out of order are copied
    labels = np.concatenate([each for _, each in drawn])[first : first + high - low]
    return Rows.of_matrix(columns, labels, shape.features)


@cache
def _frequent(shape: Shape) -> float:
    """Return the ``c`` with which rows have ``row_entries`` on average."""
    edges = np.unique(np.geomspace(1, shape.features + 1, 20_000).astype(np.int64))
    numbers, widths = (edges[:-1] + edges[1:] - 1) / 2, np.diff(edges)
    low, high = 0.0, float(shape.row_entries)
    for _ in range(60):
        middle = (low + high) / 2
        entries = (widths * -np.expm1(-((middle / numbers) ** shape.exponent))).sum()
        low, high = (middle, high) if entries < shape.row_entries else (low, middle)
    return low


def _block(shape: Shape, number: int, seed: int) -> tuple[sparse.csr_array, npt.NDArray[np.int8]]:
    rng, frequent = np.random.default_rng([seed, number]), _frequent(shape)
    head, tail = _head(rng, shape, frequent), _tail(rng, shape, frequent)
    keys = np.unique(np.concatenate([head, tail]))  # row and frequency, in one number
    rows, order = np.divmod(keys, shape.features + 1)
    counts = np.bincount(rows, minlength=BLOCK)
    lengths = np.repeat(np.sqrt(np.maximum(counts, 1)), counts)
    decisive = np.where(order > frequent, _weights(order, seed), 0.0)
    margins = np.bincount(rows, decisive, minlength=BLOCK)
    margins += NOISE * margins.std() * rng.standard_normal(BLOCK)
    columns = order * STRIDE % shape.features
    starts = np.concatenate([[0], counts.cumsum()])
    matrix = sparse.csr_array(
        ((1 / lengths).astype(np.float32), columns.astype(np.int32), starts), shape=(BLOCK, shape.features)
    )
    return matrix, np.where(margins > 0, 1, -1).astype(np.int8)


def _head(rng: np.random.Generator, shape: Shape, frequent: float) -> Int64:
    """Draw for each of the frequent columns whether a row has it."""
    numbers = np.arange(1, _head_length(shape, frequent) + 1)
    shares = -np.expm1(-((frequent / numbers) ** shape.exponent))
    rows, places = np.nonzero(rng.random((BLOCK, len(numbers))) < shares)
    return np.asarray(rows * (shape.features + 1) + numbers[places], np.int64)


def _tail(rng: np.random.Generator, shape: Shape, frequent: float) -> Int64:
    """Draw the other columns as points of a Poisson process: a row may draw a column several times."""
    power, low = 1 - shape.exponent, _head_length(shape, frequent) + 0.5
    beyond = (shape.features + 0.5) ** power
    expected = frequent**shape.exponent * (low**power - beyond) / -power
    rows = np.repeat(np.arange(BLOCK), rng.poisson(expected, BLOCK))
    numbers = (beyond + rng.random(len(rows)) * (low**power - beyond)) ** (1 / power)
    order: Int64 = np.clip(np.rint(numbers), 1, shape.features).astype(np.int64)
    return np.asarray(rows * (shape.features + 1) + order, np.int64)


def _head_length(shape: Shape, frequent: float) -> int:
    return min(shape.features, int(2 * frequent) + 1)


def _weights(order: Int64, seed: int) -> npt.NDArray[np.float64]:
    """Return numbers in −1 … 1, a hash of the columns."""
    mixed = (order.astype(np.uint64) + np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return (mixed >> np.uint64(11)) / 2.0**52 - 1
