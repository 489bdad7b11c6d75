"""Buffers for the mean of a step, used again when no array refers to an earlier step's mean."""

import sys
from collections.abc import Sequence
from types import ModuleType

import numpy as np

from commlib.arrays import clear, empty
from commlib.entries import ENTRIES_A_LINE, clear_at
from commlib.vectors import Float32, SparseVector, concatenate, index_dtype, non_finite

MOST_MEANS = 2


class MeanBuffer:
    """An array for the mean, which remembers where it was written to, so that clearing it is cheap.

    ``array``: float32, contiguous, uninitialized at first. Call ``dense`` before writing to any entry.
    """

    def __init__(self, array: Float32) -> None:
        self.array = array
        self._places = np.empty(0, index_dtype(len(array)))
        self._written: int | None = None  # at so many of the places, or anywhere

    def dense(self) -> Float32:
        """Return the whole array, uninitialized, for the caller to write every entry."""
        self._written = None
        return self.array

    def clear(self) -> None:
        """Set every entry to 0 now, so that the next ``scatter`` need not."""
        if self._written is None:
            clear(self.array)
        else:
            clear_at(self.array, self._places[: self._written])
        self._written = 0

    def scatter(self, parts: Sequence[tuple[int, SparseVector]]) -> Float32:
        """Return the array with the entries of ``parts`` at their places, and 0 everywhere else.

        ``parts``: pairs of a first index and a vector, which together cover the array without a gap.
        """
        written, self._written = self._written, None
        if written is not None:
            clear_at(self.array, self._places[:written])
        entries = sum(vector.nnz for _, vector in parts)
        is_noted = (
            isinstance(self.array, np.ndarray)
            and entries * ENTRIES_A_LINE < len(self.array)
            and not any(vector.is_dense for _, vector in parts)
        )
        if is_noted and len(self._places) < entries:
            spare = entries // 4 if len(self._places) else 0  # what has grown once will grow again
            self._places = np.empty(entries + spare, self._places.dtype)
        filled = 0
        for low, vector in parts:
            part = self.array[low : low + vector.size]
            if written is None and not vector.is_dense:
                clear(part)
            vector.write_to(part)
            if is_noted and vector.indices is not None:
                places = self._places[filled : filled + vector.nnz]
                np.add(vector.indices, low, out=places, dtype=places.dtype)  # a part's own may be narrower
                filled += vector.nnz
        if is_noted:
            self._written = filled
        return self.array

    def result(self, mean: Float32 | None, out: Float32 | None) -> Float32:
        """Return the result of ``reduce`` for a step's ``mean`` (all NaN for none): ``out``, or this array.

        An algorithm may have made the mean in an array of its own. In host memory, a view of this array is
        read-only.
        """
        if mean is None:
            self.dense().fill(np.nan)
        elif mean is not self.array:
            if out is None:
                return mean
            out[...] = mean
        if out is not None:
            return out
        view: Float32 = self.array[:]
        if isinstance(view, np.ndarray):
            view.flags.writeable = False
        return view


class MeanBuffers:
    """Up to two buffers of ``size`` entries: the caller holds one mean while the next one is computed.

    On a GPU each buffer is new: CuPy keeps freed memory by itself.
    """

    def __init__(self, size: int, arrays: ModuleType = np) -> None:
        self.size, self.arrays = size, arrays
        self._made: list[tuple[MeanBuffer, int]] = []  # with the reference count of a free one

    def take(self) -> MeanBuffer:
        """Return an earlier buffer whose memory no array or tensor refers to, or a new buffer."""
        for mean, references in self._made:
            if sys.getrefcount(mean.array.base) == references:
                return mean
        mean = MeanBuffer(empty(self.size, self.arrays))
        if self.arrays is np:
            self._made = [*self._made, (mean, sys.getrefcount(mean.array.base))][-MOST_MEANS:]
        return mean

    def array(self) -> Float32:
        """Return the array of a free buffer, uninitialized; it is the caller's while the caller holds it."""
        return self.take().dense()[:]


class SparseMeanBuffer:
    """The buffer of a step whose gradient, and so whose mean, is a ``SparseVector``.

    A :class:`MeanBuffer` is taken from ``means`` only for a mean that turns out dense.
    """

    def __init__(self, means: MeanBuffers) -> None:
        self._means = means
        self._taken: MeanBuffer | None = None

    def clear(self) -> None:
        """Do nothing: the mean is expected to be sparse."""

    def dense(self) -> Float32:
        """Return the whole array, as :meth:`MeanBuffer.dense`."""
        return self._buffer().dense()

    def _buffer(self) -> MeanBuffer:
        if self._taken is None:
            self._taken = self._means.take()
        return self._taken

    def scatter(self, parts: Sequence[tuple[int, SparseVector]]) -> SparseVector:
        """Return the vector of the entries of ``parts``, see :meth:`MeanBuffer.scatter`.

        Its arrays are copies; if a part is dense, the vector is dense, in a buffer.
        """
        if not any(vector.is_dense for _, vector in parts):
            return concatenate([vector for _, vector in parts])  # which copies, also a single one
        array = self._buffer().scatter(parts)
        return SparseVector.trusted(len(array), None, array)

    def result(self, mean: SparseVector | None, out: None = None) -> SparseVector:
        """Return the mean of ``reduce``, a NaN for none; in host memory, a dense mean is read-only."""
        if mean is None:
            return non_finite(self._means.size, self._means.arrays)
        if self._taken is None or not mean.is_dense:
            return mean
        return SparseVector.trusted(mean.size, None, self._taken.result(mean.values, None))


AnyMeanBuffer = MeanBuffer | SparseMeanBuffer
