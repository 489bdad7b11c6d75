"""The pages of docs/ that scripts write show what records and code say, and what they say of codecs holds."""

import re
from dataclasses import astuple

import numpy as np
import pytest

from benchmarks import convergence, local_steps, predict_papers, validate, value_codecs, which
from benchmarks.drawing.pages import with_block
from commlib.network import Network
from commlib.tuning.probe import Job, Profile
from commlib.work import Speeds
from training.config.config import Config

# To write one again: python -m benchmarks.NAME (predict_papers: with --write)
SCRIPTS = [convergence, local_steps, predict_papers, validate, value_codecs, which]
TRAINED = [(convergence.plan, convergence.RECORDS), (local_steps.plan, local_steps.RECORDS)]
MOST_LOST = {"normal": 0.005, "Laplace": 0.013, "normal·exp(0.6·normal)": 0.03, "Student's t, 3": 0.07}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_page_shows_what_its_script_writes(script):
    page, found = script.PAGE.read_text(), script.blocks()
    assert found
    for name, text in found.items():
        assert with_block(page, name, text) == page, name


@pytest.mark.parametrize(("plan", "records"), TRAINED, ids=["convergence", "local_steps"])
def test_every_record_is_of_a_case_of_the_plan_and_no_case_has_two(plan, records):
    recorded = [convergence.case_of(record) for record in convergence.recorded(records)]
    assert set(recorded) <= set(convergence.cases(plan(), []))
    assert len(set(recorded)) == len(recorded)


def test_every_variant_of_local_steps_is_configured_and_what_is_compared_is_planned(monkeypatch, tmp_path):
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


def test_the_map_has_all_cells_and_says_what_closed_forms_say_today():
    cells, simulated = which.cells()
    assert [each.place for each in cells] == list(which.places())
    assert [each.place for each in simulated] == which.SIMULATED
    profile = Profile(Job((), (), ()), Network(), Speeds(**which.head()["speeds"]))
    for cell in (cells[each] for each in np.random.default_rng().choice(len(cells), 40, replace=False)):
        for answer, computing in ((cell.on_cores, True), (cell.other, False)):
            found = which.predicted(profile, cell.place, computing=computing)
            assert which.compact(found) == astuple(answer), cell.place


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
