"""What a codec is."""

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from commlib.vectors import SparseVector

Message = npt.NDArray[np.uint8]


class Codec(ABC):
    """Turns a sparse vector into bytes and back.

    A lossy codec's error stays in the sender's residual: a rank applies to itself what the others decode.
    """

    lossless: ClassVar[bool]

    @abstractmethod
    def encode(self, vector: SparseVector) -> Message:
        """Return a new array of bytes."""

    @abstractmethod
    def decode(self, message: Message, size: int) -> SparseVector:
        """Return the vector of ``size`` entries that ``message`` holds; it may share the message's memory."""
