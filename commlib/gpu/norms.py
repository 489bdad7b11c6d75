"""Sums of squares of the segments of a flat vector on the device. Kernels: ``kernels/norms.cu``."""

from collections.abc import Sequence

import numpy as np

from commlib.errors import InvalidArgument, look_up
from commlib.gpu.cupy_engine import current_engine
from commlib.gpu.engine import ENTRIES, Array, Buffers, Engine, Source, check_entries

CHUNK, LANES = 32768, 64  # as in kernels/norms.cu


class SegmentSquares:
    """Sums of squares of consecutive segments, ``sizes`` entries long, of a flat vector; in float64.

    The order of the additions depends on a segment's size alone: chunks of 32,768 entries in the 64 lanes of
    ``pto.norms``, then the sums of the chunks likewise. So equal entries give equal bits in every run and on
    every device. A segment of up to 32,768 entries has the bits of ``pto.norms.sum_of_squares``, a longer one
    is equal up to rounding: its 64 lanes are sequential chains of additions, too slow for a GPU. For ``n``
    entries the relative error is at most ``(521 + n/2²¹)·2⁻⁵³``.
    """

    def __init__(self, sizes: Sequence[int], *, entry: str = "float32", engine: Engine | None = None) -> None:
        if not sizes or min(sizes) < 0:
            raise InvalidArgument(f"sizes: expected one or more, each at least 0, got {list(sizes)}")
        look_up(ENTRIES, "type of entries", entry)
        self.sizes, self.entry = tuple(sizes), entry
        self.engine = current_engine() if engine is None else engine
        self.buffers = Buffers(self.engine, f"sums of squares of {len(sizes)} segments")
        self._source = Source("norms", entry)
        self._plan()

    def _plan(self) -> None:
        ends = np.cumsum(self.sizes)
        firsts, counts, bounds = [], [], [0]
        for end, size in zip(ends.tolist(), self.sizes, strict=True):
            for first in range(end - size, end, CHUNK):
                firsts.append(first)
                counts.append(min(CHUNK, end - first))
            bounds.append(len(firsts))
        self._chunks, self._entries = len(firsts), int(ends[-1])
        tables = {"firsts": firsts, "counts": counts, "bounds": bounds}
        put = (self.buffers.put(name, np.array(table, np.uint64)) for name, table in tables.items())
        self._firsts, self._counts, self._bounds = put

    def squares(self, vector: Array) -> Array:
        """Return the sums, float64 of shape ``(segments,)``, on the device; the next call overwrites them."""
        check_entries("vector", vector, self._entries, [ENTRIES[self.entry]])
        sums = self.buffers.get("chunks", max(1, self._chunks), np.float64)
        squares = self.buffers.get("squares", len(self.sizes), np.float64)
        launch, source = self.engine.launch, self._source
        if self._chunks:
            table = self._firsts, self._counts
            launch(source, "square_chunks", self._chunks, vector, *table, sums, threads=LANES)
        launch(source, "add_chunks", len(self.sizes), sums, self._bounds, squares, threads=LANES)
        return squares
