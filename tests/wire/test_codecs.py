"""The promises of every codec, stated once. A line in CASES buys the whole suite."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib import CODECS, Codec, InvalidArgument, SparseVector, UnknownName, cost
from commlib.vectors import index_dtype
from commlib.wire import VALUE_CODECS, IndexCodec, ValueCodec, make_codec
from tests.extent import examples

# Every codec, as the index and the value codec that it stands for.
CASES = {
    "raw32": ("raw32", "fp32"),
    "gap": ("gap", "fp32"),
    "bitmap": ("bitmap", "fp32"),
    "fp32": ("raw32", "fp32"),
    "fp16": ("raw32", "fp16"),
    "bf16": ("raw32", "bf16"),
    "qsgd8": ("raw32", "qsgd8"),
    "qsgd4": ("raw32", "qsgd4"),
    "qsgd2": ("raw32", "qsgd2"),
    "lloyd4": ("raw32", "lloyd4"),
    "lloyd3": ("raw32", "lloyd3"),
    "lloyd2": ("raw32", "lloyd2"),
    "lloyd1": ("raw32", "lloyd1"),
    "raw32+bf16": ("raw32", "bf16"),
    "gap+fp16": ("gap", "fp16"),
    "gap+qsgd8": ("gap", "qsgd8"),
    "gap+qsgd2": ("gap", "qsgd2"),
    "gap+lloyd2": ("gap", "lloyd2"),
    "bitmap+bf16": ("bitmap", "bf16"),
    "bitmap+qsgd4": ("bitmap", "qsgd4"),
}
BUCKET = 512
LEVELS = {"qsgd8": 127, "qsgd4": 7, "qsgd2": 1}
ROUNDS = {"lloyd4": 0, "lloyd3": 1, "lloyd2": 2, "lloyd1": 0}
BUCKETS = dict.fromkeys(LEVELS, BUCKET) | dict.fromkeys(ROUNDS, 1024)


def to_narrow(dtype):
    """Round each value to the nearest of a narrower type, of which the largest stands for all beyond."""
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    return lambda values: np.clip(values, -largest, largest).astype(dtype).astype(np.float32)


def to_levels(largest_level):
    """Round each value to the nearest of 2L + 1 levels between ± the largest of its 512."""

    def rounding(values):
        rounded = np.zeros(len(values))
        for start in range(0, len(values), BUCKET):
            bucket = values[start : start + BUCKET].astype(np.float64)
            if bucket.any():
                step = np.abs(bucket).max() / largest_level
                rounded[start : start + BUCKET] = np.rint(bucket / step) * step
        return rounded.astype(np.float32) + np.float32(0)  # no −0

    return rounding


def exactly(entries):
    """How many of a bucket of ``lloyd`` are sent as they are: 5 of 1,024."""
    return -(-5 * entries // 1024)


def to_means(classes, rounds):
    """Replace each magnitude by the mean of its class, but for the largest of a bucket, which stay."""

    def rounding(values):
        buckets = [values[start : start + 1024] for start in range(0, len(values), 1024)]
        return np.concatenate([bucket_of_means(each, classes, rounds) for each in buckets] or [values])

    return rounding


def bucket_of_means(bucket, classes, rounds):
    magnitudes, means = np.abs(bucket), bucket.copy()
    rest = np.sort(np.argsort(-magnitudes, kind="stable")[exactly(len(bucket)) :])
    if len(rest) and magnitudes[rest].any():
        means[rest] = np.copysign(class_means(magnitudes[rest], classes, rounds), bucket[rest])
    return means + np.float32(0)  # no −0


def class_means(magnitudes, classes, rounds):
    """Classes that begin at equal steps of the bits, over six octaves at most; a 0 keeps one for itself."""
    scale = 2**20 / np.float64(magnitudes.max())
    whole = np.floor(magnitudes * scale + 0.5)
    lowest, largest = (int(each(magnitudes[magnitudes > 0]).view(np.int32)) for each in (np.min, np.max))
    lowest = max(lowest, largest - (6 << 23))
    apart = int(classes > 1 and (magnitudes == 0).any())
    bits = [lowest + (largest - lowest) * (j - apart) // (classes - apart) for j in range(1, classes)]
    borders = np.ceil(np.array(bits, np.int32).view(np.float32) * scale)
    for done in range(rounds + 1):
        of_class = np.searchsorted(borders, whole, side="right")
        levels = np.concatenate([[0.0], borders]).astype(np.float32)
        for j in np.unique(of_class):
            levels[j] = whole[of_class == j].mean()
        if apart:
            levels[0] = 0
        if done < rounds:
            borders = np.ceil((levels[1:] + levels[:-1]).astype(np.float64) / 2)
    return (levels / scale).astype(np.float32)[of_class]


ROUNDING = {"fp32": np.array, "fp16": to_narrow(np.float16), "bf16": to_narrow(ml_dtypes.bfloat16)}
ROUNDING |= {name: to_levels(largest) for name, largest in LEVELS.items()}
ROUNDING |= {name: to_means(1 << (int(name[-1]) - 1), rounds) for name, rounds in ROUNDS.items()}


def value_bytes(name, entries):
    if name in LEVELS:
        return 4 * -(-entries // BUCKET) + -(-entries * int(name[-1]) // 8)
    if name in ROUNDS:
        bits = int(name[-1])
        levels = -(-entries // 1024) * 2 ** (bits - 1)
        return 4 * levels + 6 * exactly(entries) + -(-entries * bits // 8)
    return entries * (4 if name == "fp32" else 2)


def little_endian(bits):
    """Bits, the lowest of the first byte first, as whole 32-bit words."""
    return np.packbits(bits + [0] * (-len(bits) % 32), bitorder="little").tobytes()


def bitmap_message(vector):
    bits = np.zeros(vector.size, int)
    bits[vector.indices] = 1
    return little_endian(bits.tolist())


def gap_message(vector):
    """Rice's code, bit by bit: the count, the low bits of all gaps, the rest of all gaps in unary."""
    entries = len(vector.indices)
    shift = 0
    while 2**shift < 0.48121182505960347 * vector.size / entries:  # the logarithm of the golden ratio
        shift += 1
    gaps = (np.diff(vector.indices.astype(np.int64), prepend=-1) - 1).tolist()
    low = [gap >> bit & 1 for gap in gaps for bit in range(shift)]
    unary = [bit for gap in gaps for bit in [0] * (gap >> shift) + [1]]
    return np.array([entries], vector.indices.dtype).tobytes() + little_endian(low + unary)


