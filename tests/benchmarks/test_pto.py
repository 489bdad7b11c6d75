"""Norms in parts: what is measured."""

import json

import pytest

from benchmarks import pto
from benchmarks.pto import Sweep, measure
from benchmarks.shapes import SHAPES
from commlib import Topology
from commlib.transport import simulated
from tests.launching import mpirun, tail

SHAPES_OF_TINY = [(4, 5), (4,), (7,), (3, 1)]  # 20, 4, 7 and 3 entries


@pytest.fixture
def tiny(monkeypatch):
    """A network of a few entries, and no caches to fill."""
    monkeypatch.setitem(SHAPES, "tiny", lambda: SHAPES_OF_TINY)
    monkeypatch.setattr(pto, "cache_bytes", lambda: 64)


# ------------------------------------------------------------- norms


def test_every_way_is_measured_beside_local_with_its_balance_and_its_choice(tiny):
    sweep = Sweep.of((), ("tiny",), steps=2, quick=False)
    everywhere = simulated.run(lambda comm: list(measure(sweep, Topology(comm))), world_size=2)
    records = everywhere[0]
    assert [(each.subject, each.peer) for each in records] == [
        ("slices", "local"),
        ("layers", "local"),
        ("auto", "local"),
    ]
    for record in records:
        case = {"operation": "norms", "network": "tiny", "tensors": 4, "size": 34, "ranks": 2}
        assert record.case == case | {"ranks_of_nodes": [2], "warm_up_steps": 2, "quick": False}
        assert record.seconds.runs == record.peer_seconds.runs == 2
        # Of 34 entries: 17 a slice; 20 alone, beside 7 + 4 + 3; the paper's first two tensors have 24.
        assert record.more["balance"] == pytest.approx({"slices": 1, "layers": 20 / 17, "by layer": 24 / 17})
    assert [record.more["choice"]["in_parts"] for record in records] == [True, True, False]
    assert "of computing would become" in records[2].more["choice"]["reason"]


# ------------------------------------------------------------- the ranks that it starts


@pytest.mark.large
@pytest.mark.launch
def test_real_ranks_are_measured():
    result = mpirun(2, "python", "-m", "benchmarks.pto", "--network", "resnet50", "--steps", "1", "--json")
    assert result.returncode == 0, tail(result)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(line["case"]["operation"], line["subject"], line["peer"]) for line in lines] == [
        *(("norms", way, "local") for way in ("slices", "layers", "auto")),
        *(("lars", "slices", peer) for peer in ("local", "in graph")),
        ("lars", "local", "in graph"),
    ]
    for line in lines:
        assert line["case"]["ranks_of_nodes"] == [2]
        assert line["case"]["size"] == 25_557_032
        assert line["cpu_seconds_of_busiest"]["median"] >= line["cpu_seconds"]["median"] > 0
        assert line["cpu_ratio"] == line["peer_cpu_seconds"]["median"] / line["cpu_seconds"]["median"]
