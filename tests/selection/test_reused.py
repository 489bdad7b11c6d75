"""A threshold that is found once in a while and reused between."""

import numpy as np
import pytest

from commlib.errors import NonFiniteInput
from commlib.selection.exact import Exact
from commlib.selection.reused import Reused


def drifting(step: int, growth: float = 1.01, size: int = 4099) -> np.ndarray:
    return (np.random.default_rng(step).standard_t(3, size) * growth**step).astype(np.float32)


def test_every_few_calls_it_is_exact_and_between_it_takes_what_reaches_the_threshold():
    selector, threshold = Reused(every=4), None
    for step in range(12):
        vector = drifting(step)
        selected = selector.select(vector, 100)
        if step % 4 == 0:
            assert (selected.indices == Exact().select(vector, 100).indices).all()
            threshold = np.abs(selected.values).min()
        assert (selected.indices == np.flatnonzero(np.abs(vector) >= threshold)).all()
        assert (selected.values == vector[selected.indices]).all()


@pytest.mark.parametrize("growth", [0.1, 0.5, 2.0, 10.0])
def test_the_count_is_bounded_however_gradients_grow_or_shrink(growth):
    selector = Reused(every=1000)
    counts = [selector.select(drifting(step, growth), 100).nnz for step in range(20)]
    assert all(50 <= count <= 200 for count in counts)


def test_less_than_half_of_k_is_selected_again():
    selector, vector = Reused(every=1000), np.arange(1, 1001, dtype=np.float32)
    # The threshold is 901: so many reach it, and 40 would be too few.
    assert [selector.select(vector - less, 100).nnz for less in (0, 40, 60)] == [100, 60, 100]


def test_ties_do_not_select_everything():
    selector = Reused()
    counts = [selector.select(np.full(1000, value, np.float32), 10).nnz for value in (1, 1, 2, 0, 0)]
    assert counts == [10] * 5


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_number_is_seen_with_a_reused_threshold_too(bad):
    selector = Reused()
    vector = drifting(0)
    selector.select(vector, 100)
    vector[4000] = bad
    with pytest.raises(NonFiniteInput):
        selector.select(vector, 100)


def test_a_restored_selector_goes_on_alike():
    first, second = Reused(every=5), Reused(every=5)
    for step in range(3):
        first.select(drifting(step), 100)
    second.load_state_dict(first.state_dict())
    for step in range(3, 12):
        ours, theirs = first.select(drifting(step), 100), second.select(drifting(step), 100)
        assert (ours.indices == theirs.indices).all()
