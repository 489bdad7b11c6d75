"""Selections on the device are those of the CPU, whatever the vector, and whatever order blocks run in."""

import numpy as np
import pytest

from commlib import InvalidArgument, NonFiniteInput, UnknownName, select
from commlib.gpu import DEVICE_SELECTORS, make_device_selector
from tests.extent import dealt, more
from tests.gpu.vectors import DTYPES, SEED, SIZES, VECTORS, bits_of, ks, normal

NAMES = [name for name in DEVICE_SELECTORS if name != "mstopk"]  # which is "exact"
NARROW = ["float16", "bfloat16"]


def on(engine, array):
    return engine.from_host(bits_of(array))


def assert_selected(selection, vector, name, k):
    """Compare a selection with the CPU's from the entries as float32."""
    vector = vector.astype(np.float32)
    expected, found = select(name, vector, k), selection.to_host()
    case = f"{name}, {len(vector)} entries, k = {k}, seed {SEED}"
    assert found.indices.dtype == expected.indices.dtype
    np.testing.assert_array_equal(found.indices, expected.indices, case)
    assert found.values.tobytes() == expected.values.tobytes(), case


def assert_selects(engine, name, vector, k, entry="float32", first=0):
    """Select from a vector that begins at entry ``first`` of its array, and compare with the CPU."""
    selector = make_device_selector(name, len(vector) - first, k, entry=entry, engine=engine)
    assert_selected(selector.select(on(engine, vector)[first:]), vector[first:], name, k)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_the_entries_are_those_of_the_cpu(engine, name, size):
    vector = normal(size)
    for k in ks(size):
        assert_selects(engine, name, vector, k)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("law", VECTORS)
@pytest.mark.parametrize("size", [20_001, *more(65)])
def test_ties_zeros_and_outliers_are_selected_as_by_the_cpu(engine, name, law, size):
    vector = VECTORS[law](size)
    for k in (1, size // 100 + 1, size // 4):
        assert_selects(engine, name, vector, k)


@pytest.mark.pairs(lambda name, entry, **_: entry == "float32" or dealt(name, NAMES, entry, NARROW))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("entry", DTYPES)
@pytest.mark.parametrize("size", [9001, *more(31, 1000, 65537)])
def test_a_sum_is_written_selected_from_and_cleared_in_one_sweep(engine, name, entry, size):
    gradient, residual = normal(size, 1).astype(DTYPES[entry]), normal(size, 2)
    expected = gradient.astype(np.float32) + residual
    k = size // 20 + 1
    selector = make_device_selector(name, size, k, entry=entry, engine=engine)
    given = on(engine, gradient), on(engine, residual)
    out = engine.empty(size, np.float32)
    selection = selector.select_sum(*given, out)
    assert_selected(selection, expected, name, k)
    assert engine.to_host(out).tobytes() == expected.tobytes()
    selection = selector.select_sum(*given, out, clear=True)
    assert_selected(selection, expected, name, k)
    expected[selection.to_host().indices] = 0
    assert engine.to_host(out).tobytes() == expected.tobytes()
    assert engine.to_host(given[1]).tobytes() == residual.tobytes()


@pytest.mark.pairs(lambda name, bad, **_: np.isnan(bad) == NAMES.index(name) % 2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize(("size", "place"), [(9001, 8000), *more((1, 0), (1000, 999))])
def test_a_vector_that_is_not_finite_is_refused_and_no_sum_is_cleared(engine, name, bad, size, place):
    for entry, dtype in DTYPES.items():
        vector = normal(size).astype(dtype)
        vector[place] = bad
        selector = make_device_selector(name, size, size // 2 + 1, entry=entry, engine=engine)
        with pytest.raises(NonFiniteInput, match="a NaN or an infinity"):
            selector.select(on(engine, vector)).nnz()
        residual, out = on(engine, normal(size, 1)), engine.empty(size, np.float32)
        selection = selector.select_sum(on(engine, vector), residual, out, clear=True)
        with pytest.raises(NonFiniteInput):
            selection.to_host()
        with np.errstate(invalid="ignore"):
            expected = vector.astype(np.float32) + normal(size, 1)
        np.testing.assert_array_equal(engine.to_host(out), expected)
        finite = normal(size).astype(dtype)  # the plan is none the worse for it
        k = size // 2 + 1
        assert_selected(selector.select(on(engine, finite)), finite, name, k)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_selected_for_k_0_and_of_nothing(engine, name):
    out = engine.empty(100, np.float32)
    selector = make_device_selector(name, 100, 0, engine=engine)
    ones = on(engine, np.ones(100, np.float32))
    assert selector.select_sum(ones, ones, out, clear=True).nnz() == 0
    assert engine.to_host(out).tolist() == [2.0] * 100
    empty = make_device_selector(name, 0, 5, engine=engine)
    assert empty.select(engine.empty(0, np.float32)).nnz() == 0
    with pytest.raises(NonFiniteInput):
        selector.select(on(engine, np.full(100, np.nan, np.float32))).nnz()


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_blocks_changes_no_bit(emulate, name):
    vector = VECTORS["ties"](20_003) + normal(20_003) // 3
    found = set()
    for seed, multiprocessors, under_way in [(3, 1, 1), (4, 1, 8), (5, 4, 2), (6, 16, 5)]:
        engine = emulate(seed, multiprocessors, under_way=under_way)
        selector = make_device_selector(name, 20_003, 1000, engine=engine)
        selection = selector.select(on(engine, vector)).to_host()
        found.add((selection.indices.tobytes(), selection.values.tobytes()))
    assert len(found) == 1


def test_what_a_plan_cannot_be_is_refused(engine):
    with pytest.raises(InvalidArgument, match="stride of 8 bytes"):
        make_device_selector("exact", 100, 10, engine=engine).select(on(engine, normal(200))[::2])
    with pytest.raises(InvalidArgument, match="k: expected 0 to 2147483647, got -1"):
        make_device_selector("exact", 100, -1, engine=engine)
    with pytest.raises(InvalidArgument, match="size·k: expected less than 2⁶⁴, got 17,179,869,184 · 1,073,"):
        make_device_selector("bucketed", 1 << 34, 1 << 30, engine=engine)
    with pytest.raises(UnknownName, match='selector of the device "gausian" .*did you mean "gaussian"'):
        make_device_selector("gausian", 100, 1, engine=engine)
    with pytest.raises(UnknownName, match='type of entries "float64"'):
        make_device_selector("exact", 100, 1, entry="float64", engine=engine)
