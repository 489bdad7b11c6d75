"""Where a reducer's mean is made: memory that is used again once nobody holds the mean of a step before."""

import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np

from commlib.entries import clear_at
from commlib.memory import empty
from commlib.vectors import Float32, SparseVector, concatenate, index_dtype

MOST_MEANS = 2
ENTRIES_A_LINE = 16  # of float32: where one in so many is written, filling all is as fast as clearing those


class Mean:
    """An array for the mean, and where its entries may be other than 0.

    ``array``: float32, contiguous, of whatever values at first. What others write into it has to be told by
    ``overwrite``, or stays there.
    """

    def __init__(self, array: Float32) -> None:
        self.array = array
        self._places = np.empty(0, index_dtype(len(array)))
        self._written: int | None = None  # at so many of the places, or anywhere

    def overwrite(self) -> Float32:
        """Return the array, for any of its entries to be written."""
        self._written = None
        return self.array

    def write(self, parts: Sequence[tuple[int, SparseVector]]) -> Float32:
        """Hold the entries of ``parts``, which begin at their numbers and leave no gap; 0 everywhere else.

        Return the array.
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
                part.fill(0)
            vector.write_to(part)
            if is_noted and vector.indices is not None:
                places = self._places[filled : filled + vector.nnz]
                np.add(vector.indices, low, out=places, dtype=places.dtype)  # a part's own may be narrower
                filled += vector.nnz
        if is_noted:
            self._written = filled
        return self.array

    def result(self, mean: Float32 | None, out: Float32 | None) -> Float32:
        """Return what ``reduce`` returns for a step's ``mean``, all NaN for none: ``out``, or this array.

        An algorithm may have made the mean in an array of its own. In host memory, a view of this array is
        read-only.
        """
        if mean is None:
            self.overwrite().fill(np.nan)
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


class SparseMean:
    """The mean of a step that was given a ``SparseVector``, and is one.

    ``take`` gives the :class:`Mean` that it is made in where it is dense; one is taken only for that.
    """

    def __init__(self, take: Callable[[], Mean]) -> None:
        self._take = take
        self._taken: Mean | None = None

    def overwrite(self) -> Float32:
        """See :meth:`Mean.overwrite`."""
        return self._dense().overwrite()

    def _dense(self) -> Mean:
        if self._taken is None:
            self._taken = self._take()
        return self._taken

    def write(self, parts: Sequence[tuple[int, SparseVector]]) -> SparseVector:
        """Return the vector of the entries of ``parts``, which follow each other; see :meth:`Mean.write`.

        Its arrays are copies, or where one of the parts is dense, a mean.
        """
        if not any(vector.is_dense for _, vector in parts):
            return concatenate([vector for _, vector in parts])  # which copies, also a single one
        array = self._dense().write(parts)
        return SparseVector.trusted(len(array), None, array)

    def result(self, mean: SparseVector) -> SparseVector:
        """Return what ``reduce`` returns for a step's ``mean``: in host memory, a dense one is read-only."""
        if self._taken is None or not mean.is_dense:
            return mean
        return SparseVector.trusted(mean.size, None, self._taken.result(mean.values, None))


class Means:
    """Means of ``size`` entries in turn: one that the caller holds while the next is made, and that one.

    On a GPU each is a new one: CuPy keeps what was freed by itself.
    """

    def __init__(self, size: int, arrays: ModuleType = np) -> None:
        self._size, self._arrays = size, arrays
        self._made: list[tuple[Mean, int]] = []  # and the references to the memory of one that nobody holds

    def take(self) -> Mean:
        """Return a mean of whose memory nobody holds an array or a tensor: one made before, or a new one."""
        for mean, references in self._made:
            if sys.getrefcount(mean.array.base) == references:
                return mean
        mean = Mean(empty(self._size, self._arrays))
        if self._arrays is np:
            self._made = [*self._made, (mean, sys.getrefcount(mean.array.base))][-MOST_MEANS:]
        return mean

    def array(self) -> Float32:
        """Return the array of a mean that nobody holds, to be overwritten; it is the caller's while held."""
        return self.take().overwrite()[:]
