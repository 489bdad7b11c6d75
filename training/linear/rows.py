"""The rows of a rank: features in the format of compressed sparse rows, and a label −1 or +1 for each."""

import io
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from commlib import Topology
from commlib.errors import InvalidArgument, shown
from commlib.vectors import Float32, index_dtype, partition
from training.linear.kernels import Matrix
from training.process.job import all_or_raise

LABELS = "{-1, +1} or {0, 1}"
LARGEST_VALUE = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Rows:
    """Rows of ``features`` columns, and a label −1 or +1 for each."""

    matrix: Matrix
    labels: Float32
    features: int

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self.labels)

    @classmethod
    def of_matrix(cls, matrix: Any, labels: npt.ArrayLike, features: int | None = None) -> "Rows":
        """Return the rows of a NumPy or SciPy matrix; ``labels`` as in :data:`LABELS`.

        Arrays of the right type are shared, and not modified.
        """
        from scipy import sparse

        compressed = sparse.csr_array(matrix)
        if not compressed.has_canonical_format:
            compressed = compressed.copy()
            compressed.sum_duplicates()  # which sorts the columns of each row
        features = compressed.shape[1] if features is None else features
        own = Matrix(
            starts=compressed.indptr.astype(np.int64, copy=False),
            columns=compressed.indices.astype(index_dtype(features), copy=False),
            values=compressed.data.astype(np.float32, copy=False),
        )
        return cls(own, signs(labels), features)


def signs(labels: npt.ArrayLike) -> Float32:
    """Return labels of −1 and +1, or of 0 and 1, as −1 and +1.

    >>> signs([0, 1, 1])
    array([-1.,  1.,  1.], dtype=float32)
    """
    given = np.asarray(labels, np.float64)
    if (wrong := first_wrong_label(given)) is not None:
        raise InvalidArgument(f"labels: expected {LABELS}, got {given[wrong]:g} for row {wrong + 1}")
    return np.where(given > 0, 1, -1).astype(np.float32)


def first_wrong_label(labels: npt.NDArray[np.float64]) -> int | None:
    """Return the first row whose label does not fit the labels before it, if there is one."""
    is_wrong = ~np.isin(labels, (-1, 0, 1))
    both = np.flatnonzero(labels == 0), np.flatnonzero(labels == -1)
    if all(map(len, both)):  # 0 and −1 do not go together
        is_wrong[max(places[0] for places in both)] = True
    return int(np.argmax(is_wrong)) if is_wrong.any() else None


HINT = "cloudtrain data makes spam and genres"
COMPRESSED = (".gz", ".bz2", ".xz", ".zip")
INDEX = re.compile(rb"-?\d+")
LARGEST_INDEX = 2**31 - 1  # that scikit-learn reads


def read_rows(
    path: Path, topology: Topology, features: int | None = None, *, zero_based: bool = False
) -> Rows:
    """Return this rank's rows of a file: those whose lines begin in its part of the file's bytes.

    ``features``: their number; by default it follows from the largest index on all ranks. ``zero_based``:
    whether indices begin at 0, as scikit-learn can write them. All ranks call it together; if one of them
    finds an error, all raise ``InvalidArgument`` of one line.
    """
    world = topology.world

    def read() -> tuple[Rows, int]:
        with FilePart.of_rank(path, world.rank, world.size) as part:
            return _parsed(part, features, zero_based=zero_based)

    rows, largest = all_or_raise(world, read)
    if features is None:
        features = int(world.allgather_ints([largest]).max())
    return replace(rows, features=features)