INDEX_MESSAGE = {"raw32": lambda each: each.indices.tobytes(), "gap": gap_message, "bitmap": bitmap_message}


def expected_bytes(name, vector):
    """Indices and values, or all values where that is not longer."""
    index, value = CASES[name]
    dense = value_bytes(value, vector.size)
    if vector.indices is None:
        return dense
    if vector.nnz == 0:
        return 0
    return min(dense, len(INDEX_MESSAGE[index](vector)) + value_bytes(value, vector.nnz))


def travels_dense(name, vector):
    return expected_bytes(name, vector) == value_bytes(CASES[name][1], vector.size)


def rounded(name, vector):
    """What the codec is to make of ``vector``."""
    if travels_dense(name, vector):
        vector = as_dense(vector)
    return SparseVector(vector.size, vector.indices, ROUNDING[CASES[name][1]](vector.values))


@pytest.fixture(params=CASES)
def name(request):
    return request.param


def drawn(size, count, seed=0):
    rng = np.random.default_rng([seed, size, count])
    indices = np.sort(rng.choice(size, count, replace=False)).astype(index_dtype(size))
    return SparseVector(size, indices, rng.standard_t(2, count).astype(np.float32))


def at(indices, size, values=None):
    """A vector of these entries, all of magnitude 2: every codec brings them back as they are."""
    if values is None:
        values = np.where(np.arange(len(indices)) % 3, 2, -2)
    return SparseVector(size, np.array(indices, index_dtype(size)), np.array(values, np.float32))


