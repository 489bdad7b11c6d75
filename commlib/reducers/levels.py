"""The mean of values that all ranks round under common scales: a ring adds up their integers, not floats.

THC (arXiv 2302.08545, sections 4 and 5): the ranks agree on a scale for each bucket of rotated values, and
add up their levels under it. So a value is rounded once, by its sender, and sums are not. Here the scale is
the largest rotated value of all ranks, and nothing is clipped: what is clipped in every step would pile up.
"""

from collections.abc import Callable

import numpy as np

from commlib.errors import InvalidArgument
from commlib.reducers.base import Reducer
from commlib.vectors import VALUE_BYTES, Float32
from commlib.wire import VALUE_CODECS
from commlib.wire.base import Fp32
from commlib.wire.hadamard import Hadamard
from commlib.wire.qsgd import BUCKET, buckets_of

LARGEST_SCALE = float(np.finfo(np.float32).max) / (2 * BUCKET)  # rotated back, twice its bucket is finite
ADDABLE = [name for name, codec in VALUE_CODECS.items() if issubclass(codec, (Fp32, Hadamard))]


def addable_codec(values: str) -> Hadamard | None:
    """Return the codec whose levels ranks can add up; ``None`` for ``fp32``, which rounds nothing."""
    if values not in ADDABLE:
        expected = f"fp32 or a codec whose levels can be added up ({', '.join(ADDABLE)})"
        raise InvalidArgument(f"values: expected {expected}, got {values!r}")
    codec = VALUE_CODECS[values]()
    return codec if isinstance(codec, Hadamard) else None


def rings(values: str, size: int, ranks: int) -> list[tuple[int, int]]:
    """Return the entries of each ring all-reduce and their bytes: values, or scales and levels."""
    codec = addable_codec(values)
    if codec is None:
        return [(size, VALUE_BYTES)]
    return [(buckets_of(size), VALUE_BYTES), (size, codec.type_of_sums(ranks).itemsize)]


class LevelMean:
    """Makes the mean for a reducer; ``residual``, float32 of its size, is what this rank has rounded away.

    ``all_reduce(given, sums, add)`` exchanges among all ranks of the reducer.
    """

    def __init__(self, reducer: Reducer, codec: Hadamard, all_reduce: Callable[..., None]) -> None:
        self._reducer, self._codec, self._all_reduce = reducer, codec, all_reduce
        self._type = codec.type_of_sums(reducer.topology.world.size)
        self.residual = np.zeros(reducer.size, np.float32)
        self._spare = np.empty(reducer.size, np.float32)  # the next residual is made in it

    def make(self, gradient: Float32, mean: Float32) -> bool:
        """Write the mean to ``mean``, to the bit the same on all ranks.

        Return whether all ranks' values are finite, and small enough to be so when they are rotated back.
        """
        reducer, codec, rotated = self._reducer, self._codec, mean
        levels, sums = (reducer.workspace.get(name, reducer.size, self._type) for name in ("levels", "sums"))
        with reducer.measure("combine"):
            np.add(gradient, self.residual, out=self._spare)
            own_scales = codec.scales(codec.rotated(self._spare, rotated))
        scales = np.empty_like(own_scales)
        self._all_reduce(own_scales, scales, np.maximum)
        if not (scales <= LARGEST_SCALE).all():  # nor if one is a NaN
            return False
        with reducer.measure("combine"):
            codec.quantize(rotated, scales, levels)
            codec.restore(levels, scales, mean)
            self._spare -= mean
        self._all_reduce(levels, sums, np.add)
        with reducer.measure("combine"):
            codec.restore(sums, scales, mean, reducer.topology.world.size)
        return True

    def commit(self) -> None:
        """Keep the rounding errors of the latest mean."""
        self.residual, self._spare = self._spare, self.residual
