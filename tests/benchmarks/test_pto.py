"""Norms in parts: what is measured, and that wrong sums are not timed."""

import json

import numpy as np
import pytest

from benchmarks import pto
from benchmarks.pto import (
    Sweep,
    Tensors,
    check_squares,
    measure,
    records,
)
from benchmarks.shapes import SHAPES
from commlib import Topology
from commlib.transport import simulated
from pto import Norms
from tests.launching import mpirun, tail
from training.bench.record import Record, Seconds, WrongResult

SHAPES_OF_TINY = [(4, 5), (4,), (7,), (3, 1)]  # 20, 4, 7 and 3 entries


@pytest.fixture
def tiny(monkeypatch):
    """A network of a few entries, and no caches to fill."""
    monkeypatch.setitem(SHAPES, "tiny", lambda: SHAPES_OF_TINY)
    monkeypatch.setattr(pto, "cache_bytes", lambda: 64)


# ------------------------------------------------------------- interleaved calls


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


class Spoilt(Norms):
    """Right, but for what a test does to the sums."""

    spoil = staticmethod(lambda rank, sums: None)

    def __init__(self, sizes, comm):
        super().__init__(sizes, comm, partition="slices")
        self.rank = comm.rank

    def squares(self, *lists):
        sums = super().squares(*lists)
        self.spoil(self.rank, sums)
        return sums


def multiply(rank, sums):
    sums[1, 2] *= 1 + 1e-13


def poison(rank, sums):
    sums[0] = np.nan


def disagree(rank, sums):
    sums[0, 0] = np.nextafter(sums[0, 0], rank)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (multiply, "mine: 1 of 8 sums of squares are wrong"),
        (poison, "mine: 4 of 8 sums of squares are wrong"),
        (disagree, r"mine: ranks \[2\] hold other sums of squares than rank 0"),
    ],
)
def test_sums_that_are_wrong_or_not_the_same_everywhere_are_not_timed(monkeypatch, spoil, message):
    monkeypatch.setattr(Spoilt, "spoil", staticmethod(spoil))
    tensors = Tensors.of(SHAPES_OF_TINY)
    tensors.weights[0][...] = (
        0.5  # the sum is 5: towards ranks 0 and 1 it is one neighbour, towards 9 another
    )

    def body(comm):
        candidate = Spoilt(tensors.sizes, comm)
        candidate.rank = 9 if comm.rank == 2 else comm.rank
        with pytest.raises(WrongResult, match=message):
            check_squares(comm, {"mine": candidate}, tensors)
        return True

    assert simulated.run(body, world_size=3) == [True] * 3


# ------------------------------------------------------------- steps of LARS


def test_a_step_of_lars_that_moves_weights_otherwise_is_not_timed():
    from benchmarks.lars import lars_steps

    tensors = Tensors.of(SHAPES_OF_TINY)

    class Doubled(Norms):
        def squares(self, *lists):
            return super().squares(*lists) * [[4], [1]]  # weights of twice their norm

    def body(comm):
        right = {"in graph": None, "local": Norms(tensors.sizes, comm)}
        steps = lars_steps(comm, tensors, right)
        for step in steps.values():
            step()
        with pytest.raises(WrongResult, match="LARS, mine: 20 of 20 weights of tensor 0 are wrong after"):
            lars_steps(comm, tensors, {"mine": Doubled(tensors.sizes, comm)})
        return list(steps)

    assert simulated.run(body, world_size=1) == [["in graph", "local"]]


# ------------------------------------------------------------- the ranks that it starts


def test_the_records_of_the_ranks_are_passed_on(monkeypatch):
    asked = []

    def on_this_machine(ranks, words):
        asked.append((ranks, words[2:]))
        seconds = Seconds(2e-3, 2e-3, 2e-3, 21)
        yield json.loads(Record("pto", {"ranks": ranks}, "slices", seconds, "local", seconds).line())

    monkeypatch.setattr(pto, "on_this_machine", on_this_machine)
    passed = list(records(Sweep.of((2, 3), ("vgg19",), 5, quick=False)))
    words = ["benchmarks.pto", "--json", "--network", "vgg19", "--steps", "5"]
    assert asked == [(2, words), (3, words)]
    assert [each["case"]["ranks"] for each in passed] == [2, 3]


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
