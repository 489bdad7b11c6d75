"""Whose memory a mean is, and for how long; what it holds where nothing was written in this step."""

import numpy as np
import pytest

from commlib import REDUCERS, InvalidArgument, Topology, make_reducer
from commlib.arrays import Workspace
from commlib.reducers import LocalClipping, MomentumCorrection
from commlib.reducers.mean import MeanBuffer, MeanBuffers
from commlib.transport import simulated
from commlib.vectors import SparseVector
from tests.extent import more

SIZE = 2000
SPARSE = [name for name, reducer in REDUCERS.items() if reducer.sparse]


def gradient(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).standard_t(2, SIZE).astype(np.float32)


def make(comm, name, ranks_per_node=2, density=0.01):
    options = {"density": density} if name in SPARSE else {}
    return make_reducer(name, Topology(comm, ranks_per_node=ranks_per_node), size=SIZE, **options)


def test_a_workspace_gives_the_same_memory_again_in_the_length_and_type_that_are_asked_for():
    workspace = Workspace()
    first = workspace.get("a", 10)
    first[:] = 7
    shorter, bits = workspace.get("a", 4), workspace.get("a", 10, np.uint32)
    again = workspace.get("a", 10)
    found = [(len(each), each.dtype) for each in (first, shorter, bits, again)]
    assert found == [(10, np.float32), (4, np.float32), (10, np.uint32), (10, np.float32)]
    assert again.tolist() == [7] * 10 and np.shares_memory(first, bits)
    longer = workspace.get("a", 1000)
    assert len(longer) == 1000 and not np.shares_memory(longer, first)
    assert np.shares_memory(workspace.get("a", 10), longer)
    assert not np.shares_memory(workspace.get("b", 1000), longer)


@pytest.mark.parametrize("ranks_per_node", [2, [3, 1], *more(1)], ids=str)
@pytest.mark.parametrize("name", REDUCERS)
def test_means_that_are_held_stay_as_they_are_and_memory_of_others_is_used_again(name, ranks_per_node):
    def body(comm):
        reducer = make(comm, name, ranks_per_node)
        held = [reducer.reduce(gradient(comm.rank, step)) for step in range(4)]
        with pytest.raises(ValueError, match="read-only"):
            held[0] += 1
        held[1] = held[1][100:200]  # a view holds the memory, too
        copies = [mean.copy() for mean in held]
        addresses = {reducer.reduce(gradient(comm.rank, step)).ctypes.data for step in range(4, 8)}
        mean = None
        for step in range(8, 12):
            mean = reducer.reduce(gradient(comm.rank, step))  # while that of the step before is held
            addresses.add(mean.ctypes.data)
        unchanged = [np.array_equal(mean, copy) for mean, copy in zip(held, copies, strict=True)]
        held.clear()
        twice = {reducer.reduce(gradient(comm.rank, step)).ctypes.data for step in range(4)}
        return unchanged, len(twice)

    assert simulated.run(body, 4) == [([True] * 4, 1)] * 4


@pytest.mark.parametrize("is_wrapped, name", [*((False, name) for name in REDUCERS), (True, "hitopk")])
def test_out_takes_the_mean_whatever_it_held_and_is_the_callers(is_wrapped, name):
    def body(comm):
        reducer, twin = make(comm, name), make(comm, name)
        if is_wrapped:
            reducer, twin = (LocalClipping(MomentumCorrection(each, 0.9), 1.0) for each in (reducer, twin))
        out, equal = np.full(SIZE, np.nan, np.float32), []
        for step in range(4):
            own = gradient(comm.rank, step)
            mean = reducer.reduce(own, out=out)
            equal.append(mean is out and mean.tobytes() == twin.reduce(own).tobytes())
            out[::3] = 7  # places that the next mean may leave at 0
        return equal

    assert simulated.run(body, 4) == [[True] * 4] * 4


