"""The promises over many steps, at shapes, layouts and gradients that hypothesis draws."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from commlib import REDUCERS, Topology, bytes_sent, make_reducer
from commlib.transport import simulated
from tests.extent import ALL, examples

STEPS, LARGEST = (50, 100_000) if ALL else (8, 20_000)
WORLD_SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 12, 16]


def heavy_tails(rng, size, rank, step):
    return rng.standard_t(2, size)


def clustered(rng, size, rank, step):
    """Nearly everything in one region, which moves: what balanced regions are made for."""
    gradient = 1e-3 * rng.standard_normal(size)
    first = (step // 5 * size // 5) % size
    gradient[first : first + size // 20 + 1] += 10 * rng.standard_normal(
        len(gradient[first:][: size // 20 + 1])
    )
    return gradient


def cancelling(rng, size, rank, step):
    """Large on every rank and nearly nothing in sum: what is selected is not what counts."""
    shared = np.random.default_rng([size, step]).standard_normal(size)
    return (-1) ** rank * shared + 1e-3 * rng.standard_normal(size)


def one_rank_has_it_all(rng, size, rank, step):
    return rng.standard_normal(size) if rank == step % 3 else np.zeros(size)


def growing(rng, size, rank, step):
    """By 3.6 % a step, as fast as thresholds were seen to drift."""
    return 1.036**step * rng.standard_normal(size)


def bursts(rng, size, rank, step):
    return np.full(size, 1e3 if step % 7 == 6 else 0.0)


def few_distinct(rng, size, rank, step):
    return rng.integers(-2, 3, size)


def tiny(rng, size, rank, step):
    """About the smallest float32 that is normal."""
    return 1e-38 * rng.standard_normal(size)


FAMILIES = [heavy_tails, clustered, cancelling, one_rank_has_it_all, growing, bursts, few_distinct, tiny]


@st.composite
def shapes(draw):
    world_size = draw(st.sampled_from(WORLD_SIZES))
    nodes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=8))
    counts = []
    while sum(counts) < world_size:  # the drawn nodes again and again, the last one cut to what is left
        counts.append(min(nodes[len(counts) % len(nodes)], world_size - sum(counts)))
    largest = LARGEST // world_size if draw(st.integers(0, 3)) == 0 else 2_000
    return {
        "world_size": world_size,
        "ranks_per_node": counts,
        "size": draw(st.integers(1, largest)),
        "density": draw(st.sampled_from([1e-4, 0.003, 0.01, 0.1, 0.4, 1.0])),
        "family": draw(st.sampled_from(FAMILIES)),
        "seed": draw(st.integers(0, 2**16)),
    }


def large(**shape):
    return {"density": 0.003, "seed": 1, **shape}


@pytest.mark.parametrize("name", REDUCERS)
@settings(max_examples=examples(12))
@given(shape=shapes())
@example(shape=large(world_size=16, ranks_per_node=[4] * 4, size=LARGEST, family=clustered))
@example(shape=large(world_size=12, ranks_per_node=[5, 4, 3], size=LARGEST // 3, family=cancelling))
def test_many_steps_keep_every_promise(name, shape):
    size, world_size, family = shape["size"], shape["world_size"], shape["family"]
    density = {"density": shape["density"]} if REDUCERS[name].sparse else {}

    def gradient(rank, step):
        rng = np.random.default_rng([shape["seed"], rank, step])
        return family(rng, size, rank, step).astype(np.float32)

    def body(comm):
        topology = Topology(comm)
        reducer = make_reducer(name, topology, size, **density)
        formula = bytes_sent(name, topology.nodes, comm.rank, size, **density)
        given_, magnitude, applied, means = np.zeros(size), np.zeros(size), np.zeros(size), []
        for step in range(STEPS):
            own = gradient(comm.rank, step)
            given_ += own
            magnitude += np.abs(own)
            mean = reducer.reduce(own)
            assert reducer.last.finite
            assert reducer.last.traffic.sent.inter <= formula.inter
            assert reducer.last.traffic.sent.intra <= formula.intra
            applied += mean
            means.append(hash(mean.tobytes()))
            if step == STEPS // 2:  # from here on, one that was restored
                state = reducer.state_dict()
                reducer = make_reducer(name, topology, size, **density)
                reducer.load_state_dict(state)
        return means, applied, reducer.residual.astype(np.float64), given_, magnitude

    seen = simulated.run(body, world_size, shape["ranks_per_node"])
    assert all(means == seen[0][0] for means, *_ in seen)
    applied = seen[0][1]
    residuals, given_, magnitude = (sum(each) for each in list(zip(*seen, strict=True))[2:])
    lost = np.abs(world_size * applied + residuals - given_)
    # Each term is rounded in at most one sum a step and rank; denormals in units of 2⁻¹⁴⁹.
    terms = STEPS + world_size
    if name == "powersgd":  # whose mean, and so what is kept of it, is not zero where gradients are
        magnitude = np.full(size, np.linalg.norm(magnitude))
    np.testing.assert_array_less(lost, terms * 2.0**-23 * magnitude + terms * world_size * 2.0**-148 + 1e-300)