def as_dense(vector):
    return SparseVector(vector.size, None, vector.to_dense())


def assert_equal(decoded, vector):
    """The same entries to the last bit, whatever the representation."""
    assert decoded.size == vector.size
    assert decoded.to_dense().tobytes() == vector.to_dense().tobytes()


VECTORS = {
    "sparse": drawn(1000, 37),
    "one-entry": drawn(1000, 1),
    "only-the-first": at([0], 1000),
    "only-the-last": at([999], 1000),
    "first-and-last": at([0, 999], 1000),
    "a-run-then-a-gap": at([*range(60), 9000], 9001),
    "a-gap-then-a-run": at(range(8940, 9001), 9001),
    "every-32nd": at(range(31, 9000, 32), 9001),
    "empty": drawn(1000, 0),
    "several-buckets": drawn(40_000, 1100),
    "one-below-delta": drawn(1000, 499),
    "at-delta": drawn(1000, 500),
    "past-delta": drawn(1000, 501),
    "odd-size-below-delta": drawn(999, 499),
    "odd-size-past-delta": drawn(999, 500),
    "nearly-every-entry": drawn(1000, 990),
    "every-entry": drawn(1000, 1000),
    "dense": as_dense(drawn(1000, 1000)),
    "dense-with-zeros": as_dense(drawn(1000, 3)),
    "explicit-zeros": at([3, 5, 800], 1000, [0, 1, 0]),
    "only-zeros": at([3, 5, 800], 1000, [0, 0, 0]),
    "size-1": drawn(1, 1),
    "size-1-empty": drawn(1, 0),
    "size-1-dense": as_dense(drawn(1, 1)),
    "size-2": drawn(2, 1),
    "size-3": drawn(3, 1),
    "size-0": as_dense(drawn(0, 0)),
}


def test_every_codec_has_a_case_and_the_table_keeps_its_order():
    cases = [name for name in CODECS if not name.startswith("hadamard")]  # which test_hadamard.py holds
    assert cases == [name for name in CASES if "+" not in name]
    assert all(issubclass(codec, IndexCodec) for codec in list(CODECS.values())[:3])
    assert all(issubclass(codec, ValueCodec) for codec in list(CODECS.values())[3:])
    assert list(VALUE_CODECS) == list(CODECS)[3:]


def test_what_is_decoded_is_what_was_encoded_in_as_many_bytes_as_promised(name):
    codec = make_codec(name)
    assert isinstance(codec, Codec)
    assert codec.lossless == (CASES[name][1] == "fp32")
    for label, vector in VECTORS.items():
        before, message = vector.to_dense(), codec.encode(vector)
        decoded = codec.decode(message, vector.size)
        assert_equal(decoded, rounded(name, vector))
        assert decoded.is_dense == (vector.size > 0 and travels_dense(name, vector)), label
        assert (message.dtype, message.shape) == (np.uint8, (expected_bytes(name, vector),)), label
        most = codec.message_bytes(vector.nnz, vector.size)
        assert len(message) == most or (CASES[name][0] == "gap" and len(message) < most), label
        assert make_codec(name).encode(vector).tobytes() == message.tobytes(), label
        message[:] = 255
        assert vector.to_dense().tobytes() == before.tobytes(), label


@settings(max_examples=examples(300))
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 2000),
    share=st.floats(0, 1),
    name=st.sampled_from(list(CASES)),
)
def test_any_vector_comes_back_from_a_message_of_the_promised_length(seed, size, share, name):
    vector = drawn(size, round(share * size), seed)
    codec = make_codec(name)
    message = codec.encode(vector)
    decoded = codec.decode(message, size)
    assert_equal(decoded, rounded(name, vector))
    assert decoded.is_dense == travels_dense(name, vector)
    assert len(message) == expected_bytes(name, vector) <= codec.message_bytes(vector.nnz, size)


