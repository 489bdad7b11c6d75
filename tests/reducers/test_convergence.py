"""Sparse training ends where dense training ends, on a convex problem.

Four ranks on two nodes, density 0.01 after gTop-k's warm-up of four epochs, plain SGD written out in NumPy.
"""

import functools

import numpy as np
import pytest

from commlib import Topology, make_reducer
from commlib.density import GTOPK_WARM_UP
from commlib.transport import simulated
from tests.extent import ALL, more

RANKS = 4


UNKNOWNS, STEPS = 300, 2000 if ALL else 600
DENSITIES = dict(zip(range(0, 250, 50), (*GTOPK_WARM_UP, 0.01), strict=True))  # from which step on


@functools.cache
def least_squares():
    """Every rank's part of ``|M·w − t|²/2``, as the matrix and vector of its gradient ``A·w − b``."""
    rng = np.random.default_rng(5)
    matrix = rng.standard_normal((RANKS, 300, UNKNOWNS)) / np.sqrt(300)
    target = rng.standard_normal((RANKS, 300))
    return [(own.T @ own, own.T @ its) for own, its in zip(matrix, target, strict=True)]


@functools.cache
def least_squares_excess(name):
    """How far the objective ends above its minimum, relative to where it began, at zero."""

    def body(comm):
        curvature, constant = least_squares()[comm.rank]
        reducer = make_reducer(name, Topology(comm, ranks_per_node=2), UNKNOWNS)
        weights = np.zeros(UNKNOWNS)
        for step in range(STEPS):
            if reducer.sparse and step in DENSITIES:
                reducer.set_density(DENSITIES[step])
            weights -= 0.02 * (1 - step / STEPS) * reducer.reduce(curvature @ weights - constant)
        return weights

    weights, *others = simulated.run(body, RANKS)
    assert all((other == weights).all() for other in others)
    curvature, constant = (sum(parts) for parts in zip(*least_squares(), strict=True))
    best = np.linalg.solve(curvature, constant)
    away = weights - best
    return (away @ curvature @ away) / (best @ curvature @ best)


@pytest.mark.parametrize("name", ["gtopk", "hitopk", *more("oktopk", "allgather", "hioktopk")])
def test_least_squares_end_within_a_hundredth_of_the_way_from_the_minimum(name):
    assert 0 <= least_squares_excess("dense") < 0.01
    assert 0 <= least_squares_excess(name) < 0.01