def test_out_that_cannot_take_a_mean_is_refused_by_name():
    read_only = np.zeros(SIZE, np.float32)
    read_only.flags.writeable = False
    wrong = {
        "got float64": np.zeros(SIZE),
        r"shape \(3,\)": np.zeros(3, np.float32),
        "contiguous": np.zeros(2 * SIZE, np.float32)[::2],
        "written to": read_only,
    }

    def body(comm):
        reducer = make(comm, "hitopk")
        for match, out in wrong.items():
            with pytest.raises(InvalidArgument, match=f"^out: .*{match}"):
                reducer.reduce(gradient(0, 0), out=out)
        own = gradient(0, 0)
        with pytest.raises(InvalidArgument, match="^out: .*apart from the gradient"):
            reducer.reduce(own, out=own)
        return reducer.steps

    assert simulated.run(body, 2) == [0, 0]


@pytest.mark.parametrize("name", SPARSE)
def test_a_mean_is_right_after_a_void_step_and_where_dense_and_sparse_ones_alternate(name):
    """The memory of a mean is cleared where the one before was written, which may be everywhere."""

    def body(comm):
        reducer, equal = make(comm, name), []
        outside = make(comm, name)
        for step, density in enumerate((0.01, 0.9, 0.01, 0.3, 0.002, 0.01, 0.01)):
            reducer.set_density(density)
            outside.set_density(density)
            own = gradient(comm.rank, step)
            if step == 4 and comm.rank == 2:
                own[7] = np.inf
            # ``out`` is filled without knowing what was written before
            expected = outside.reduce(own, out=np.full(SIZE, 9, np.float32))
            equal.append(reducer.reduce(own).tobytes() == expected.tobytes())
        return equal, reducer.last.finite

    assert simulated.run(body, 4) == [([True] * 7, True)] * 4


def entries(*indices):
    return SparseVector(100, np.array(indices, np.int32), np.ones(len(indices), np.float32))


def test_a_mean_is_cleared_where_it_was_written_and_nowhere_else():
    mean = MeanBuffer(np.full(100, 5, np.float32))
    mean.scatter([(0, entries(3, 50))])  # what it held is not known: all of it goes
    assert np.flatnonzero(mean.array).tolist() == [3, 50]
    mean.array[7] = 8  # nobody may: it shows that this entry is left alone
    mean.array *= 2  # as whoever clips does
    mean.scatter([(0, entries(4))])
    assert np.flatnonzero(mean.array).tolist() == [4, 7]
    mean.dense()[...] = 6
    mean.scatter([(0, entries(9))])
    assert np.flatnonzero(mean.array).tolist() == [9]


def test_a_short_part_that_is_written_dense_is_cleared_by_the_next_mean():
    mean, others = MeanBuffer(np.zeros(2000, np.float32)), [(100 * i, entries()) for i in range(1, 20)]
    mean.scatter([(0, SparseVector(100, None, np.ones(100, np.float32))), *others])
    mean.scatter([(0, entries(3)), *others])
    assert np.flatnonzero(mean.array).tolist() == [3]


def test_places_beyond_what_the_indices_of_a_part_can_count_are_cleared():
    # As of a mean past 2³¹ entries, which int64 addresses, and its parts, which int32 does.
    mean, one = MeanBuffer(np.zeros(200, np.float32)), np.ones(1, np.float32)
    part = SparseVector.trusted(100, np.array([99], np.int8), one)
    mean.scatter([(0, entries()), (100, part)])
    assert np.flatnonzero(mean.array).tolist() == [199]
    mean.scatter([(0, entries()), (100, entries())])
    assert not mean.array.any()


def test_a_third_mean_that_is_held_costs_a_new_array_and_no_more_than_two_are_kept():
    means = MeanBuffers(1000)
    first, second = means.array(), means.array()
    third = means.array()
    assert len({each.ctypes.data for each in (first, second, third)}) == 3
    address = third.ctypes.data
    del third
    assert means.array().ctypes.data == address
    del first, second
    assert len({means.array().ctypes.data for _ in range(5)}) == 1