def test_the_bytes_of_plain_messages_are_those_of_the_cost_model():
    for size in (1, 2, 3, 999, 1000, 2**31 + 8):
        for entries in {0, 1, size // 3, size // 2, size // 2 + 1, size}:
            for names, bytes_of_a_value in ((("fp32", "raw32+fp32"), 4), (("fp16", "bf16"), 2)):
                for name in names:
                    found = make_codec(name).message_bytes(entries, size)
                    assert found == cost.sparse_bytes(entries, size, bytes_of_a_value)


@pytest.mark.parametrize("size", [2**31 - 1, 2**33])
@pytest.mark.parametrize("name", [name for name in CASES if "bitmap" not in name])  # 256 MiB and more
def test_beyond_32_bits_indices_come_back_whole(name, size):
    vector = at([0, 2**31 - 3, size - 1], size)
    codec = make_codec(name)
    message = codec.encode(vector)
    decoded = codec.decode(message, size)
    assert len(message) == expected_bytes(name, vector)
    assert decoded.indices.dtype == index_dtype(size)
    assert decoded.indices.tobytes() == vector.indices.tobytes()
    assert decoded.values.tobytes() == vector.values.tobytes()


def test_a_message_begins_with_its_indices_word_by_word(name):
    index, value = CASES[name]
    vector = drawn(20_000, 450)
    message = make_codec(name).encode(vector).tobytes()
    assert message[: len(message) - value_bytes(value, 450)] == INDEX_MESSAGE[index](vector)
    if value == "fp32":
        assert message[-450 * 4 :] == vector.values.tobytes()


# Plain values


@pytest.mark.parametrize("name", [name for name, (_, value) in CASES.items() if value not in BUCKETS])
def test_extreme_values_are_rounded_and_clipped_and_bad_ones_stay_bad(name):
    values = np.array([-0.0, 2.0**-149, np.finfo(np.float32).max, -np.inf, np.nan], np.float32)
    largest_bf16 = 255 / 256 * 2.0**128
    of_type = {"fp32": values[:3], "fp16": [-0.0, 0, 65504], "bf16": [-0.0, 0, largest_bf16]}
    expected = np.array(of_type[CASES[name][1]], np.float32)
    vector = at([0, 1, 500, 998, 999], 1000, values)
    codec = make_codec(name)
    decoded = codec.decode(codec.encode(vector), 1000).values
    assert decoded[:3].tobytes() == expected.tobytes()
    assert decoded[3] == -np.inf
    assert np.isnan(decoded[4])


# Gaps


@pytest.mark.parametrize(
    ("size", "most_bits"),
    [(2_500_000, 4.9), (25_000_000, 8.2), (250_000_000, 11.6)],  # entropy of an index: 4.7, 8.1 and 11.4 bits
    ids=["10%", "1%", "0.1%"],
)
def test_gaps_of_random_indices_take_little_more_than_their_entropy(size, most_bits):
    vector = drawn(size, 250_000)
    codec = make_codec("gap")
    message = codec.encode(vector)
    assert 8 * (len(message) - vector.values.nbytes) / vector.nnz <= most_bits
    assert_equal(codec.decode(message, size).slice(0, 10**6), vector.slice(0, 10**6))


def test_gaps_of_multiples_of_a_power_of_two_take_the_most_bytes_there_can_be():
    # size/entries = 65, so b = 5: 1 + 5 bits and two zeros for each gap of 64
    codec = make_codec("gap")
    message = codec.encode(at(range(64, 65 * 100, 65), 65 * 100))
    assert len(message) == 4 + 800 // 8 + 4 * 100 == codec.message_bytes(100, 65 * 100)


# Levels


@pytest.fixture(params=BUCKETS)
def levels_name(request):
    return request.param


def decoded_values(name, values):
    """What becomes of these values as one entry in a hundred, so that they travel sparse."""
    vector = at(np.arange(len(values)) * 100, 100 * len(values), values)
    codec = make_codec(f"gap+{name}")
    decoded = codec.decode(codec.encode(vector), vector.size)
    assert decoded.indices.tobytes() == vector.indices.tobytes()
    return decoded.values


# A few times the smallest float32, the first that is no denormal, an ordinary one, and the largest.
MAGNITUDES = [2.0**-146, 2.0**-126, 1.0, np.finfo(np.float32).max / 1e3]


@settings(max_examples=examples(200))
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 1600),
    magnitude=st.sampled_from(MAGNITUDES),
    name=st.sampled_from(list(LEVELS)),
)
def test_rounding_to_levels_is_to_the_nearest_and_loses_at_most_the_value(seed, count, magnitude, name):
    rng = np.random.default_rng(seed)
    values = (magnitude * np.clip(rng.standard_t(2, count), -999, 999)).astype(np.float32)
    # halves of the step between levels, the worst that can be rounded
    values[::7] = np.abs(values).max() / np.float32(2 * LEVELS[name])
    decoded = decoded_values(name, values)
    lost = np.abs(values.astype(np.float64) - decoded)
    assert (lost <= np.abs(values)).all()
    for start in range(0, count, BUCKET):
        bucket = slice(start, start + BUCKET)
        largest = np.abs(values[bucket]).argmax()
        assert decoded[bucket][largest] == values[bucket][largest]
        half_step = np.abs(values[bucket]).max().astype(np.float64) / LEVELS[name] / 2
        # the decoded value is rounded to float32: by 2⁻²⁴ of at most 2L half steps, or half a denormal
        assert lost[bucket].max() <= half_step * (1 + LEVELS[name] * 2.0**-23) + 2.0**-150
        # the largest is exact, so the error is smaller than the bucket: what error feedback needs
        size = len(values[bucket])
        square = (values[bucket].astype(np.float64) ** 2).sum()
        assert (lost[bucket] ** 2).sum() <= (1 - 1 / size) * square * (1 + 1e-12)  # float64 sums of ≤ 512


