"""docs/local_steps.md shows what its records hold."""

import re

from benchmarks import convergence, local_steps
from benchmarks.drawing.pages import with_block
from training.config.config import Config


def test_the_tables_are_those_of_the_records():
    page, found = local_steps.PAGE.read_text(), local_steps.blocks(local_steps.plan())
    for name, text in found.items():
        assert with_block(page, name, text) == page


def test_every_record_is_of_a_case_of_the_plan_and_no_case_has_two():
    content = local_steps.plan()
    recorded = [convergence.case_of(each) for each in convergence.recorded(local_steps.RECORDS)]
    assert set(recorded) <= set(convergence.cases(content, []))
    assert len(set(recorded)) == len(recorded)


def test_every_variant_is_configured_and_what_is_compared_is_planned(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    content, variants = local_steps.plan(), set()
    for case in convergence.cases(content, []):
        config = Config.model_validate(convergence.configuration(content, case, "folder")).resolved()
        variants.add(case.variant)
        named = re.fullmatch(r".*, H = (\d+)", case.variant)
        assert config.phases[0].local_steps == (named and int(named[1]))
    assert variants == set(content["variants"])
    assert set(content["compared"].values()) <= variants
    assert {content["times"]["beside"], *content["times"]["subjects"]} <= variants
