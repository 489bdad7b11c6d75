"""Deterministic sums on a GPU: of the ranks' sparse vectors or rows, and of the squares of segments.

Kernels: ``kernels/scatter.cu`` and ``kernels/norms.cu``.
"""

from collections.abc import Sequence

import numpy as np

from commlib.arrays import ROW_MULTIPLE
from commlib.errors import InvalidArgument
from commlib.gpu.cupy_engine import current_engine
from commlib.gpu.engine import Array, Buffers, Engine, Source, blocks_for, check_entries
from commlib.vectors import SparseVector, index_dtype

TILE = 4096  # as in kernels/scatter.cu
MOST_RANGES = 2048  # blocks of a sparse sum, each of which sums the counts of those before it


class RankSum:
    """The sum of one sparse vector or more, of equal sizes from 1, in their order.

    An entry's sum starts from 0 and its additions, in float32, come in the order of the vectors: bitwise what
    ``commlib.vectors.sum_sparse`` returns for them on the CPU, in every run and on every device.

    The vectors are not copied. A result is valid until the next one of the same object.
    """

    def __init__(self, vectors: Sequence[SparseVector], *, engine: Engine | None = None) -> None:
        self.size, self.named = vectors[0].size, sum(vector.nnz for vector in vectors)
        self.engine = current_engine() if engine is None else engine
        self._source = Source("scatter", index_bits=8 * index_dtype(self.size).itemsize)
        self._buffers = Buffers(self.engine, f"sum of {len(vectors)} vectors of {self.size:,} entries")
        self._alive = vectors  # the kernels are given their addresses: concatenating them would cost a copy
        words = [word for vector in vectors for word in self._words_of(vector)]
        table = self._buffers.put("table", np.array(words, np.uint64))
        self._arguments = table, np.int32(len(vectors)), np.int64(self.size)

    def dense(self) -> SparseVector:
        """Return the sum with all its entries: one launch; the host does not wait."""
        sums = self._buffers.get("sums", self.size, np.float32)
        self.engine.launch(self._source, "add_to_dense", -(-self.size // TILE), *self._arguments, sums)
        return SparseVector(self.size, None, sums)

    def sparse(self) -> SparseVector:
        """Return the sums at the indices of all vectors, zeros included: two launches.

        The host waits for the device and copies eight bytes, the number of indices. The arrays returned are
        the beginnings of larger ones, as long as the entries of all vectors together.
        """
        if self.named == 0:
            return SparseVector(self.size, *self._entries("sums", 0))
        tiles = -(-self.size // TILE)
        per_block = -(-tiles // MOST_RANGES)
        blocks = -(-tiles // per_block)
        ranges = self._buffers.get("ranges", 2 * blocks + 1, np.uint64)
        apart = self._entries("ranges", self.named)
        given = *self._arguments, np.int64(per_block), *apart, ranges
        self.engine.launch(self._source, "add_to_ranges", blocks, *given)
        indices, values = self._entries("sums", min(self.named, self.size))
        self.engine.launch(self._source, "join_ranges", blocks, ranges, *apart, indices, values)
        found = int(self.engine.to_host(ranges[2 * blocks :])[0])
        return SparseVector(self.size, indices[:found], values[:found])

    def _entries(self, of: str, count: int) -> tuple[Array, Array]:
        indices = self._buffers.get(f"indices of {of}", count, index_dtype(self.size))
        return indices, self._buffers.get(f"values of {of}", count, np.float32)

    def _words_of(self, vector: SparseVector) -> tuple[int, int, int]:
        if vector.size != self.size or vector.indices is None:
            found = f"a {'dense' if vector.is_dense else 'sparse'} one of {vector.size}"
            raise InvalidArgument(f"vectors: expected sparse ones of {self.size}, got {found}")
        check_entries("indices", vector.indices, vector.nnz, index_dtype(self.size))
        check_entries("values", vector.values, vector.nnz)
        address = self.engine.address
        return address(vector.indices), address(vector.values), vector.nnz


def add_rows(others: Array, own: Array, position: int, *, engine: Engine | None = None) -> Array:
    """Return what ``commlib.vectors.sum_rows`` does, bitwise: a new array, by one launch.

    ``others``: float32, shape ``(rows - 1, stride)``, contiguous, ``stride`` a multiple of ``ROW_MULTIPLE``;
    a separate allocation, as its rows are read 16 bytes at a time.
    """
    stride = others.shape[1]
    check_entries("own", own, own.size)
    fits = others.flags.c_contiguous and own.size <= stride and stride % ROW_MULTIPLE == 0
    if others.dtype != np.float32 or not fits:
        expected = f"contiguous float32, {own.size} or more a row and a multiple of {ROW_MULTIPLE}"
        raise InvalidArgument(f"others: expected {expected}, got {others.dtype} {tuple(others.shape)}")
    engine = current_engine() if engine is None else engine
    sums = engine.empty(own.size, np.float32)
    if own.size:
        blocks = blocks_for(-(-own.size // ROW_MULTIPLE), engine)
        rows = others, np.int64(stride), np.int32(len(others) + 1)
        given = *rows, own, engine.aligned(own), np.int32(position), np.int64(own.size)
        engine.launch(Source("scatter"), "add_rows", blocks, *given, sums)
    return sums


CHUNK, LANES = 32768, 64  # as in kernels/norms.cu


class SegmentSquares:
    """Sums of squares of consecutive segments, ``sizes`` entries long, of a flat vector; in float64.

    The order of the additions depends on a segment's size alone: chunks of 32,768 entries in the 64 lanes of
    ``pto.norms``, then the sums of the chunks likewise. So equal entries give equal bits in every run and on
    every device. A segment of up to 32,768 entries has the bits of ``pto.norms.sum_of_squares``, a longer one
    is equal up to rounding: its 64 lanes are sequential chains of additions, too slow for a GPU. For ``n``
    entries the relative error is at most ``(521 + n/2²¹)·2⁻⁵³``.
    """

    def __init__(self, sizes: Sequence[int], *, engine: Engine | None = None) -> None:
        if not sizes or min(sizes) < 0:
            raise InvalidArgument(f"sizes: expected one or more, each at least 0, got {list(sizes)}")
        self.sizes = tuple(sizes)
        self.engine = current_engine() if engine is None else engine
        self.buffers = Buffers(self.engine, f"sums of squares of {len(sizes)} segments")
        ends = np.cumsum(self.sizes)
        firsts, counts, bounds = [], [], [0]
        for end, size in zip(ends.tolist(), self.sizes, strict=True):
            for first in range(end - size, end, CHUNK):
                firsts.append(first)
                counts.append(min(CHUNK, end - first))
            bounds.append(len(firsts))
        self._chunks, self._entries = len(firsts), int(ends[-1])
        tables = {"firsts": firsts, "counts": counts, "bounds": bounds}
        self._tables = [self.buffers.put(name, np.array(each, np.uint64)) for name, each in tables.items()]

    def squares(self, vector: Array) -> Array:
        """Return the sums, float64 of shape ``(segments,)``, on the device; the next call overwrites them."""
        check_entries("vector", vector, self._entries)
        sums = self.buffers.get("chunks", max(1, self._chunks), np.float64)
        squares = self.buffers.get("squares", len(self.sizes), np.float64)
        launch, source, (*spans, bounds) = self.engine.launch, Source("norms"), self._tables
        if self._chunks:
            launch(source, "square_chunks", self._chunks, vector, *spans, sums, threads=LANES)
        launch(source, "add_chunks", len(self.sizes), sums, bounds, squares, threads=LANES)
        return squares
