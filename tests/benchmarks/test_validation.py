"""docs/validation.md shows what its records hold, and these keep what the page is there to say."""

from dataclasses import replace

from benchmarks import validate
from benchmarks.drawing.pages import with_block
from commlib.tuning import tuner
from commlib.tuning.probe import Candidate


def test_the_tables_are_those_of_the_records():
    page = validate.PAGE.read_text()
    for name, text in validate.blocks().items():
        assert with_block(page, name, text) == page


def test_all_that_auto_picks_from_is_measured_on_every_cluster():
    assert [each["cell"] for each in validate.records()] == [
        {"layout": layout, "rate": rate, "delay_ms": delay} for layout, rate, delay, _ in validate.CELLS
    ]
    for group in validate.groups():
        known = tuner.candidates(between_nodes=max(map(len, group.case.nodes)) > 1)
        assert list(group.steps) == known


def test_predictions_are_near_what_was_measured():
    ratios = validate.errors(validate.groups())
    assert len(ratios) >= 1000
    assert sum(abs(each - 1) <= 0.12 for each in ratios) >= 0.5 * len(ratios)
    assert sum(abs(each - 1) <= 0.25 for each in ratios) >= 0.8 * len(ratios)


def test_nine_of_ten_picks_are_about_as_fast_as_the_fastest_and_none_is_slower_than_dense():
    groups = validate.groups()
    assert sum(each.ratio(each.picked) <= validate.WITHIN for each in groups) >= 0.9 * len(groups)
    assert all(each.steps[each.picked] <= each.dense_seconds for each in groups)


def test_a_group_tells_the_predicted_the_picked_and_the_fastest_apart():
    group, dense, torus2d = validate.groups()[0], Candidate("dense"), Candidate("torus2d")
    others = [each for each in group.steps if each.wire and each != group.predicted]
    seconds = dict.fromkeys(group.steps, 9.0) | {group.predicted: 2.5, dense: 5.0, torus2d: 4.0}
    seconds |= {others[0]: 3.0, others[1]: 2.0}
    tried = {dense: 5.0, others[0]: 1.0}
    trials = [replace(group.trials[0], candidate=each, seconds=tried[each], spread=0.0) for each in tried]
    found = replace(group, steps=seconds, trials=tuple(trials))
    assert (found.predicted, found.picked, found.fastest) == (group.predicted, *others[:2])
    assert (found.ratio(found.predicted), found.dense_seconds) == (1.25, 4.0)
