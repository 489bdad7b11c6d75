"""docs/validation.md shows what its records hold, and these keep what the page is there to say."""

from statistics import median

from benchmarks import validate
from benchmarks.drawing.pages import with_block


def test_the_tables_are_those_of_the_newest_records():
    page = validate.PAGE.read_text()
    for name, text in validate.blocks().items():
        assert with_block(page, name, text) == page


def test_half_of_the_predictions_are_within_a_quarter_of_what_was_measured():
    given = validate.load()
    assert {each.subject for each in given} == set(validate.OF_THE_RECORDS)
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
