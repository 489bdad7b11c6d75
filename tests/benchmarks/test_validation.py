"""The records of docs/validation.md keep what the page is there to say."""

import pytest

from benchmarks import validate
from benchmarks.convergence import recorded
from benchmarks.drawing import validation
from commlib.tuning import tuner

XEON, EPYC = "Intel(R) Xeon(R) Processor", "AMD EPYC"


def test_no_processor_is_left_out_below():
    assert set(validation.processors()) == {XEON, EPYC}


@pytest.mark.parametrize("processor", [XEON, EPYC])
def test_all_that_auto_picks_from_is_measured_on_every_cluster(processor):
    cells = [cell[:3] for cell in validate.CELLS]
    records = [each for each in recorded(validation.RECORDS) if each["machine"]["cpu"] == processor]
    measured = [tuple(each["cell"].values()) for each in records]
    assert measured
    assert measured == cells * (len(measured) // len(cells))
    for group in validation.groups(processor):
        assert list(group.steps) == tuner.candidates(group.case.nodes)


@pytest.mark.parametrize(("processor", "half", "most"), [(XEON, 0.12, 0.9), (EPYC, 0.16, 0.7)])
def test_predictions_are_near_what_was_measured(processor, half, most):
    ratios = validation.errors(validation.groups(processor))
    assert len(ratios) >= 1000
    assert sum(abs(each - 1) <= half for each in ratios) >= 0.5 * len(ratios)
    assert sum(abs(each - 1) <= 0.25 for each in ratios) >= most * len(ratios)


@pytest.mark.parametrize(("processor", "share"), [(XEON, 0.85), (EPYC, 0.95)])
def test_most_picks_are_about_as_fast_as_the_fastest_and_none_is_slower_than_dense(processor, share):
    visits = [visit for each in validation.groups(processor) for visit in each.visits]
    ratios = [each.ratio(each.picked) for each in visits]
    assert sum(ratio <= validation.WITHIN for ratio in ratios) >= share * len(ratios)
    assert all(each.seconds[each.picked] <= each.dense_seconds for each in visits)
