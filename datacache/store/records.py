"""The bytes of one record: a header with checksums, then the payload.

The header holds the record's key, so a record that is read under another key is detected; its own checksum,
seeded with the fingerprint of the store, so a record of another data set with the same key and size is
detected too; and the payload's checksum, seeded with the header's.

>>> record = b"".join(pack(7, b"abcdef", (2, 3)))
>>> payload, shape = unpack(7, np.frombuffer(record, np.uint8))
>>> payload.tobytes(), shape
(b'abcdef', (2, 3))
"""

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from datacache.errors import Damaged

Record = Sequence[bytes | memoryview]
"""The bytes of a record in parts, written one after the other: to join them would copy the payload."""

Bytes = npt.NDArray[np.uint8]

MAGIC = b"ctr2"
MOST_DIMENSIONS = 4

_HEAD = struct.Struct("<4sIqQ4I")  # magic, dimensions, key, bytes of payload, shape
_CHECKS = struct.Struct("<QQ")  # of the head, of the payload
HEADER_BYTES = _HEAD.size + _CHECKS.size


def seed_of(fingerprint: str) -> int:
    """Return the seed of the checksums of a store with this fingerprint."""
    return xxh3_64_intdigest(fingerprint.encode())


def pack(key: int, payload: bytes | memoryview, shape: tuple[int, ...] = (), *, seed: int = 0) -> Record:
    """Return the record of ``payload`` under ``key``; a ``memoryview`` must be contiguous, and is not copied.

    ``shape`` is stored with it, at most four sizes below 2³²; ``()`` if the payload is not an array.
    ``seed``: that of the store (see :func:`seed_of`).
    """
    if len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"shape: expected at most {MOST_DIMENSIONS} dimensions, got {shape}")
    padded = shape + (0,) * (MOST_DIMENSIONS - len(shape))
    head = _HEAD.pack(MAGIC, len(shape), key, memoryview(payload).nbytes, *padded)
    head_check = xxh3_64_intdigest(head, seed)
    checks = _CHECKS.pack(head_check, xxh3_64_intdigest(payload, head_check))
    return head + checks, payload


def bytes_of(record: Record) -> int:
    """Return the length of a record in bytes."""
    return sum(memoryview(part).nbytes for part in record)


def unpack(key: int | None, record: Bytes, *, seed: int = 0) -> tuple[Bytes, tuple[int, ...]]:
    """Return payload (a view of ``record``) and shape.

    Raises :class:`Damaged` unless the header has this key (any if ``None``), seed, format and length, and the
    payload matches its checksum.
    """
    if len(record) < HEADER_BYTES:
        raise Damaged(f"sample {key}: expected at least {HEADER_BYTES} bytes, got {len(record)}")
    view = record.data
    magic, dimensions, written_key, size, *padded = _HEAD.unpack_from(view)
    head_check, payload_check = _CHECKS.unpack_from(view, _HEAD.size)
    if magic != MAGIC or head_check != xxh3_64_intdigest(view[: _HEAD.size], seed):
        raise Damaged(f"sample {key}: the header is not what was written")
    if key not in (None, written_key):
        raise Damaged(f"sample {key}: found the record of sample {written_key}")
    payload = view[HEADER_BYTES:]
    if len(payload) != size:
        raise Damaged(f"sample {key}: expected {size} bytes, got {len(payload)}")
    if payload_check != xxh3_64_intdigest(payload, head_check):
        raise Damaged(f"sample {key}: the payload is not what was written")
    return record[HEADER_BYTES:], tuple(padded[:dimensions])
