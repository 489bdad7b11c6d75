"""Selections on the device are those of the CPU, whatever the vector, and whatever order blocks run in."""

import numpy as np
import pytest

from commlib import InvalidArgument, NonFiniteInput, select
from commlib.arrays import to_host
from commlib.gpu import DEVICE_SELECTORS
from tests.extent import more
from tests.gpu.vectors import SEED, SIZES, ks, normal
from tests.selection.test_selectors import draw

NAMES = [name for name in DEVICE_SELECTORS if name != "mstopk"]  # which is "exact"
LAWS = ["heavy_tails", "all_equal", "all_zero", "mostly_zero", "many_ties"]
LAWS += ["denormals", "one_outlier", "crowded"]


def assert_selected(selection, vector, name, k):
    """Compare a selection with the CPU's."""
    expected, found = select(name, vector, k), selection.copy()
    case = f"{name}, {len(vector)} entries, k = {k}, seed {SEED}"
    assert found.indices.dtype == expected.indices.dtype
    np.testing.assert_array_equal(to_host(found.indices), expected.indices, case)
    assert to_host(found.values).tobytes() == expected.values.tobytes(), case


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("law", "size"), [*(("gaussian", size) for size in SIZES), *((law, 20_001) for law in LAWS)]
)
def test_the_entries_are_those_of_the_cpu(engine, name, law, size):
    vector = draw(law, SEED, size)
    for k in ks(size) if law == "gaussian" else (1, size // 100 + 1, size // 4):
        selector = DEVICE_SELECTORS[name](size, k, engine=engine)
        assert_selected(selector.select(engine.from_host(vector)), vector, name, k)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [9001, *more(31, 1000, 65537)])
def test_a_sum_is_written_and_selected_from_in_one_sweep(engine, name, size):
    gradient, residual = normal(size, 1), normal(size, 2)
    expected, k = gradient + residual, size // 20 + 1
    selector = DEVICE_SELECTORS[name](size, k, engine=engine)
    given, out = [engine.from_host(each) for each in (gradient, residual)], engine.empty(size, np.float32)
    assert_selected(selector.select_sum(*given, out), expected, name, k)
    assert engine.to_host(out).tobytes() == expected.tobytes()
    assert engine.to_host(given[1]).tobytes() == residual.tobytes()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, *more(-np.inf)])
@pytest.mark.parametrize(("size", "place"), [(9001, 8000), *more((1, 0), (1000, 999))])
def test_a_vector_that_is_not_finite_is_refused_and_the_plan_goes_on(engine, name, bad, size, place):
    vector, k = normal(size), size // 2 + 1
    vector[place] = bad
    selector = DEVICE_SELECTORS[name](size, k, engine=engine)
    with pytest.raises(NonFiniteInput, match="a NaN or an infinity"):
        selector.select(engine.from_host(vector)).nnz()
    residual, out = engine.from_host(normal(size, 1)), engine.empty(size, np.float32)
    with pytest.raises(NonFiniteInput):
        selector.select_sum(engine.from_host(vector), residual, out).copy()
    finite = normal(size)
    assert_selected(selector.select(engine.from_host(finite)), finite, name, k)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_selected_for_k_0_and_of_nothing(engine, name):
    out = engine.empty(100, np.float32)
    selector = DEVICE_SELECTORS[name](100, 0, engine=engine)
    ones = engine.from_host(np.ones(100, np.float32))
    assert selector.select_sum(ones, ones, out).nnz() == 0
    assert engine.to_host(out).tolist() == [2.0] * 100
    empty = DEVICE_SELECTORS[name](0, 5, engine=engine)
    assert empty.select(engine.empty(0, np.float32)).nnz() == 0
    with pytest.raises(NonFiniteInput):
        selector.select(engine.from_host(np.full(100, np.nan, np.float32))).nnz()


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_blocks_changes_no_bit(emulate, name):
    vector = draw("many_ties", SEED, 20_003) + normal(20_003) // 3
    found = set()
    for seed, multiprocessors, under_way in [(3, 1, 1), (4, 1, 8), (5, 4, 2), (6, 16, 5)]:
        engine = emulate(seed, multiprocessors, under_way=under_way)
        selector = DEVICE_SELECTORS[name](20_003, 1000, engine=engine)
        selection = selector.select(engine.from_host(vector)).copy()
        found.add((selection.indices.tobytes(), selection.values.tobytes()))
    assert len(found) == 1


def test_what_a_plan_cannot_be_is_refused(engine):
    with pytest.raises(InvalidArgument, match="stride of 8 bytes"):
        DEVICE_SELECTORS["exact"](100, 10, engine=engine).select(engine.from_host(normal(200))[::2])
    with pytest.raises(InvalidArgument, match="k: expected 0 to 2147483647, got -1"):
        DEVICE_SELECTORS["exact"](100, -1, engine=engine)
    with pytest.raises(InvalidArgument, match="size·k: expected less than 2⁶⁴, got 17,179,869,184 · 1,073,"):
        DEVICE_SELECTORS["bucketed"](1 << 34, 1 << 30, engine=engine)
    with pytest.raises(InvalidArgument, match="vector: expected float32 of shape .100,., got float64"):
        DEVICE_SELECTORS["exact"](100, 1, engine=engine).select(engine.from_host(np.ones(100)))
