"""A sample as it lies in the cache: a header, then the payload; nothing wrong is ever taken for right.

The header holds the key, so a record found under another key is caught; its own checksum, looked at always;
and the payload's, seeded with the header's, looked at on request. The header's is seeded with the generation
that the record belongs to, so one of another data set with the same key and size is caught as well.

>>> record = pack(7, b"abcdef", (2, 3))
>>> payload, shape = unpack(7, memoryview(record), verify=True)
>>> bytes(payload), shape
(b'abcdef', (2, 3))
"""

import struct

from xxhash import xxh3_64_intdigest

from datacache.errors import Damaged

MAGIC = b"ctr2"
MOST_DIMENSIONS = 4

_HEAD = struct.Struct("<4sIqQ4I")  # magic, dimensions, key, bytes of payload, shape
_CHECKS = struct.Struct("<QQ")  # of the head, of the payload
HEADER_BYTES = _HEAD.size + _CHECKS.size


def seed_of(fingerprint: str) -> int:
    """Return what the checksums of a generation are seeded with."""
    return xxh3_64_intdigest(fingerprint.encode())


def pack(key: int, payload: bytes | memoryview, shape: tuple[int, ...] = (), *, seed: int = 0) -> bytes:
    """Return the record of ``payload`` under ``key``; a ``memoryview`` must be contiguous.

    ``shape`` is kept beside it, at most four sizes below 2³²; ``()`` for a payload that is no array.
    ``seed``: that of the generation it is for.
    """
    if len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"shape: expected at most {MOST_DIMENSIONS} dimensions, got {shape}")
    size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    padded = shape + (0,) * (MOST_DIMENSIONS - len(shape))
    head = _HEAD.pack(MAGIC, len(shape), key, size, *padded)
    head_check = xxh3_64_intdigest(head, seed)
    checks = _CHECKS.pack(head_check, xxh3_64_intdigest(payload, head_check))
    return b"".join((head, checks, payload))


def unpack(
    key: int, record: memoryview, *, verify: bool, seed: int = 0
) -> tuple[memoryview, tuple[int, ...]]:
    """Return payload (a view of ``record``) and shape.

    Raises :class:`Damaged` unless the record is one of this key, this seed, of this format and length; with
    ``verify`` also unless every bit of the payload is as it was packed.
    """
    if len(record) < HEADER_BYTES:
        raise Damaged(f"sample {key}: expected at least {HEADER_BYTES} bytes, got {len(record)}")
    magic, dimensions, written_key, size, *padded = _HEAD.unpack_from(record)
    head_check, payload_check = _CHECKS.unpack_from(record, _HEAD.size)
    if magic != MAGIC or head_check != xxh3_64_intdigest(record[: _HEAD.size], seed):
        raise Damaged(f"sample {key}: the header is not what was written")
    if written_key != key:
        raise Damaged(f"sample {key}: found the record of sample {written_key}")
    payload = record[HEADER_BYTES:]
    if len(payload) != size:
        raise Damaged(f"sample {key}: expected {size} bytes, got {len(payload)}")
    if verify and payload_check != xxh3_64_intdigest(payload, head_check):
        raise Damaged(f"sample {key}: the payload is not what was written")
    return payload, tuple(padded[:dimensions])


def key_of(record: memoryview) -> int:
    """Return the key that a record says it has; whether that is right, ``unpack`` tells.

    >>> key_of(memoryview(pack(7, b"abcdef")))
    7
    """
    if len(record) < HEADER_BYTES:
        raise Damaged(f"expected a record of at least {HEADER_BYTES} bytes, got {len(record)}")
    return int(_HEAD.unpack_from(record)[2])