def test_zeros_come_back_as_zeros(levels_name):
    values = np.zeros(1030, np.float32)
    values[600] = -3
    assert decoded_values(levels_name, values).tobytes() == values.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_a_bad_value_makes_its_bucket_bad_and_no_other(levels_name, bad):
    bucket = BUCKETS[levels_name]
    values = np.ones(2 * bucket + 476, np.float32)
    values[bucket + 188] = bad
    decoded = decoded_values(levels_name, values)
    is_bad = ~np.isfinite(decoded)
    assert is_bad[bucket : 2 * bucket].all()
    assert (decoded[~is_bad] == 1).all()
    assert np.count_nonzero(is_bad) == bucket


@pytest.mark.parametrize(
    ("name", "values", "packed"),
    [
        ("qsgd8", [127, -127, 1, 0, -3.4], [0x7F, 0x81, 0x01, 0x00, 0xFD]),
        ("qsgd4", [7, -7, 1, 0, -3.4], [0x97, 0x01, 0x0D]),
        ("qsgd2", [1, -1, 0, 0.4, 0.6], [0b00_00_11_01, 0b01]),
    ],
)
def test_levels_are_packed_behind_their_scale(name, values, packed):
    message = make_codec(name).encode(SparseVector(5, None, np.array(values, np.float32)))
    assert message.tobytes() == np.float32(values[0]).tobytes() + bytes(packed)


# Means of classes


@pytest.mark.parametrize("name", ROUNDS)
@pytest.mark.parametrize("value", [1 / 3, -1e-45, 3e38])
def test_equal_magnitudes_come_back_as_they_are(name, value):
    values = np.where(np.arange(1500) % 3, value, -value).astype(np.float32)
    for count in (1, 2, 5, 1024, 1030, 1500):
        assert decoded_values(name, values[:count]).tobytes() == values[:count].tobytes()


@pytest.mark.parametrize(
    ("name", "levels", "codes"),
    [
        ("lloyd1", [4.25], [0b0000_1010]),
        ("lloyd2", [1.5, 7], [0b11_01_10_00, 0b00]),
        ("lloyd3", [1, 2, 2.5, 7], [0b11_101_000, 0b000_111_0]),  # no entry from 2.5 to 5
    ],
)
def test_codes_are_packed_behind_levels_and_what_is_sent_as_it_is(name, levels, codes):
    message = make_codec(name).encode(SparseVector(5, None, np.array([1, -2, 6, -8, 9], np.float32)))
    expected = np.array([*levels, 9], np.float32).tobytes() + np.uint16(4).tobytes()
    assert message[: len(expected)].tobytes() == expected
    assert message[len(expected) :].tolist() == codes


