"""The records of docs/validation.md keep what the page is there to say."""

from benchmarks import validate
from benchmarks.convergence import recorded
from commlib.tuning import tuner


def test_all_that_auto_picks_from_is_measured_on_every_cluster():
    cells = [cell[:3] for cell in validate.CELLS]
    measured = [tuple(each["cell"].values()) for each in recorded(validate.RECORDS)]
    assert measured == cells * (len(measured) // len(cells))
    for group in validate.groups():
        assert list(group.steps) == tuner.candidates(group.case.nodes)


def test_predictions_are_near_what_was_measured():
    ratios = validate.errors(validate.groups())
    assert len(ratios) >= 1000
    assert sum(abs(each - 1) <= 0.12 for each in ratios) >= 0.5 * len(ratios)
    assert sum(abs(each - 1) <= 0.25 for each in ratios) >= 0.9 * len(ratios)


def test_most_picks_are_about_as_fast_as_the_fastest_and_none_is_slower_than_dense():
    visits = [visit for each in validate.groups() for visit in each.visits]
    ratios = [each.ratio(each.picked) for each in visits]
    assert sum(ratio <= validate.WITHIN for ratio in ratios) >= 0.85 * len(ratios)
    assert all(each.seconds[each.picked] <= each.dense_seconds for each in visits)
