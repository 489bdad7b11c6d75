"""Collations: what makes the arrays of a batch of its samples."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from datacache.buffers import Buffers
from datacache.order import Flags, Ids

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class BatchSpec:
    """The samples of a batch, and where it is: step ``step`` of ``epoch``, on ``rank`` of ``world_size``.

    ``counts``: which samples count; the others only pad the batch. ``seed``: of the order.
    """

    ids: Ids
    counts: Flags
    epoch: int
    step: int
    rank: int
    world_size: int
    seed: int


class Pools:
    """Reused memory for the arrays of batches, by shape and dtype."""

    def __init__(self) -> None:
        self._pools: dict[tuple[tuple[int, ...], str], Buffers] = {}

    def take(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Return an unused array with arbitrary contents; it is reused when nothing refers to it."""
        return self._pools.setdefault((shape, dtype), Buffers(shape, dtype)).take()


class Collation(ABC):
    """Makes the arrays of a batch of its samples."""

    @abstractmethod
    def arrays(
        self,
        samples: Sequence[npt.NDArray[np.uint8]],
        labels: npt.NDArray[np.int64],
        spec: BatchSpec,
        pools: Pools,
    ) -> tuple[Array, ...]:
        """Return the arrays of a batch, each with a row a sample of the network.

        ``samples`` and ``labels``: in the order of ``spec.ids``; samples are as the preprocessing made them,
        and not to be changed. The result depends only on them and on ``spec``. Any number of threads may call
        it.
        """
