"""Selectors on the device: what the CPU's select, without waiting for the device.

A plan is made once for a size and k; it owns all memory that its calls need. Kernels: ``kernels/select.cu``.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any, ClassVar

import numpy as np

from commlib.errors import InvalidArgument, NonFiniteInput, look_up
from commlib.gpu.module import (
    ENTRIES,
    Array,
    Buffers,
    Engine,
    Ranges,
    Source,
    blocks_for,
    check_entries,
    current_engine,
)
from commlib.selection.dgc import SAMPLE
from commlib.vectors import SparseVector, index_dtype

# As in kernels/select.cu.
BLOCK = 64
STATE_WORDS = 32
NONFINITE, SELECTED = 0, 1
LEADING_BINS, MIDDLE_BINS, LAST_BINS, LOWERED_BINS = 4096, 1024, 512, 41
MEASURED_ENTRIES = 128 * 4  # of a warp in one turn
CHUNK, LANES = 32768, 64
BUCKET = 512
SAMPLING_THREADS = 1024

# Histograms of one run, after its state: (name, bins).
COUNTS = (
    ("measured", LEADING_BINS),
    ("leading", LEADING_BINS),
    ("middle", MIDDLE_BINS),
    ("last", LAST_BINS),
    ("few", LOWERED_BINS),
    ("all", LOWERED_BINS),
)
FLOAT32 = ENTRIES["float32"]


@dataclass(frozen=True, eq=False)
class Selection:
    """Entries that a plan selected, on the device; the plan's next call overwrites them.

    ``indices`` (ascending; int32, or int64 past 2³¹ − 1) and ``values`` (float32) have room for the most
    entries that the selector may select: ``state[1]``, on the device, says how many there are, all but for
    ``gaussian``. ``state[0]`` is not 0 where the vector held a NaN or an infinity; then there are none.
    """

    size: int
    indices: Array
    values: Array
    state: Array
    engine: Engine

    def entries(self) -> int:
        """Wait for the device, copy 16 bytes and return how many there are.

        Raises ``NonFiniteInput`` where the vector held a NaN or an infinity. The one place that waits.
        """
        state = self.engine.to_host(self.state)
        if state[NONFINITE]:
            raise NonFiniteInput("cannot select from a vector that holds a NaN or an infinity")
        return int(state[SELECTED])

    def to_host(self) -> SparseVector:
        """Wait for the device and return a copy of the entries."""
        entries = self.entries()
        indices, values = (self.engine.to_host(each[:entries]) for each in (self.indices, self.values))
        return SparseVector(self.size, indices, values)


class DeviceSelector:
    """The ``min(k, d)`` entries of largest magnitude, ties by lowest index, of vectors of ``size = d``.

    In little more than one read of the vector. ``entry``: the type of its entries, "float32", "float16" or
    "bfloat16" (arrays of ml_dtypes' type, or of its bits as uint16). Magnitudes are compared as float32.
    """

    at_most: ClassVar[int] = 1

    def __init__(self, size: int, k: int, *, entry: str = "float32", engine: Engine | None = None) -> None:
        if size < 0:
            raise InvalidArgument(f"size: expected at least 0, got {size}")
        if not 0 <= k < 1 << 31:
            raise InvalidArgument(f"k: expected 0 to 2147483647, got {k}")
        look_up(ENTRIES, "type of entries", entry)
        self.size, self.k, self.entry = size, min(k, size), entry
        self.engine = current_engine() if engine is None else engine
        self.room = min(self.at_most * self.k, size)
        self.buffers = Buffers(self.engine, f"selection of {self.k:,} of {size:,} entries")
        bits = 8 * index_dtype(size).itemsize
        self._source, self._float32 = Source("select", entry, bits), Source("select", "float32", bits)
        self._blocks = -(-size // BLOCK)
        self._ranges = Ranges.of(self._blocks, self.engine)

    def select(self, vector: Array) -> Selection:
        """Select from a contiguous vector of shape ``(d,)``; returns before the device has done so."""
        check_entries("vector", vector, self.size, [ENTRIES[self.entry]])
        self.engine.clear(self._scratch)
        if self.size:
            aligned = self.engine.aligned(vector, entries=16 // vector.dtype.itemsize)
            self._measure("measure", vector, np.int64(self.size), aligned)
            self._pick(self._source, vector, None)
        return self._selection()

    def select_sum(self, gradient: Array, residual: Array, out: Array, *, clear: bool = False) -> Selection:
        """Write ``gradient + residual`` to ``out`` and select from it, in one sweep.

        ``gradient`` has the plan's type of entries, ``residual`` and ``out`` are float32; ``out`` may be
        ``residual`` where that need not survive a vector that is not finite. ``clear``: the selected entries
        of ``out`` become zero, so that it is the next residual, unless the sum is not finite.
        """
        check_entries("gradient", gradient, self.size, [ENTRIES[self.entry]])
        check_entries("residual", residual, self.size, [FLOAT32])
        check_entries("out", out, self.size, [FLOAT32])
        self.engine.clear(self._scratch)
        if self.size:
            aligned = self.engine.aligned(gradient, residual, out)
            self._measure("sum", gradient, residual, out, np.int64(self.size), aligned)
            self._pick(self._float32, out, out if clear else None)
        return self._selection()

    def _measure(self, verb: str, *vectors: Any) -> None:
        """Launch the pass over the vector; where it finds the threshold, candidates can be gathered next."""
        crowded = 5 * self.k > 4 * self._blocks  # the k-th largest maximum would leave too many
        counted = "only" if self._guesses else "entries" if crowded else "maxima"
        grid = blocks_for(-(-self.size // MEASURED_ENTRIES) * 32, self.engine)
        arguments = self._maxima, self._scratch, self._counts["measured"], np.uint64(self.k)
        self.engine.launch(self._source, f"{verb}_{counted}", grid, *vectors, *arguments)

    def _pick(self, source: Source, vector: Array, cleared: Any) -> None:
        """Launch what comes after the pass over a ``vector`` that is at hand."""
        if self.k == 0:
            return
        self._guess(source, vector)
        launch, ranges = self.engine.launch, self._ranges
        entries, per_warp, state = np.int64(self.size), np.int64(ranges.per_warp), self._scratch
        room = self._capacity
        candidates = self.buffers.get("candidates", room, np.uint32)
        places = self.buffers.get("places", room, index_dtype(self.size))
        segments = self.buffers.get("segments", 2 * ranges.warps, np.uint64)
        tallies = self.buffers.get("tallies", 2 * ranges.warps, np.uint64)
        found = vector, entries, self._maxima, per_warp, candidates, places, np.uint64(room), segments
        launch(source, "gather", ranges.blocks, *found, state, self._counts["leading"])
        if self._guesses:
            blocks = blocks_for(self.size, self.engine)
            launch(source, "recount", blocks, vector, entries, state, self._counts["leading"])
        blocks = blocks_for(self.size // 16, self.engine)
        for digit in ("middle", "last"):
            counts = self._counts[digit]
            launch(source, f"refine_{digit}", blocks, vector, entries, candidates, state, counts)
        spans = vector, entries, per_warp, candidates, places, segments, state, tallies
        launch(source, "tally", ranges.blocks, *spans)
        indices, values = self._output
        launch(source, "emit", ranges.blocks, *spans, indices, values, cleared)

    @property
    def _guesses(self) -> bool:
        """Whether the threshold of candidates is a guess, and not from the pass over the vector."""
        return False

    def _guess(self, source: Source, vector: Array) -> None:
        """Launch what finds the threshold of candidates."""

    @property
    def _capacity(self) -> int:
        """How many candidates there is room for; where there are more, the vector is read again."""
        return min(self.size, 4 * self.room + BLOCK)

    @cached_property
    def _scratch(self) -> Array:
        return self.buffers.get("scratch", STATE_WORDS + sum(bins for _, bins in COUNTS), np.uint64)

    @cached_property
    def _counts(self) -> dict[str, Array]:
        counts, first = {}, STATE_WORDS
        for name, bins in COUNTS:
            counts[name] = self._scratch[first : first + bins]
            first += bins
        return counts

    @cached_property
    def _maxima(self) -> Array:
        return self.buffers.get("maxima", self._blocks, np.uint32)

    @cached_property
    def _output(self) -> tuple[Array, Array]:
        indices = self.buffers.get("indices", self.room, index_dtype(self.size))
        return indices, self.buffers.get("values", self.room, np.float32)

    def _selection(self) -> Selection:
        indices, values = self._output
        return Selection(self.size, indices, values, self._scratch[:2], self.engine)


class DeviceDGC(DeviceSelector):
    """The same entries; the threshold of candidates is a sample's, as in :class:`commlib.selection.DGC`."""

    def __init__(self, size: int, k: int, **options: Any) -> None:
        super().__init__(size, k, **options)
        self._stride = max(size // SAMPLE, 8) | 1
        expected = self.k / self._stride
        self._rank = math.ceil(expected + 4 * math.sqrt(expected)) + 4

    @property
    def _guesses(self) -> bool:
        return self._rank <= -(-self.size // self._stride)

    @property
    def _capacity(self) -> int:
        return min(self.size, max(4 * self.k, 2 * self._rank * self._stride) + BLOCK)

    def _guess(self, source: Source, vector: Array) -> None:
        if not self._guesses:
            return
        numbers = np.int64(self.size), np.int64(self._stride), np.uint64(self._rank), np.uint64(self.k)
        counts = self._counts["leading"]
        threads = SAMPLING_THREADS
        self.engine.launch(source, "sample", 1, vector, *numbers, self._scratch, counts, threads=threads)


class DeviceGaussian(DeviceSelector):
    """``3k/4`` to ``2k`` entries, as :class:`commlib.selection.Gaussian`; how many is known on the device.

    The moments are added in an order that depends on ``d`` alone, but not in the CPU's: the threshold may
    differ in its last bit.
    """

    at_most = 2

    @property
    def _guesses(self) -> bool:
        return self.k > 0

    def _guess(self, source: Source, vector: Array) -> None:
        z = -NormalDist().inv_cdf(self.k / (2 * self.size))
        entries, chunks = np.int64(self.size), -(-self.size // CHUNK)
        sums = self.buffers.get("moments", 2 * chunks, np.float64)
        thresholds = self.buffers.get("thresholds", LOWERED_BINS, np.uint32)
        arguments = vector, entries, np.float64(z), sums, thresholds, self._scratch
        self.engine.launch(source, "moments", chunks, *arguments, threads=LANES)
        numbers = np.uint64(self.k), np.uint64(self.room)
        for name in ("few", "all"):
            read = vector, entries, self._maxima, np.int64(self._ranges.per_warp), thresholds
            written = self._scratch, self._counts[name]
            self.engine.launch(source, f"lower_{name}", self._ranges.blocks, *read, *numbers, *written)


class DeviceBucketed(DeviceSelector):
    """The largest of each bucket of 512 entries, as :class:`commlib.selection.Bucketed`."""

    def select(self, vector: Array) -> Selection:
        """See :meth:`DeviceSelector.select`."""
        check_entries("vector", vector, self.size, [ENTRIES[self.entry]])
        self._select(vector, None, None)
        return self._selection()

    def select_sum(self, gradient: Array, residual: Array, out: Array, *, clear: bool = False) -> Selection:
        """See :meth:`DeviceSelector.select_sum`."""
        check_entries("gradient", gradient, self.size, [ENTRIES[self.entry]])
        check_entries("residual", residual, self.size, [FLOAT32])
        check_entries("out", out, self.size, [FLOAT32])
        self._select(gradient, residual, out)
        if clear and self.k:
            arguments = self._output[0], np.uint64(self.k), out, self._scratch
            self.engine.launch(self._float32, "clear_selected", blocks_for(self.k, self.engine), *arguments)
        return self._selection()

    def _select(self, *vectors: Any) -> None:
        self.engine.clear(self._scratch)
        if not self.size:
            return
        blocks = -(-self.size // (BUCKET * 8))
        arguments = np.int64(self.size), np.uint64(self.k), self._scratch, *self._output
        self.engine.launch(self._source, "select_buckets", blocks, *vectors, *arguments)


DEVICE_SELECTORS: dict[str, type[DeviceSelector]] = {
    "exact": DeviceSelector,
    "mstopk": DeviceSelector,
    "dgc": DeviceDGC,
    "gaussian": DeviceGaussian,
    "bucketed": DeviceBucketed,
}


def make_device_selector(
    name: str, size: int, k: int, *, entry: str = "float32", engine: Engine | None = None
) -> DeviceSelector:
    """Return the plan of a selector of the table ``DEVICE_SELECTORS`` for vectors of ``size`` entries."""
    return look_up(DEVICE_SELECTORS, "selector of the device", name)(size, k, entry=entry, engine=engine)
