"""The same selections, sums and codecs on a GPU.

Plans are made once for a size, and sums once for their vectors; both own the memory of their results. All
take CuPy arrays. Nothing imports CuPy before the first plan or sum asks for :func:`current_engine`, which
raises ``GpuUnavailable``.
"""

from commlib.errors import GpuUnavailable
from commlib.gpu.codecs import DeviceCodec
from commlib.gpu.cupy_engine import current_engine
from commlib.gpu.scatter import RankSum, SegmentSquares, add_rows
from commlib.gpu.selection import DEVICE_SELECTORS

__all__ = [
    "DEVICE_SELECTORS",
    "DeviceCodec",
    "GpuUnavailable",
    "RankSum",
    "SegmentSquares",
    "add_rows",
    "current_engine",
]
