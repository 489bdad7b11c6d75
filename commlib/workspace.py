"""Memory that is made once and used again in every step."""

from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from commlib.vectors import VALUE_BYTES, empty


class Workspace:
    """Arrays by the name of what they are for, each made once and made again only where it is too short.

    What ``get`` returned stays as it is until the next ``get`` of that name. CuPy keeps what was freed by
    itself, and knows which stream still reads it: on a GPU every array is a new one.
    """

    def __init__(self, arrays: ModuleType = np) -> None:
        self._arrays = arrays
        self._kept: dict[str, npt.NDArray[np.uint8]] = {}

    def get(self, name: str, length: int, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
        """Return a contiguous array of ``length`` entries of whatever values, aligned as ``empty`` is."""
        if self._arrays is not np:
            return self._arrays.empty(length, dtype)  # type: ignore[no-any-return]
        length_bytes = length * np.dtype(dtype).itemsize
        kept = self._kept.get(name)
        if kept is None or kept.nbytes < length_bytes:
            spare = 0 if kept is None else length_bytes // 4  # what has grown once will grow again
            kept = empty(-(-(length_bytes + spare) // VALUE_BYTES)).view(np.uint8)
            self._kept[name] = kept
        return kept[:length_bytes].view(dtype)
