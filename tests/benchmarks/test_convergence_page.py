"""docs/convergence.md shows what its records hold."""

from benchmarks import convergence
from benchmarks.drawing.pages import with_block


def test_the_tables_are_those_of_the_records():
    content, records = convergence.plan(), convergence.recorded()
    page, found = convergence.PAGE.read_text(), convergence.blocks(content, records)
    assert found
    for name, text in found.items():
        assert with_block(page, name, text) == page


def test_every_record_is_of_a_case_of_the_plan_and_no_case_has_two():
    planned = set(convergence.cases(convergence.plan(), []))
    recorded = [convergence.case_of(record) for record in convergence.recorded()]
    assert set(recorded) <= planned
    assert len(set(recorded)) == len(recorded)
