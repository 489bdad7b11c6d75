"""The promises of every codec, stated once. A line in CASES buys the whole suite."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib import CODECS, InvalidArgument, SparseVector, UnknownName, cost
from commlib.vectors import delta, index_dtype
from commlib.wire import make_codec

# Every codec, and the bytes of its message as a function of entries and size.
CASES = {
    "fp32": cost.sparse_bytes,
    "fp16": partial(cost.sparse_bytes, value_bytes=2),
    "bf16": partial(cost.sparse_bytes, value_bytes=2),
}


def to_bfloat16(values):
    """Round to the nearest number whose lower 16 bits are zero, ties to even; NaN and infinity stay."""
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    largest = np.uint32(0x7F7F0000).view(np.float32)
    return np.where(np.isfinite(values), np.clip(rounded, -largest, largest), values).astype(np.float32)


def to_float16(values):
    clipped = np.where(np.isfinite(values), np.clip(values, -65504, 65504), values)
    return clipped.astype(np.float16).astype(np.float32)


ROUNDING = {"fp32": np.array, "fp16": to_float16, "bf16": to_bfloat16}


def rounded(name, vector):
    """What the codec is to make of ``vector``."""
    return SparseVector(vector.size, vector.indices, ROUNDING[name](vector.values))


@pytest.fixture(params=CASES)
def name(request):
    return request.param


def drawn(size, count, seed=0):
    rng = np.random.default_rng([seed, size, count])
    indices = np.sort(rng.choice(size, count, replace=False)).astype(index_dtype(size))
    return SparseVector(size, indices, rng.standard_t(2, count).astype(np.float32))


def as_dense(vector):
    return SparseVector(vector.size, None, vector.to_dense())


def assert_equal(decoded, vector):
    """The same entries to the last bit, whatever the representation."""
    assert decoded.size == vector.size
    assert decoded.to_dense().tobytes() == vector.to_dense().tobytes()


VECTORS = {
    "sparse": drawn(1000, 37),
    "one-entry": drawn(1000, 1),
    "first-and-last": SparseVector(1000, np.array([0, 999], np.int32), np.array([1, -2], np.float32)),
    "empty": drawn(1000, 0),
    "one-below-delta": drawn(1000, 499),
    "at-delta": drawn(1000, 500),
    "past-delta": drawn(1000, 501),
    "odd-size-below-delta": drawn(999, 499),
    "odd-size-past-delta": drawn(999, 500),
    "every-entry": drawn(1000, 1000),
    "dense": as_dense(drawn(1000, 1000)),
    "dense-with-zeros": as_dense(drawn(1000, 3)),
    "size-1": drawn(1, 1),
    "size-1-empty": drawn(1, 0),
    "size-1-dense": as_dense(drawn(1, 1)),
    "size-2": drawn(2, 1),
    "size-3": drawn(3, 1),
    "size-0": as_dense(drawn(0, 0)),
}


@pytest.fixture(params=VECTORS.values(), ids=list(VECTORS))
def vector(request):
    return request.param


def test_every_codec_has_a_case():
    assert set(CASES) == set(CODECS)


def test_what_is_decoded_is_what_was_encoded(name, vector):
    codec = make_codec(name)
    assert_equal(codec.decode(codec.encode(vector), vector.size), rounded(name, vector))
    assert codec.lossless == (name == "fp32")


def test_the_message_is_as_long_as_the_cost_model_says(name, vector):
    message = make_codec(name).encode(vector)
    assert (message.dtype, message.shape) == (np.uint8, (CASES[name](vector.entries, vector.size),))


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 500),
    share=st.floats(0, 1),
    name=st.sampled_from(list(CASES)),
)
def test_any_vector_comes_back_in_a_message_of_the_promised_length(seed, size, share, name):
    vector = drawn(size, round(share * size), seed)
    codec = make_codec(name)
    message = codec.encode(vector)
    assert_equal(codec.decode(message, size), rounded(name, vector))
    assert len(message) == CASES[name](vector.entries, size)


def test_the_decoded_vector_is_dense_from_delta_on(name):
    codec = make_codec(name)
    value_bytes = 4 if name == "fp32" else 2
    for count in (333, 334, 499, 500):
        decoded = codec.decode(codec.encode(drawn(1000, count)), 1000)
        assert decoded.is_dense == (count >= delta(1000, value_bytes))


def test_the_entries_of_a_sparse_message_come_back_as_they_are(name):
    vector = drawn(1000, 37)
    codec = make_codec(name)
    decoded = codec.decode(codec.encode(vector), 1000)
    assert decoded.indices.dtype == np.int32
    assert decoded.indices.tobytes() == vector.indices.tobytes()
    assert decoded.values.tobytes() == rounded(name, vector).values.tobytes()


def test_extreme_values_are_rounded_and_clipped_and_bad_ones_stay_bad(name):
    values = np.array([-0.0, 2.0**-149, np.finfo(np.float32).max, -np.inf, np.nan], np.float32)
    expected = {"fp32": values[:3], "fp16": [-0.0, 0, 65504], "bf16": [-0.0, 0, 255 / 256 * 2.0**128]}[name]
    vector = SparseVector(1000, np.array([0, 1, 500, 998, 999], np.int32), values)
    codec = make_codec(name)
    decoded = codec.decode(codec.encode(vector), 1000).values
    assert decoded[:3].tobytes() == np.array(expected, np.float32).tobytes()
    assert decoded[3] == -np.inf
    assert np.isnan(decoded[4])


def test_beyond_32_bits_indices_come_back_whole(name):
    size = 2**31 + 10
    vector = SparseVector(size, np.array([0, 2**31, 2**31 + 9]), np.array([1, 2, 3], np.float32))
    codec = make_codec(name)
    message = codec.encode(vector)
    decoded = codec.decode(message, size)
    assert len(message) == CASES[name](3, size)
    np.testing.assert_array_equal(decoded.indices, vector.indices)
    np.testing.assert_array_equal(decoded.values, vector.values)


def test_encoding_leaves_the_vector_and_shares_nothing_with_it(name, vector):
    before = vector.to_dense()
    make_codec(name).encode(vector)[:] = 255
    assert vector.to_dense().tobytes() == before.tobytes()


def test_the_same_vector_gives_the_same_message(name, vector):
    messages = [make_codec(name).encode(vector).tobytes() for _ in range(2)]
    assert messages[0] == messages[1]


def test_an_unknown_codec_lists_the_known_ones_and_suggests_the_nearest():
    with pytest.raises(UnknownName) as caught:
        make_codec("fp23")
    assert str(caught.value) == f'unknown codec "fp23" (known: {", ".join(CODECS)}), did you mean "fp32"?'


def test_a_message_of_an_impossible_length_is_refused():
    with pytest.raises(InvalidArgument, match="message: 13 bytes are no vector of 100 entries"):
        make_codec("fp32").decode(np.zeros(13, np.uint8), 100)
