"""Messages of the device are those of the CPU, byte by byte, and decoded alike."""

import math

import numpy as np
import pytest

from commlib import InvalidArgument, SparseVector
from commlib.gpu import DeviceCodec
from commlib.gpu.codecs import GPU_CODECS
from commlib.wire import make_codec
from tests.extent import ALL, more
from tests.gpu.vectors import SEED, normal

NAMES = [*GPU_CODECS, "gap+fp16", "bitmap+qsgd4", "gap+qsgd2", "bitmap+bf16"]


def sparse(size, entries, seed=0):
    generator = np.random.default_rng([SEED, size, entries, seed])
    indices = np.sort(generator.choice(size, entries, replace=False)).astype(np.int32)
    values = (generator.standard_normal(entries) * 10.0 ** generator.integers(-9, 6, entries)).astype(
        np.float32
    )
    return SparseVector(size, indices, values)


def encoded(engine, name, vector):
    codec = DeviceCodec(name, vector.size, engine=engine)
    return engine.to_host(codec.encode(*map(engine.from_host, (vector.indices, vector.values))))


def decoded(engine, name, message, size):
    entries = DeviceCodec(name, size, engine=engine).decode(engine.from_host(message))
    indices = None if entries.indices is None else engine.to_host(entries.indices)
    return SparseVector(size, indices, engine.to_host(entries.values))


def assert_alike(engine, name, vector):
    codec = make_codec(name)
    expected = codec.encode(vector)
    case = f"{name}, {vector.nnz} of {vector.size}, seed {SEED}"
    assert encoded(engine, name, vector).tobytes() == expected.tobytes(), case
    found, again = decoded(engine, name, expected, vector.size), codec.decode(expected, vector.size)
    assert found.is_dense == again.is_dense, case
    np.testing.assert_array_equal(found.indices_or_range, again.indices_or_range, case)
    assert found.values.tobytes() == again.values.tobytes(), case


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [33, 9001, *more(1, 31, 32, 1000, 65537)])
def test_messages_are_those_of_the_cpu(engine, name, size):
    shares = (1 / size, 0.01, 1 / 7, 0.5, 1.0) if ALL or size < 1000 else (0.01, 0.5)
    for entries in sorted({math.ceil(share * size) for share in shares}):
        assert_alike(engine, name, sparse(size, entries))


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_every_float32_near_a_narrow_one_is_rounded_as_on_the_cpu(engine, name):
    exponents = np.arange(256, dtype=np.uint32) << 23
    mantissas = [
        *(0, 1, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7FFFFF)
    ]
    bits = np.add.outer(exponents, np.array(mantissas, np.uint32)).reshape(-1)
    values = np.concatenate([bits, bits | 0x8000_0000]).view(np.float32)
    values = values[np.isfinite(values)]
    assert_alike(engine, name, SparseVector(len(values), np.arange(len(values), dtype=np.int32), values))


@pytest.mark.parametrize("name", ["fp16", "bf16", "qsgd8", "qsgd4", "qsgd2"])
@pytest.mark.parametrize("bad", [np.nan, *more(np.inf, -np.inf)])
def test_what_is_not_finite_stays_so(engine, name, bad):
    values = normal(1000)
    values[700] = bad
    vector = SparseVector(50_000, np.arange(1000, dtype=np.int32), values)
    found = decoded(engine, name, encoded(engine, name, vector), 50_000)
    expected = make_codec(name).decode(make_codec(name).encode(vector), 50_000)
    assert not np.isfinite(found.values[700])
    np.testing.assert_array_equal(found.values, expected.values)


@pytest.mark.parametrize("name", ["gap", "bitmap", "raw32"])
def test_damaged_messages_are_refused(engine, name):
    vector = sparse(5000, 300)
    message = make_codec(name).encode(vector)
    for damaged in (message[:-1], message[:7], np.concatenate([message, message[:3]])):
        with pytest.raises(InvalidArgument, match=f"message: {len(damaged)} bytes are no vector of 5000"):
            decoded(engine, name, damaged, 5000)
