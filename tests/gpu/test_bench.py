"""Selectors on a GPU beside their peers, as far as it goes without a GPU."""

import json
import sys
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import gpu
from benchmarks.gpu import ENTRY_BYTES, SUBJECTS, SWEEP, _check, _floors, _seconds, paper_select
from commlib.gpu import make_device_selector
from commlib.selection.exact import paper_search
from tests.gpu.vectors import normal
from training.bench.record import WARM_UP_RUNS, WrongResult, alternate


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


class ArraysOfTheHost:
    """NumPy where the bench expects CuPy: what it calls by those names has the same meaning."""

    cuda = SimpleNamespace(Device=lambda: SimpleNamespace(synchronize=lambda: None))

    def __getattr__(self, name):
        return getattr(np, name)

    def get_default_memory_pool(self):
        return SimpleNamespace(free_all_blocks=lambda: None)


@dataclass
class ADevice:
    """Calls what it is to time; ``took``: seconds that it reports, one after the other."""

    took: object = field(default_factory=lambda: cycle([0.001]))
    facts: dict = field(default_factory=lambda: {"name": "none"})
    cupy: object = field(default_factory=ArraysOfTheHost)

    def seconds(self, candidate, given):
        candidate(given)
        return next(self.took)

    def inputs(self, size, entry):
        return [normal(size, seed).astype(entry) for seed in range(2)]


@pytest.fixture
def emulated(monkeypatch, emulate):
    monkeypatch.setattr(gpu, "make_device_selector", partial(make_device_selector, engine=emulate(seed=1)))
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "jax", None)


def test_every_selector_is_beside_every_peer_for_both_types_of_entries(emulated):
    cases = list(gpu.measure([1000], [], True, ADevice(), []))
    assert [records[0].case["entry"] for records in cases] == ["float32", "float16"]
    for records in cases:
        asked = {(record.subject, record.peer) for record in records}
        assert asked == {(subject, peer) for subject in [*SUBJECTS, SWEEP] for peer in gpu.PEERS}
        missing = {record.peer: record.missing for record in records if record.missing}
        assert missing == {
            "torch.topk": "torch is not installed",
            "jax.lax.approx_max_k": "jax is not installed",
        }
        keys = json.loads(records[0].line())
        assert (keys["case"]["k"], keys["gpu"]) == (1, {"name": "none"})
        assert keys["floor_seconds"] == pytest.approx(0.0005)  # reads half of what the copy moves


def test_a_selector_that_is_wrong_is_told_and_the_others_go_on(emulated, monkeypatch):
    def check(name, *_):
        if name == "dgc":
            raise WrongResult("dgc: expected another result")

    monkeypatch.setattr(gpu, "_check", check)
    wrong = []
    for records in gpu.measure([1000], [], True, ADevice(), wrong):
        assert {record.subject for record in records} == {*SUBJECTS, SWEEP} - {"dgc"}
    assert [str(error) for error in wrong] == ["dgc: expected another result"] * 2


def test_a_peer_that_fails_is_missing_and_says_why(emulated, monkeypatch):
    def make(k, size, cupy):
        def select(vector):
            raise MemoryError("out of memory\nsecond line")

        return gpu.Peer(select)

    monkeypatch.setitem(gpu.PEERS, "cupy.argpartition", make)
    (records, _) = gpu.measure([1000], [], True, ADevice(), [])
    missing = {record.peer: record.missing for record in records}
    assert missing["cupy.argpartition"] == "it failed: MemoryError: out of memory"
    assert missing["mstopk, 30 passes"] is None


def test_what_takes_long_has_fewer_runs_and_says_how_many():
    calls = []
    names = ("fast", "slow", "slower")
    candidates = {name: gpu.Peer(lambda _, name=name: calls.append(name)) for name in names}

    class Clock(ADevice):
        def seconds(self, candidate, given):
            candidate(given)
            return {"fast": 0.0, "slow": 0.2, "slower": 5.0}[calls[-1]]

    seconds = alternate(candidates, [np.zeros(1)], 31, partial(_seconds, Clock()), limit_seconds=2.0)
    assert {name: each.runs for name, each in seconds.items()} == {"fast": 31, "slow": 10, "slower": 3}
    assert [calls.count(name) for name in candidates] == [WARM_UP_RUNS + runs for runs in (31, 10, 3)]
