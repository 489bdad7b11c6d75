"""Codecs: how selected entries travel. One file each, one line in the table."""

from commlib.errors import look_up
from commlib.wire.base import Codec, Message
from commlib.wire.plain import Bf16, Fp16, Fp32

CODECS: dict[str, type[Codec]] = {
    "fp32": Fp32,
    "fp16": Fp16,
    "bf16": Bf16,
}

__all__ = ["CODECS", "Codec", "Message", "make_codec"]


def make_codec(name: str) -> Codec:
    """Return a new codec of the table ``CODECS``; an unknown name raises ``UnknownName``."""
    return look_up(CODECS, "codec", name)()
