"""Selectors on the device: the CPU's entries, without waiting for the device.

A plan is made once for a size and k, and owns all memory that its calls need. Kernels: ``kernels/select.cu``.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import NormalDist
from typing import Any, ClassVar

import numpy as np

from commlib.errors import InvalidArgument, NonFiniteInput
from commlib.gpu.cupy_engine import current_engine
from commlib.gpu.engine import WARPS, Array, Buffers, Engine, Ranges, Source, blocks_for, check_entries
from commlib.selection.dgc import SAMPLE
from commlib.vectors import SparseVector, index_dtype

# As in kernels/select.cu.
BLOCK = 64
NONFINITE, SELECTED = 0, 1
LOWERED_BINS = 41
SCRATCH_WORDS = 32 + 2 * 4096 + 1024 + 512 + 8 + LOWERED_BINS  # the state, then histograms
MEASURED_ENTRIES = 128 * 4  # of a warp in one turn
CHUNK, LANES = 32768, 64
BUCKET = 512
SAMPLING_THREADS = 1024

LARGEST_PRODUCT = (1 << 64) - 1
Start = Callable[..., None]  # what starts a prepared kernel


@dataclass(frozen=True, eq=False)
class Selection:
    """Entries that a plan selected, on the device; the plan's next call overwrites them.

    ``indices`` (ascending; int32, or int64 past 2³¹ − 1) and ``values`` (float32) are as long as the most
    entries that the selector may select; ``state[1]``, on the device, is their number (the most, except for
    ``gaussian``). ``state[0]`` is not 0 if the vector held a NaN or an infinity; then there are none.
    """

    size: int
    indices: Array
    values: Array
    state: Array
    engine: Engine

    def nnz(self) -> int:
        """Wait for the device, copy 16 bytes and return the number of entries.

        Raises ``NonFiniteInput`` where the vector held a NaN or an infinity. Only this waits.
        """
        state = self.engine.to_host(self.state)
        if state[NONFINITE]:
            raise NonFiniteInput("cannot select from a vector that holds a NaN or an infinity")
        return int(state[SELECTED])

    def copy(self) -> SparseVector:
        """Wait for the device and return a copy of the entries, on the device."""
        nnz = self.nnz()
        return SparseVector(self.size, self.indices[:nnz].copy(), self.values[:nnz].copy())


class DeviceSelector:
    """The ``min(k, d)`` entries of largest magnitude, ties by lowest index, of vectors of ``size = d``.

    Vectors are float32; one is read little more than once.
    """

    at_most: ClassVar[int] = 1

    def __init__(self, size: int, k: int, *, engine: Engine | None = None) -> None:
        self.size, self.k = size, min(k, size)
        if not 0 <= self.k < 1 << 31:
            raise InvalidArgument(f"k: expected 0 to 2147483647, got {k}")
        self.engine = current_engine() if engine is None else engine
        self.most_selected = min(self.at_most * self.k, size)
        self.buffers = Buffers(self.engine, f"selection of {self.k:,} of {size:,} entries")
        self._source = Source("select", index_bits=8 * index_dtype(size).itemsize)
        self._blocks = -(-size // BLOCK)
        self._ranges = Ranges.of(self._blocks, self.engine)
        self._passes: dict[str, Start] = {}

    def select(self, vector: Array) -> Selection:
        """Select from a contiguous vector of shape ``(d,)``; returns before the device has done so."""
        check_entries("vector", vector, self.size)
        return self._run(vector)

    def select_sum(self, gradient: Array, residual: Array, out: Array) -> Selection:
        """Write ``gradient + residual`` to ``out`` and select from it, in one sweep.

        ``out`` may be ``residual`` if that may be lost when the sum is not finite.
        """
        for name, array in (("gradient", gradient), ("residual", residual), ("out", out)):
            check_entries(name, array, self.size)
        return self._run(gradient, residual, out)

    def _run(self, *arrays: Array) -> Selection:
        """Launch all kernels, with zeroed scratch, and that of the previous run, for this one to clear.

        ``arrays``: the vector, or gradient, residual and their sum.
        """
        scratch, stale = self._scratches
        try:
            with self.engine.current():
                if self.size:
                    self._launch(*arrays, scratch=scratch, stale=stale)
        except BaseException:  # kernels may be missing: neither is known to be zeros
            del self._scratches
            raise
        self._scratches = stale, scratch
        return Selection(self.size, *self._output, scratch[:2], self.engine)

    def _launch(self, *arrays: Array, scratch: Array, stale: Array) -> None:
        measure = self._pass("measure" if len(arrays) == 1 else "sum")
        measure(*arrays, self.engine.aligned(*arrays), scratch, stale)
        if self.k:
            for step in self._steps:
                step(arrays[-1], scratch)

    def _pass(self, verb: str) -> Start:
        """Return the pass over the vector, which finds the threshold of candidates unless that is a guess."""
        if verb in self._passes:
            return self._passes[verb]
        crowded = 5 * self.k > 4 * self._blocks  # the k-th largest maximum would leave too many
        counted = "only" if self._guesses else "entries" if crowded else "maxima"
        grid = blocks_for(-(-self.size // MEASURED_ENTRIES) * 32, self.engine)
        arguments = np.int64(self.size), self._maxima, np.uint64(self.k)
        prepared = self.engine.prepare(self._source, f"{verb}_{counted}", grid, *arguments)
        return self._passes.setdefault(verb, prepared)

    @cached_property
    def _steps(self) -> list[Start]:
        """The kernels after the pass over the vector, which find the entries."""
        prepare, ranges, most = partial(self.engine.prepare, self._source), self._ranges, self._capacity
        entries, per_warp = np.int64(self.size), np.int64(ranges.per_warp)
        candidates = self.buffers.get("candidates", most, np.uint32)
        offsets = self.buffers.get("places", most, index_dtype(self.size))
        segments = self.buffers.get("segments", 2 * ranges.warps, np.uint64)
        tallies = self.buffers.get("tallies", 2 * ranges.tallies, np.uint64)
        found = self._maxima, per_warp, candidates, offsets, np.uint64(most), segments
        steps = [*self._guess(), prepare("gather", ranges.blocks, entries, *found)]
        if self._guesses:
            steps.append(prepare("recount", blocks_for(self.size, self.engine), entries))
        blocks = blocks_for(self.size // 16, self.engine)
        steps += [prepare(f"refine_{digit}", blocks, entries, candidates) for digit in ("middle", "last")]
        spans = entries, per_warp, candidates, offsets, segments, tallies
        steps.append(prepare("tally", ranges.blocks, *spans))
        return [*steps, prepare("emit", ranges.blocks, *spans, *self._output)]

    @property
    def _guesses(self) -> bool:
        """Whether the threshold of candidates is a guess instead of a result of the pass."""
        return False

    def _guess(self) -> Iterator[Start]:
        """Yield the kernels that find the threshold of candidates."""
        yield from ()

    @property
    def _capacity(self) -> int:
        """The most candidates that are stored; with more, the vector is read again."""
        return min(self.size, 4 * self.most_selected + BLOCK)

    @cached_property
    def _scratches(self) -> tuple[Array, Array]:
        """Two scratches in turn: each run clears that of the previous one."""
        names = "scratch", "other scratch"
        first, second = (self.buffers.get(name, SCRATCH_WORDS, np.uint64) for name in names)
        self.engine.clear(first)
        self.engine.clear(second)
        return first, second

    @cached_property
    def _maxima(self) -> Array:
        return self.buffers.get("maxima", self._blocks, np.uint32)

    @cached_property
    def _output(self) -> tuple[Array, Array]:
        indices = self.buffers.get("indices", self.most_selected, index_dtype(self.size))
        return indices, self.buffers.get("values", self.most_selected, np.float32)


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

    def _guess(self) -> Iterator[Start]:
        if not self._guesses:
            return
        numbers = np.int64(self.size), np.int64(self._stride), np.uint64(self._rank), np.uint64(self.k)
        yield self.engine.prepare(self._source, "sample", 1, *numbers, threads=SAMPLING_THREADS)


class DeviceGaussian(DeviceSelector):
    """``3k/4`` to ``2k`` entries, as :class:`commlib.selection.Gaussian`; how many is known on the device.

    The moments are added in an order that depends on ``d`` alone, but not in the CPU's: the threshold may
    differ in its last bit.
    """

    at_most = 2

    @property
    def _guesses(self) -> bool:
        return self.k > 0

    def _guess(self) -> Iterator[Start]:
        z = -NormalDist().inv_cdf(self.k / (2 * self.size))
        entries, chunks = np.int64(self.size), -(-self.size // CHUNK)
        prepare = partial(self.engine.prepare, self._source)
        sums = self.buffers.get("moments", 2 * chunks, np.float64)
        thresholds = self.buffers.get("thresholds", LOWERED_BINS, np.uint32)
        yield prepare("moments", chunks, entries, np.float64(z), sums, thresholds, threads=LANES)
        numbers = np.uint64(self.k), np.uint64(self.most_selected)
        for name in ("few", "all"):
            read = entries, self._maxima, np.int64(self._ranges.per_warp), thresholds
            yield prepare(f"lower_{name}", self._ranges.blocks, *read, *numbers)


class DeviceBucketed(DeviceSelector):
    """The largest of each bucket of 512 entries, as :class:`commlib.selection.Bucketed`."""

    def __init__(self, size: int, k: int, **options: Any) -> None:
        super().__init__(size, k, **options)
        if self.size * self.k > LARGEST_PRODUCT:  # the kernel computes it in 64 bits
            raise InvalidArgument(f"size·k: expected less than 2⁶⁴, got {size:,} · {self.k:,}")

    def _launch(self, *arrays: Array, scratch: Array, stale: Array) -> None:
        summed = arrays if len(arrays) == 3 else (*arrays, None, None)
        self._select_buckets(*summed, scratch, stale)

    @cached_property
    def _select_buckets(self) -> Start:
        blocks = -(-self.size // (BUCKET * WARPS))
        arguments = np.int64(self.size), np.uint64(self.k), *self._output
        return self.engine.prepare(self._source, "select_buckets", blocks, *arguments)


DEVICE_SELECTORS: dict[str, type[DeviceSelector]] = {
    "exact": DeviceSelector,
    "mstopk": DeviceSelector,
    "dgc": DeviceDGC,
    "gaussian": DeviceGaussian,
    "bucketed": DeviceBucketed,
}
