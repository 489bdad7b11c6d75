"""Records: what is packed comes out, and nothing else does."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datacache.errors import Damaged
from datacache.store.files import create_file
from datacache.store.record_files import RecordFile
from datacache.store.records import HEADER_BYTES, pack, unpack

KEYS = st.integers(0, 2**63 - 1)
SHAPES = st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple)


@given(KEYS, st.binary(max_size=500), SHAPES)
def test_what_is_packed_comes_out(key: int, payload: bytes, shape: tuple[int, ...]) -> None:
    record = b"".join(pack(key, payload, shape))
    assert len(record) == HEADER_BYTES + len(payload)
    found, found_shape = unpack(key, np.frombuffer(record, np.uint8))
    assert (found.tobytes(), found_shape) == (payload, shape)


@pytest.mark.parametrize("size", [0, 1, 17, 400, 30_000])
def test_every_flipped_bit_is_caught(size: int) -> None:
    generator = random.Random(size)
    record = bytearray(b"".join(pack(5, generator.randbytes(size), (size, 1))))
    bits = range(8 * len(record)) if size < 500 else generator.sample(range(8 * len(record)), 2000)
    for bit in bits:
        record[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged):
            unpack(5, np.frombuffer(record, np.uint8))
        record[bit // 8] ^= 1 << bit % 8
    unpack(5, np.frombuffer(record, np.uint8))


def test_a_file_that_ends_before_what_is_read_is_named_with_the_place(tmp_path: Path) -> None:
    path = tmp_path / "records"
    path.write_bytes(b"0123456789")
    path.chmod(0o600)
    file = RecordFile(path)
    assert bytes(file.read(7, 3)) == b"789"
    with pytest.raises(Damaged, match=r"records: expected 4 bytes at 7, got 3$"):
        file.read(7, 4)


def test_many_reads_are_of_one_array_which_is_free_when_no_view_is_left(tmp_path: Path) -> None:
    content = random.Random(3).randbytes(5000)
    path = tmp_path / "records"
    create_file(path, content)
    file, starts, sizes = (
        RecordFile(path),
        np.array([4000, 0, 17, 4990, 6000, 5]),
        np.array([7, 0, 999, 99, 1, 3]),
    )
    first = file.read_many(starts, sizes)
    expected = [content[at : at + size] for at, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
    assert [each.tobytes() for each in first] == expected  # shorter where the file ends
    kept, place = first[2], first[0].ctypes.data
    del first
    second = file.read_many(starts[:3], sizes[:3])
    assert second[0].ctypes.data != place and kept.tobytes() == expected[2]
    del kept
    assert file.read_many(starts, sizes)[0].ctypes.data == place
    assert file.read_many(starts[:0], sizes[:0]) == []
    unopened = np.array([-1])  # as of a descriptor that cannot be read
    assert [len(each) for each in file.read_many(unopened, np.array([4]))] == [0]


def test_all_of_many_parts_is_written_also_a_few_bytes_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, calls = random.Random(7), list[int]()
    parts = [memoryview(generator.randbytes(each % 5)) for each in range(3000)]
    parts[9] = memoryview(generator.randbytes(90)).cast("B", (6, 5, 3))
    pwritev = os.pwritev

    def little(descriptor: int, buffers: list[memoryview], start: int) -> int:
        calls.append(sum(each.nbytes for each in buffers))
        joined = b"".join(buffers)
        return pwritev(descriptor, [joined[: 1 + len(joined) // 3]], start) if joined else 0

    for limited in (False, True):
        if limited:
            monkeypatch.setattr(os, "pwritev", little)
        path = tmp_path / str(limited)
        create_file(path)
        RecordFile(path, os.O_RDWR).write(parts, 11)
        assert path.read_bytes() == bytes(11) + b"".join(parts)
    assert max(calls) < sum(each.nbytes for each in parts)  # no call has more than the system takes


def test_a_record_under_another_key_is_caught() -> None:
    with pytest.raises(Damaged, match="sample 6: found the record of sample 5"):
        unpack(6, np.frombuffer(b"".join(pack(5, b"payload")), np.uint8))


def test_a_record_of_another_length_is_caught() -> None:
    record = b"".join(pack(5, b"payload"))
    for wrong in (*(record[:length] for length in range(len(record))), record + b"x"):
        with pytest.raises(Damaged):
            unpack(5, np.frombuffer(wrong, np.uint8))


def test_five_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 4 dimensions"):
        pack(1, b"", (1, 1, 1, 1, 1))
