"""The pages of docs/ that scripts write show what records and code say, and what they say of codecs holds."""

from dataclasses import astuple

import numpy as np
import pytest

from benchmarks import convergence, local_steps, predict_papers, value_codecs, which
from benchmarks.drawing import validation
from benchmarks.drawing.pages import with_block
from commlib.network import Network
from commlib.tuning.probe import Job, Profile
from commlib.work import Speeds

# To write one again: python -m benchmarks.NAME (predict_papers: with --write)
SCRIPTS = [convergence, local_steps, predict_papers, validation, value_codecs, which]
MOST_LOST = {"normal": 0.005, "Laplace": 0.013, "normal·exp(0.6·normal)": 0.03, "Student's t, 3": 0.07}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_page_shows_what_its_script_writes(script):
    page, found = script.PAGE.read_text(), script.blocks()
    assert found
    for name, text in found.items():
        assert with_block(page, name, text) == page, name


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
