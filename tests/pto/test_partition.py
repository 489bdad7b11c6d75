"""Who computes what: every entry once, and evenly."""

import math

import numpy as np
import pytest

import pto
from benchmarks.shapes import SHAPES

PARTS = [1, 2, 3, 5, 8]
CUTS = [pto.by_tensor, pto.by_layer, pto.by_slices]
SIZES = {
    "none": [],
    "one": [7],
    "all-empty": [0, 0],
    "some-empty": [0, 5, 0, 0, 3, 0],
    "giant": [1, 10_000, 1],
    **{name: list(map(math.prod, shapes())) for name, shapes in SHAPES.items()},
}


def drawn_sizes(seed: int) -> list[int]:
    """One to 300 tensors, from nothing to a million entries, small and large ones mixed."""
    generator = np.random.default_rng(seed)
    return (10 ** generator.uniform(0, 6, generator.integers(1, 301)) - 1).astype(int).tolist()


SIZES |= {f"drawn-{seed}": drawn_sizes(seed) for seed in range(6)}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("parts", PARTS)
def test_every_entry_is_in_one_piece_and_pieces_are_in_the_order_of_tensors(cut, parts):
    for sizes in SIZES.values():
        partition = cut(sizes, parts)
        assert len(partition.pieces) == parts
        assert partition.sizes == tuple(sizes)
        for own in partition.pieces:
            tensors = [piece.tensor for piece in own]
            assert tensors == sorted(set(tensors))
        covered = sorted((piece.tensor, piece.low, piece.high) for own in partition.pieces for piece in own)
        ends = [0] * len(sizes)
        for tensor, low, high in covered:
            assert low == ends[tensor] <= high
            ends[tensor] = high
        assert ends == sizes


@pytest.mark.parametrize("parts", PARTS)
def test_slices_are_balanced_to_one_entry(parts):
    for sizes in SIZES.values():
        loads = pto.by_slices(sizes, parts).loads()
        assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize("parts", PARTS)
def test_longest_first_keeps_the_bounds_of_greedy_scheduling(parts):
    for sizes in SIZES.values():
        largest = max(pto.by_tensor(sizes, parts).loads())
        mean, longest = sum(sizes) / parts, max(sizes, default=0)
        assert largest <= mean + longest * (1 - 1 / parts)
        if parts == 1 or len(sizes) <= parts:
            assert largest == (longest if parts > 1 else sum(sizes))


def test_the_papers_way_gives_runs_of_equally_many_layers():
    own = [len(pieces) for pieces in pto.by_layer(SIZES["resnet50"], 128).pieces]
    assert set(own) == {1, 2}
    assert sum(own) == 161


def test_costs_decide_and_ties_go_by_number():
    by_cost, equal = pto.by_tensor([10, 10, 10, 10], 2, costs=[1, 5, 1, 1]), pto.by_tensor([4] * 6, 3)
    assert [[piece.tensor for piece in own] for own in by_cost.pieces] == [[1], [0, 2, 3]]
    assert [[piece.tensor for piece in own] for own in equal.pieces] == [[0, 3], [1, 4], [2, 5]]


def test_balance_of_nothing_is_perfect_and_of_one_tensor_the_worst():
    assert pto.by_slices([], 3).balance() == 1
    assert pto.by_tensor([5], 4).balance() == 4


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_a_cost_that_cannot_be_compared_is_refused(cost):
    with pytest.raises(
        pto.InvalidArgument, match=r"^cost of tensor 1: expected a finite number from 0, got "
    ):
        pto.by_tensor([1, 1], 2, costs=[1.0, cost])


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("parts", [0, -1])
def test_no_parts_are_refused(cut, parts):
    with pytest.raises(pto.InvalidArgument, match=rf"^parts: expected at least 1, got {parts}$"):
        cut([1, 2], parts)
