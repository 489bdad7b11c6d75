"""docs/validation.md shows what its records hold, and these keep what the page is there to say."""

import re
from statistics import median

import pytest

from benchmarks import validate
from benchmarks.drawing.pages import with_block
from benchmarks.validate import Cell, Comparison, Pick
from commlib import REDUCERS


def comparison(subject="hitopk", wire="fp32", measured=1.0, closed_form=1.0, simulated=1.0):
    cell = Cell(1.0, (2, 2), 1000, 0.01)
    return Comparison(cell, subject, wire, measured, closed_form, simulated)


def test_the_tables_are_those_of_the_newest_records():
    page = validate.PAGE.read_text()
    for name, text in validate.blocks().items():
        assert with_block(page, name, text) == page


def test_the_picture_has_a_mark_for_every_prediction():
    picture = (validate.PICTURES / "predicted.svg").read_text()
    given = validate.load()
    marks = len(re.findall(r"<use xlink:href=\"#m[^\"]*\" x=", picture))
    expected = sum(1 + (each.simulated is not None) for each in given)
    assert marks >= expected  # the ticks are marks, too


def test_half_of_the_predictions_are_within_a_quarter_of_what_was_measured():
    given = validate.load()
    assert {each.subject for each in given} == set(REDUCERS)
    assert median(validate.error(each.closed_form, each.measured) for each in given) < 0.25
    assert median(validate.error(each.simulated, each.measured) for each in given if each.simulated) < 0.25


def test_nine_of_ten_picks_are_about_as_fast_as_the_fastest():
    picks = validate.picks()
    assert len(picks) >= 30
    assert sum(pick.ratio <= validate.WITHIN for pick in picks) >= 0.9 * len(picks)


def test_no_pick_that_was_measured_is_slower_than_the_best_dense_one():
    picks, found = validate.picks(), validate.measured()
    assert {pick.cell.gbit for pick in picks} >= {0.5, 1, 5, 10}
    for pick in picks:
        dense = min(found[pick.cell, name, None] for name in ("dense", "torus2d"))
        assert pick.picked_seconds is None or pick.picked_seconds <= dense


def test_what_was_not_measured_is_no_good_pick():
    assert Pick(comparison().cell, "a", "b", None, 1.0).ratio == float("inf")


@pytest.mark.parametrize("predicted, expected", [(1.0, 0.0), (1.5, 0.5), (0.5, 0.5), (3.0, 2.0)])
def test_an_error_is_relative_to_what_was_measured(predicted, expected):
    assert validate.error(10 * predicted, 10.0) == pytest.approx(expected)


def test_errors_are_medians_by_reducer():
    given = [comparison(name, closed_form=2.0, simulated=0.9) for name in REDUCERS for _ in range(2)]
    line = next(line for line in validate.by_reducer(given).splitlines() if line.startswith("| `hitopk` "))
    assert line == "| `hitopk` | 2 | 100 % | 10 % | 2.00 | 0.90 |"


def test_a_block_replaces_the_text_between_its_marks():
    page = "a\n<!-- one -->\nold\n<!-- end -->\nb\n<!-- two -->\n<!-- end -->\n"
    assert with_block(page, "one", "new\n") == page.replace("old", "new")
    assert with_block(page, "two", "more\n") == page.replace("two -->\n", "two -->\nmore\n")
