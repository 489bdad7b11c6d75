"""docs/reducers.md says of value codecs what was measured, and what was measured holds."""

import pytest

from benchmarks import value_codecs
from benchmarks.drawing.pages import with_block

DRAWN = ["normal", "laplace", "heavy", "student"]


def test_the_table_is_that_of_the_records():
    records = value_codecs.recorded()
    assert list(records) == list(value_codecs.HEADS)
    page = value_codecs.PAGE.read_text()
    assert with_block(page, "value codecs", value_codecs.table(records)) == page


@pytest.mark.parametrize("name", DRAWN)
def test_codecs_lose_of_drawn_vectors_what_is_recorded(name):
    # bits of random numbers and of their logarithms may depend on the processor
    assert value_codecs.measured(name) == pytest.approx(value_codecs.recorded()[name], rel=1e-3)


def test_two_and_four_bits_lose_little_of_top_k_entries():
    of_value, of_entry = value_codecs.bits("lloyd2")
    assert of_value <= 2.35
    assert of_entry <= 10.5
    records = value_codecs.recorded()
    for name, most in zip(DRAWN, (0.005, 0.013, 0.03, 0.07), strict=True):
        assert records[name]["lloyd2"] <= most
        assert records[name]["lloyd4"] <= 0.01
    for lost in records.values():
        assert lost["lloyd4"] < lost["lloyd3"] < lost["lloyd2"] < min(lost["lloyd1"], lost["qsgd2"])
        assert 2.5 * lost["lloyd2"] < lost[value_codecs.FOUR_BINS]
