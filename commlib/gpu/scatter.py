"""The sum of many ranks' entries, the same bits in every run. Kernels: ``kernels/scatter.cu``."""

import numpy as np

from commlib.errors import InvalidArgument
from commlib.gpu.cupy_engine import current_engine
from commlib.gpu.engine import ENTRIES, Array, Buffers, Engine, Source, check_entries
from commlib.vectors import index_dtype

TILE = 4096  # as in kernels/scatter.cu


class RankSum:
    """Adds the sorted entries of ``ranks`` ranks up to a dense vector of ``size``, one rank after the other.

    An entry's sum starts from 0 and its additions, in float32, come in the order of the ranks: bitwise what
    ``commlib.vectors.total`` makes of the same vectors, in every run and on every device.
    """

    def __init__(self, size: int, ranks: int, *, engine: Engine | None = None) -> None:
        if size < 1 or ranks < 1:
            raise InvalidArgument(f"size, ranks: expected at least 1 each, got {size} and {ranks}")
        self.size, self.ranks = size, ranks
        self.engine = current_engine() if engine is None else engine
        self.buffers = Buffers(self.engine, f"sum of {ranks} ranks' entries of {size:,}")
        self._source = Source("scatter", index_bits=8 * index_dtype(size).itemsize)

    def add(self, indices: Array, values: Array, starts: Array, counts: Array, divisor: float = 1.0) -> Array:
        """Return the sums over ``divisor``, float32 of shape ``(size,)``; the next call overwrites it.

        The entries of rank ``r`` are ``starts[r] … starts[r] + counts[r] - 1`` of ``indices``, ascending, and
        ``values``, float32. ``starts`` and ``counts``: uint64 on the device, so that counts need not be known
        on the host.
        """
        check_entries("indices", indices, indices.size, [index_dtype(self.size)])
        check_entries("values", values, indices.size, [ENTRIES["float32"]])
        for name, array in (("starts", starts), ("counts", counts)):
            check_entries(name, array, self.ranks, [np.dtype(np.uint64)])
        dense = self.buffers.get("sums", self.size, np.float32)
        entries = indices, values, starts, counts, np.int32(self.ranks)
        arguments = dense, np.int64(self.size), np.float32(divisor)
        self.engine.launch(self._source, "add_ranks", -(-self.size // TILE), *entries, *arguments)
        return dense
