"""Codecs: how selected entries are encoded in messages. One file each, one line in the table.

A codec is an index codec and a value codec. Its name is that of one of the two, with ``raw32`` or ``fp32``
for the other, or both joined by ``+``.

Indices: ``raw32`` plain, ``gap`` in 8.1 bits at density 1 % and 11.5 at 0.1 %, ``bitmap`` in one bit for each
entry of the vector. Values: ``fp32``, ``fp16`` and ``bf16`` plain, ``qsgd8``, ``qsgd4`` and ``qsgd2`` in so
many bits and a scale for every 512, ``hadamard8`` and ``hadamard4`` the same after a rotation, ``lloyd4`` to
``lloyd1`` in so many bits and what 1,024 have in common.

>>> for name in ("fp32", "gap", "gap+fp16", "gap+qsgd4", "gap+lloyd2"):
...     print(f"{name:10} {make_codec(name).message_bytes(250_000, 25_000_000):7} bytes")
fp32       2000000 bytes
gap        1267096 bytes
gap+fp16    767096 bytes
gap+qsgd4   394052 bytes
gap+lloyd2  338882 bytes
"""

from commlib.errors import InvalidArgument
from commlib.registry import resolve
from commlib.wire.base import Bf16, Codec, Fp16, Fp32, IndexCodec, Message, Raw32, ValueCodec
from commlib.wire.hadamard import Hadamard4, Hadamard8
from commlib.wire.indices import Bitmap, Gap
from commlib.wire.lloyd import Lloyd1, Lloyd2, Lloyd3, Lloyd4
from commlib.wire.qsgd import Qsgd2, Qsgd4, Qsgd8

VALUE_CODECS: dict[str, type[ValueCodec]] = {
    "fp32": Fp32,
    "fp16": Fp16,
    "bf16": Bf16,
    "qsgd8": Qsgd8,
    "qsgd4": Qsgd4,
    "qsgd2": Qsgd2,
    "hadamard8": Hadamard8,
    "hadamard4": Hadamard4,
    "lloyd4": Lloyd4,
    "lloyd3": Lloyd3,
    "lloyd2": Lloyd2,
    "lloyd1": Lloyd1,
}
CODECS: dict[str, type[IndexCodec] | type[ValueCodec]] = {
    "raw32": Raw32,
    "gap": Gap,
    "bitmap": Bitmap,
    **VALUE_CODECS,
}

__all__ = ["CODECS", "VALUE_CODECS", "Codec", "IndexCodec", "Message", "ValueCodec", "make_codec"]


def make_codec(name: str) -> Codec:
    """Return a new codec: ``name`` is an entry of ``CODECS``, or an index and a value codec joined by ``+``.

    Each may be an entry point of the group ``cloudtrain.codecs``, or an import path. An unknown part raises
    ``UnknownName``, two of one kind ``InvalidArgument``.
    """
    parts = [resolve(CODECS, "codec", part)() for part in str(name).split("+")]
    indices = [part for part in parts if isinstance(part, IndexCodec)]
    values = [part for part in parts if isinstance(part, ValueCodec)]
    if len(indices) > 1 or len(values) > 1 or len(indices) + len(values) < len(parts):
        expected = "an index codec, a value codec or one of each joined by +"
        raise InvalidArgument(f"expected {expected}, got {name!r}", key="wire")
    return Codec(indices[0] if indices else Raw32(), values[0] if values else Fp32())
