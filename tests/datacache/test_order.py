"""Which sample is read when: pure functions of seed, epoch and place."""

import numpy as np
import pytest

from datacache.order import epoch_order, evaluation_ids, training_ids

WORLDS = [1, 2, 3, 4, 5, 8]


def test_an_order_is_a_permutation_fixed_by_seed_and_epoch():
    order = epoch_order(1437, seed=7, epoch=3)
    assert sorted(order) == list(range(1437))
    assert (order == epoch_order(1437, seed=7, epoch=3)).all()
    assert (order != epoch_order(1437, seed=7, epoch=4)).any()
    assert (order != epoch_order(1437, seed=8, epoch=3)).any()


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("samples", [0, 1, 37, 1437])
def test_every_rank_makes_as_many_full_batches_and_none_shares_a_sample(world_size, samples):
    order = epoch_order(samples, seed=1, epoch=0)
    parts = [list(training_ids(order, rank, world_size, batch_size=4)) for rank in range(world_size)]
    assert {len(part) for part in parts} == {samples // (4 * world_size)}
    assert all(len(ids) == 4 for part in parts for ids in part)
    read = [sample for part in parts for ids in part for sample in ids]
    assert len(read) == len(set(read)) == samples // (4 * world_size) * 4 * world_size


def test_the_same_global_batches_come_out_at_another_world_size():
    order = epoch_order(100, seed=1, epoch=0)
    two = [list(training_ids(order, rank, 2, batch_size=6)) for rank in range(2)]
    four = [list(training_ids(order, rank, 4, batch_size=3)) for rank in range(4)]
    assert len(two[0]) == len(four[0]) == 8
    for step in range(8):
        of_two = np.concatenate([part[step] for part in two])
        of_four = np.concatenate([part[step] for part in four])
        assert (of_two == of_four).all()


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("samples", [1, 3, 360, 361])
def test_evaluation_reads_every_sample_exactly_once(world_size, samples):
    read = [
        sample
        for rank in range(world_size)
        for ids in evaluation_ids(samples, rank, world_size, batch_size=7)
        for sample in ids
    ]
    assert sorted(read) == list(range(samples))