class FilePart(io.BufferedReader):
    """The bytes ``low … high − 1`` of a file, which are whole lines; iterates over these lines.

    scikit-learn's own ranges, ``offset`` and ``length``, give a row behind a comment to two ranks.
    """

    def __init__(self, path: Path, low: int, high: int) -> None:
        super().__init__(io.FileIO(path))
        self.path, self.low, self.high = path, low, high

    @classmethod
    def of_rank(cls, path: Path, rank: int, ranks: int) -> "FilePart":
        """Return the lines that begin in a rank's equal share of the bytes."""
        if path.suffix in COMPRESSED:
            expected = "a file that is not compressed, of which ranks read parts"
            raise InvalidArgument(f"{path}: expected {expected}")
        try:
            size = os.stat(path).st_size
            with path.open("rb") as file:
                bounds = partition(size, ranks)[rank : rank + 2].tolist()
                low, high = (_next_line(file, bound) for bound in bounds)
                file.seek(max(0, high - 1))
                if high and file.read(1) != b"\n":
                    line = _lines_before(path, size) + 1
                    raise InvalidArgument(f"{path}:{line}: the file ends in the middle of a line")
        except OSError as error:
            hint = f" ({HINT})" if isinstance(error, FileNotFoundError) else ""
            raise InvalidArgument(f"{path}: {error.strerror}{hint}") from error
        if low == high:
            of = f"of bytes {bounds[0]:,} to {bounds[1]:,} of {size:,}"
            raise InvalidArgument(f"{path}: expected a line or more for each of {ranks} ranks, got none {of}")
        return cls(path, low, high)

    def __iter__(self) -> Iterator[bytes]:
        self.seek(self.low)
        left = self.high - self.low
        while left > 0 and (line := self.readline()):
            left -= len(line)
            yield line

    def contents(self) -> Iterator[list[bytes]]:
        """Yield the words of each line without its comment."""
        for line in self:
            yield line.partition(b"#")[0].split()

    def at(self, line: int) -> str:
        """Return the place of a line, counted from 1 in this part: the file, and the line in the file."""
        return f"{self.path}:{_lines_before(self.path, self.low) + line}"

    def line_of_row(self, row: int) -> int:
        """Return the line of a row, counted from 1 in this part; a comment alone is no row."""
        return [number for number, words in enumerate(self.contents(), start=1) if words][row]


def _next_line(file: BinaryIO, offset: int) -> int:
    """Return where the first line begins at or after an offset."""
    if offset:
        file.seek(offset - 1)
        file.readline()
    return file.tell()


def _lines_before(path: Path, offset: int) -> int:
    count = 0
    with path.open("rb") as file:
        while offset > 0 and (block := file.read(min(offset, 1 << 20))):
            count, offset = count + block.count(b"\n"), offset - len(block)
    return count


def _parsed(part: FilePart, features: int | None, *, zero_based: bool) -> tuple[Rows, int]:
    """Return the rows of a part, and the number of features by its largest index."""
    from sklearn.datasets import load_svmlight_file

    first = int(not zero_based)
    most = first - 1 + min(LARGEST_INDEX, LARGEST_INDEX if features is None else features)
    try:
        matrix, labels = load_svmlight_file(part, dtype=np.float32, zero_based=zero_based)
    except (ValueError, OverflowError) as error:
        raise InvalidArgument(_first_problem(part, first, most) or f"{part.at(1)}: {error}") from error
    if matrix.shape[1] > most - first + 1 or not np.isfinite(matrix.data).all():
        raise InvalidArgument(_first_problem(part, first, most))
    if len(labels) == 0:
        raise InvalidArgument(f"{part.at(1)}: expected rows in each rank's part, got comments only")
    if (row := first_wrong_label(labels)) is not None:
        got = f"{labels[row]:g}"
        raise InvalidArgument(f"{part.at(part.line_of_row(row))}: label: expected {LABELS}, got {got}")
    return Rows.of_matrix(matrix, labels), matrix.shape[1]


def _first_problem(part: FilePart, first: int, most: int) -> str | None:
    """Return the first line that is no ``label index:value …`` with indices in ``first … most``, and why."""
    for number, words in enumerate(part.contents(), start=1):
        if (why := _problem(words, first, most)) is not None:
            return f"{part.at(number)}: {why}"
    return None


def _problem(words: list[bytes], first: int, most: int) -> str | None:
    """Return what is wrong with the words of a line, if anything is."""
    before = first - 1
    if words and not math.isfinite(_number(words[0])):
        return f"label: expected {LABELS}, got {_quoted(words[0])}"
    entries = words[2:] if words[1:] and words[1].startswith(b"qid:") else words[1:]
    for word in entries:
        index, colon, value = word.partition(b":")
        if not (colon and INDEX.fullmatch(index)):
            return f"expected index:value, got {_quoted(word)}"
        if not first <= int(index) <= most:
            return f"index: expected {first} … {most}, got {int(index)}"
        if int(index) <= before:
            return f"index: expected ascending ones, got {int(index)} after {before}"
        if not abs(_number(value)) <= LARGEST_VALUE:
            return f"value: expected a finite number, got {_quoted(word)}"
        before = int(index)
    return None


def _number(word: bytes) -> float:
    """Return a number; NaN for a word that is none."""
    try:
        return float(word)
    except ValueError:
        return math.nan


def _quoted(word: bytes) -> str:
    return shown(word.decode(errors="backslashreplace"))
