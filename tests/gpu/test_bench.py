"""``cloudtrain bench selection --device gpu``, as far as it goes without a GPU."""

import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from commlib.selection.mstopk import paper_search
from tests.gpu.vectors import normal
from training.bench.checks import WrongResult
from training.bench.gpu import ENTRY_BYTES, SUBJECTS, SWEEP, _check, _floors, paper_select
from training.cli import app


def run(*arguments):
    result = CliRunner().invoke(app, ["bench", "selection", *arguments])
    return result.exit_code, result.output + (result.stderr if result.stderr_bytes else "")


def test_without_cupy_the_command_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    status, said = run("--device", "gpu", "--json")
    assert status == 2
    assert "CuPy is not installed" in said


def test_another_device_is_refused():
    status, said = run("--device", "tpu")
    assert status == 2
    assert "expected cpu or gpu, got tpu" in " ".join(said.split())


def test_sizes_and_densities_are_checked_before_the_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    status, said = run("--device", "gpu", "--size", "0")
    assert status == 2
    assert "--size: expected at least 1, got 0" in said


@pytest.mark.parametrize("k", [1, 10, 500])
def test_the_paper_s_selection_is_what_its_search_says(k):
    vector = normal(20_000)
    indices = paper_select(vector, k, np)
    upper, lower, above_upper, _ = paper_search(vector, k)
    assert len(set(indices.tolist())) == k
    magnitudes = np.abs(vector[indices])
    assert np.count_nonzero(magnitudes >= upper) == above_upper or above_upper == 0
    assert magnitudes.min() >= lower


def test_the_floor_is_bytes_over_the_copy_s_rate():
    case = {"size": 1000, "entry": "float16"}
    floors = _floors(case, copy_seconds=4.0)  # 4000 bytes in 4 s
    assert [floors[name] for name in SUBJECTS] == [2.0] * len(SUBJECTS)
    assert floors[SWEEP] == 10.0
    assert set(ENTRY_BYTES) == {"float32", "float16"}


@pytest.mark.parametrize(
    ("name", "indices", "wrong"),
    [
        ("exact", [1, 3], None),
        ("exact", [3, 1], "ascending"),
        ("exact", [1], "expected 2 to 2 entries, got 1"),
        ("exact", [0, 3], "the largest"),
        ("gaussian", [1, 3, 4], None),
        ("bucketed", [0, 3], None),
    ],
)
def test_only_right_results_are_timed(name, indices, wrong):
    vector = np.array([1, 5, 0, -4, 3], np.float32)
    given = {"size": 5, "k": 2}, vector, np.array(indices), vector[indices], np
    if wrong is None:
        _check(name, *given)
        return
    with pytest.raises(WrongResult, match=wrong):
        _check(name, *given)


def test_values_of_elsewhere_are_wrong():
    vector = np.array([1, 5, 0, -4, 3], np.float32)
    with pytest.raises(WrongResult, match="values of the vector"):
        _check("exact", {"size": 5, "k": 2}, vector, np.array([1, 3]), vector[[1, 2]], np)