# Names


def test_an_unknown_codec_lists_the_known_ones_and_suggests_the_nearest():
    for name in ("fp23", "gap+fp23", "fp23+gap"):
        with pytest.raises(UnknownName) as caught:
            make_codec(name)
        assert str(caught.value) == f'unknown codec "fp23" (known: {", ".join(CODECS)}), did you mean "fp32"?'


@pytest.mark.parametrize("name", ["gap+bitmap", "fp32+fp16", "gap+gap", "gap+fp16+qsgd8"])
def test_two_codecs_of_one_kind_are_refused(name):
    with pytest.raises(InvalidArgument) as caught:
        make_codec(name)
    expected = "an index codec, a value codec or one of each joined by +"
    assert str(caught.value) == f"wire: expected {expected}, got {name!r}"


# Damage


def decoded_or_refused(name, message, size):
    """A vector of that size, or the one error that says there is none."""
    try:
        decoded = make_codec(name).decode(message, size)
    except InvalidArgument as error:
        assert str(error) == f"message: {len(message)} bytes are no vector of {size} entries"  # noqa: PT017
        return None
    assert decoded.size == size
    with np.errstate(invalid="ignore"):  # any bytes may be signalling NaNs
        assert decoded.to_dense().shape == (size,)
    return decoded


@settings(max_examples=examples(500))
@given(
    name=st.sampled_from(list(CASES)),
    size=st.integers(1, 3000),
    share=st.floats(0, 0.1),
    seed=st.integers(0, 99),
    flips=st.lists(st.integers(0, 10**6), max_size=5),
    longer=st.integers(-9, 9),
)
def test_a_damaged_message_is_a_vector_or_is_refused(name, size, share, seed, flips, longer):
    message = make_codec(name).encode(drawn(size, round(share * size), seed))
    damaged = np.append(message, np.zeros(9, np.uint8))
    for flip in flips:
        damaged[flip // 8 % len(damaged)] ^= 1 << flip % 8
    decoded = decoded_or_refused(name, damaged[: max(0, len(message) + longer)], size)
    assert decoded is None or decoded.size == size


def test_every_truncated_message_is_a_vector_or_is_refused(name):
    message = make_codec(name).encode(drawn(3000, 120))
    found = [decoded_or_refused(name, message[:length], 3000) for length in range(len(message))]
    assert found[0].nnz == 0
    assert any(each is None for each in found)


GAPS_DAMAGED = {
    "no-header": np.zeros(3, np.uint8),
    "no-entry": np.array([0, 0], np.int32).view(np.uint8),
    "more-entries-than-the-vector-has": np.array([1001, *[-1] * 500], np.int32).view(np.uint8),
    "more-entries-than-bits": np.array([1000, -1, -1], np.int32).view(np.uint8),
    "2-to-32-minus-1-entries": np.full(40, 255, np.uint8),
    "zeros-without-an-end": np.array([3, 0, 0, 7, 7, 7], np.int32).view(np.uint8),
    "an-index-past-the-end": np.array([1, 1 << 30, 7], np.int32).view(np.uint8),
    "values-cut-off": make_codec("gap").encode(drawn(1000, 40))[:-4],
    "more-bits-than-there-can-be": np.array([1, *[0] * 90, 1 << 20, 7], np.int32).view(np.uint8),
}


@pytest.mark.parametrize("message", GAPS_DAMAGED.values(), ids=list(GAPS_DAMAGED))
def test_gaps_that_are_no_indices_are_refused(message):
    assert decoded_or_refused("gap", message, 1000) is None


def test_a_bit_past_the_end_of_the_bitmap_is_refused():
    message = make_codec("bitmap").encode(at([999], 1000))
    message[999 // 8] <<= 1
    assert decoded_or_refused("bitmap", message, 1000) is None
