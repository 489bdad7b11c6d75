"""The rotation before eight or four bits, against SciPy's Hadamard matrix."""

import numpy as np
import pytest
from scipy.linalg import hadamard

from commlib.wire import VALUE_CODECS
from commlib.wire.hadamard import SIGNS

CODECS = {"hadamard8": 127, "hadamard4": 7}


def drawn(entries, seed=0):
    return np.random.default_rng(seed).standard_t(3, entries).astype(np.float32)


def decoded(name, values):
    codec = VALUE_CODECS[name]()
    message = codec.encode(values)
    assert len(message) == codec.message_bytes(len(values))
    return codec.decode(message, len(values))


@pytest.mark.parametrize("name", CODECS)
def test_whole_buckets_are_rotated_rounded_and_rotated_back(name):
    values = drawn(2 * 512 + 100)
    expected = []
    for bucket in (values[:512], values[512:1024]):
        rotated = hadamard(512) @ (SIGNS * bucket.astype(np.float64)) / 512
        step = np.abs(rotated).max() / CODECS[name]
        expected.append(SIGNS * (hadamard(512) @ (np.rint(rotated / step) * step)))
    step = np.abs(values[1024:]).max() / CODECS[name]
    expected.append(np.rint(values[1024:].astype(np.float64) / step) * step)
    # A sum of 512 float32 values rounds at nine levels; a level beside a half may round the other way.
    found, reference = decoded(name, values), np.concatenate(expected)
    np.testing.assert_allclose(found, reference, atol=1e-5 * np.abs(values).max())


@pytest.mark.parametrize(("name", "plain"), [("hadamard8", "qsgd8"), ("hadamard4", "qsgd4")])
def test_of_values_of_which_few_are_large_less_is_lost(name, plain):
    values = drawn(512 * 100)
    lost, lost_plain = (((decoded(each, values) - values) ** 2).sum() for each in (name, plain))
    assert lost < 0.3 * lost_plain
    assert lost < (values**2).sum()


@pytest.mark.parametrize("name", CODECS)
def test_a_nan_spoils_its_bucket_and_the_largest_values_none(name):
    values = drawn(1024)
    values[600] = np.nan
    found = decoded(name, values)
    assert np.isfinite(found[:512]).all()
    assert np.isnan(found[512:]).all()
    assert np.isfinite(decoded(name, np.full(1024, 1e38, np.float32))).all()
    assert not decoded(name, np.zeros(1024, np.float32)).any()
