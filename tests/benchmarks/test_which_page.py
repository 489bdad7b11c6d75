"""docs/which.md shows what its map holds, and the map is what today's closed forms say."""

from dataclasses import astuple

import numpy as np

from benchmarks import which
from benchmarks.drawing.pages import with_block
from commlib.network import Network
from commlib.tuning.probe import Job, Profile
from commlib.work import Speeds


def test_the_tables_are_those_of_the_map():
    page, found = which.PAGE.read_text(), which.blocks()
    assert page.startswith("# ")
    assert page.splitlines()[3].startswith("No sparse reducer")
    for name, text in found.items():
        assert with_block(page, name, text) == page


def test_the_map_has_all_cells_and_says_what_closed_forms_say_today():
    cells, simulated = which.cells()
    assert [each.place for each in cells] == list(which.places())
    assert [each.place for each in simulated] == which.SIMULATED
    profile = Profile(Job((), (), ()), Network(), Speeds(**which.head()["speeds"]))
    for cell in (cells[each] for each in np.random.default_rng().choice(len(cells), 40, replace=False)):
        for answer, computing in ((cell.on_cores, True), (cell.other, False)):
            found = which.predicted(profile, cell.place, computing=computing)
            assert which.compact(found) == astuple(answer), cell.place
