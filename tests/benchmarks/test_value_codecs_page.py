"""docs/reducers.md says of value codecs what is measured, and what is measured holds."""

import pytest

from benchmarks import value_codecs
from benchmarks.drawing.pages import with_block

MOST_LOST = {"normal": 0.005, "Laplace": 0.013, "normal·exp(0.6·normal)": 0.03, "Student's t, 3": 0.07}


def test_the_table_is_that_of_the_codecs_as_they_are():
    # To refresh: python -m benchmarks.value_codecs
    page = value_codecs.PAGE.read_text()
    assert with_block(page, "value codecs", value_codecs.table()) == page


@pytest.mark.parametrize("name", value_codecs.DISTRIBUTIONS)
def test_two_and_four_bits_lose_little_of_top_k_entries(name):
    lost = value_codecs.lost(name)
    assert lost["lloyd2"] <= MOST_LOST[name]
    assert lost["lloyd4"] <= 0.01
    assert lost["lloyd4"] < lost["lloyd3"] < lost["lloyd2"] < min(lost["lloyd1"], lost["qsgd2"])
    assert 2.5 * lost["lloyd2"] < lost[value_codecs.FOUR_BINS]


def test_an_entry_of_two_bits_takes_ten_with_its_index():
    of_value, of_entry = value_codecs.bits("lloyd2")
    assert of_value <= 2.35
    assert of_entry <= 10.5
