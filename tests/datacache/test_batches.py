"""Memory that is used again only when nobody refers to it, and work that is done ahead in order."""

import gc
import threading
import time

import numpy as np
import pytest

from datacache.batches import ALIGNMENT, Pools, prefetch


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32"])
def test_arrays_are_aligned_and_of_the_shape_asked_for(dtype):
    pools = Pools()
    for array in [pools.take((3, 5, 7), dtype) for _ in range(4)]:
        assert (array.shape, array.dtype) == ((3, 5, 7), np.dtype(dtype))
        assert array.ctypes.data % ALIGNMENT == 0
        assert array.flags.writeable


def test_memory_comes_back_when_the_last_view_is_gone():
    pools = Pools()
    array = pools.take((8, 4), "float32")
    place, part = array.ctypes.data, array[2:5].reshape(-1)
    del array
    gc.collect()
    other = pools.take((8, 4), "float32")
    assert other.ctypes.data != place
    del part
    gc.collect()
    assert pools.take((8, 4), "float32").ctypes.data == place


def test_results_come_in_order_whatever_takes_longest():
    def slow_for_even(number):
        time.sleep(0.01 * (number % 2 == 0))
        return number

    assert list(prefetch(slow_for_even, range(20), threads=4, depth=6)) == list(range(20))


def test_no_more_is_begun_than_asked_for():
    begun = []
    results = prefetch(lambda number: begun.append(number), range(100), threads=2, depth=3)
    next(results)
    assert len(begun) <= 4
    results.close()
    assert len(begun) <= 4


def test_threads_end_with_the_last_result():
    before = threading.active_count()
    assert sum(prefetch(lambda number: number, range(5), threads=3, depth=2)) == 10
    assert threading.active_count() == before


def test_an_exception_comes_where_its_result_would():
    results = prefetch(lambda number: 1 // (2 - number), range(5), threads=2, depth=4)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)
