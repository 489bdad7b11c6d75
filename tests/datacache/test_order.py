"""Which sample is read when: pure functions of seed, epoch and place."""

import math
from dataclasses import replace

import numpy as np
import pytest

from datacache.order import BatchOrder, EvaluationOrder, Order, Permutation

WORLDS = [1, 2, 3, 4, 5, 8]
IMAGENET = 1_281_167


def excess(counts, expected):
    """By how many standard deviations chi-square is too large for counts that are equally likely."""
    freedom = counts.size - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


def global_batch(order, epoch, step, world_size):
    return np.concatenate([order.batch(epoch, step, rank, world_size) for rank in range(world_size)])


def global_counts(order, step, world_size=1):
    return np.concatenate([order.counts(0, step, rank, world_size) for rank in range(world_size)])


# -------------------------------------------------------------------------------- permutations


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 255, 256, 257, 1000, IMAGENET])
def test_a_permutation_has_every_number_once(size):
    found = np.zeros(size, np.int64)
    found[Permutation(size, 7, 3).at(np.arange(size))] += 1
    assert (found == 1).all()


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_permutations_of_a_few_are_equally_likely(size):
    keys = 200 * math.factorial(size)
    drawn = np.array([Permutation(size, key).at(np.arange(size)) for key in range(keys)])
    _, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(counts) == math.factorial(size)
    assert abs(excess(counts, 200)) < 5


def test_a_large_permutation_keeps_nothing_of_the_order():
    values = Permutation(IMAGENET, 11).at(np.arange(IMAGENET))
    assert abs(np.corrcoef(values, np.arange(IMAGENET))[0, 1]) < 5 / math.sqrt(IMAGENET)
    for lag in (1, 2, 1024):
        assert abs(np.corrcoef(values[lag:], values[:-lag])[0, 1]) < 5 / math.sqrt(IMAGENET)
    for first, second in [(np.arange(IMAGENET), values), (values[1:], values[:-1])]:
        counts = np.histogram2d(first, second, bins=256)[0]
        assert excess(counts, len(first) / 256**2) < 5


def test_permutations_are_the_same_for_ever():
    """Golden values: a run that resumes on another machine or version must not read other samples."""
    positions = np.array([0, 1, 2, 1_000_000, IMAGENET - 1])
    expected = [1079551, 693078, 867621, 817958, 759897]
    assert Permutation(IMAGENET, 7, 3).at(positions).tolist() == expected
    assert Permutation(7, 7, 3).at(np.arange(7)).tolist() == [2, 6, 3, 0, 1, 4, 5]
    assert Permutation(2**40, -1).at(np.array([0, 2**40 - 1])).tolist() == [38890361026, 938875906480]


@pytest.mark.parametrize("positions", [[-1], [3], [0, 3]])
def test_a_position_outside_is_refused(positions):
    with pytest.raises(IndexError, match="positions: expected 0 to 2, got"):
        Permutation(3, 1).at(np.array(positions))


# ----------------------------------------------------------------------------- training: Order

ORDERS = [
    Order(1437, 1, 24, seed=5),
    Order(1437, 8, 24, seed=5),
    Order(1437, 24, 24, seed=5, placement="hash"),
    Order(1440, 3, 48, seed=5),
    Order(10, 4, 48, seed=5),  # a batch is more than all samples
]
EXCHANGED = [
    Order(1437, 8, 24, seed=5, exchange=0.3),
    Order(1437, 24, 24, seed=5, placement="hash", exchange=1.0),
    Order(1437, 3, 48, seed=5, exchange=0.001),  # less than one sample of each shard
]


@pytest.mark.parametrize("order", ORDERS + EXCHANGED)
def test_an_epoch_reads_no_sample_twice_and_leaves_less_than_a_batch_of_each_shard(order):
    ids = [global_batch(order, 2, step, 1) for step in range(order.steps())]
    read = np.concatenate([np.empty(0, np.int64), *ids])
    assert len(np.unique(read)) == len(read) == order.steps() * order.global_batch
    # Shards differ by one sample, so that each may leave one more than a batch takes of it.
    assert order.samples - len(read) < order.global_batch + order.shards
    assert all(global_counts(order, step).all() for step in range(order.steps()))


@pytest.mark.parametrize("order", ORDERS + EXCHANGED)
def test_a_padded_epoch_counts_every_sample_once(order):
    order = replace(order, remainder="pad")
    steps = range(order.steps())
    read = np.concatenate([global_batch(order, 2, step, 1) for step in steps])
    counted = np.concatenate([global_counts(order, step) for step in steps])
    assert sorted(read[counted]) == list(range(order.samples))
    assert len(read) - order.samples < order.global_batch + order.shards
    assert not global_counts(order, len(steps)).any()
    assert global_counts(order, len(steps) - 1).any()


@pytest.mark.parametrize("order", ORDERS + EXCHANGED)
def test_global_batches_are_the_same_at_every_world_size(order):
    order = replace(order, remainder="pad")
    for step in range(order.steps()):
        alone = global_batch(order, 4, step, 1)
        for world_size in (2, 3, 4, 8):
            assert (global_batch(order, 4, step, world_size) == alone).all()
            assert (global_counts(order, step, world_size) == global_counts(order, step)).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("nodes", [[[0, 1, 2, 3]], [[0], [1, 2, 3]], [[0, 1], [2, 3]], [[3, 0], [1], [2]]])
def test_the_part_of_a_node_is_what_its_ranks_read(order, nodes):
    order = replace(order, remainder="pad")
    parts = [order.part(ranks, 4) for ranks in nodes]
    for part, ranks in zip(parts, nodes, strict=True):
        batches = [
            order.batch(epoch, step, rank, 4)
            for epoch in range(20)
            for step in range(order.steps())
            for rank in ranks
        ]
        read = np.unique(np.concatenate(batches))
        assert np.isin(read, part).all()
        assert (part[1:] > part[:-1]).all()
        # Twenty epochs, padded: all of it unless two nodes share a shard.
        assert len(read) == len(part) or order.shards < 4
    assert (np.unique(np.concatenate(parts)) == np.arange(order.samples)).all()


@pytest.mark.parametrize("placement", ["manifest", "hash"])
def test_with_a_shard_for_each_node_the_parts_do_not_overlap(placement):
    order = Order(1001, 4, 64, seed=1, placement=placement)
    parts = [order.part([2 * node, 2 * node + 1], 8) for node in range(4)]
    assert sorted(np.concatenate(parts)) == list(range(1001))
    assert {len(part) for part in parts} == {250, 251}
    consecutive = [(part == np.arange(part[0], part[0] + len(part))).all() for part in parts]
    assert consecutive == [placement == "manifest"] * 4
    for node, part in enumerate(parts):
        of_another_seed = Order(1001, 4, 64, seed=2, placement=placement).part([2 * node, 2 * node + 1], 8)
        assert (part == of_another_seed).all()


def travellers(order, epoch):
    """Return the shard that reads each sample in an epoch, and the one whose it is, by sample."""
    reader, owner = np.empty(order.samples, int), np.empty(order.samples, int)
    bounds = [order.part([rank], order.shards) for rank in range(order.shards)]  # one rank a shard
    for shard, part in enumerate(bounds):
        owner[part] = shard
        padded = replace(order, remainder="pad")
        read = [padded.batch(epoch, step, shard, order.shards) for step in range(padded.steps())]
        reader[np.concatenate(read)] = shard
    return reader, owner


@pytest.mark.parametrize("placement", ["manifest", "hash"])
def test_the_share_that_is_asked_for_changes_places_and_others_in_each_epoch(placement):
    order = Order(4000, 4, 40, seed=3, placement=placement, exchange=0.2)
    away, counts = [], set()
    for epoch in range(6):
        reader, owner = travellers(order, epoch)
        counts.add(tuple(np.bincount(4 * owner + reader, minlength=16)))
        away.append(reader != owner)
        # 200 of each shard draw new places, and a quarter of these their own shard again.
        assert excess(np.bincount(owner[away[-1]], minlength=4), 150) < 30
        assert len(away[-1]) == 4000
    for one, other in zip(away, away[1:], strict=False):
        assert (one & other).sum() < 1.5 * 4000 * 0.15**2
    assert np.any(away, axis=0).mean() > 0.6 * (1 - 0.85**6)
    assert len(counts) == 6  # how many a shard has of each other is drawn in each epoch


@pytest.mark.parametrize("order", [*EXCHANGED, Order(1440, 3, 48, seed=5)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_the_home_of_a_sample_is_a_rank_that_has_it(order, world_size):
    parts = [order.part([rank], world_size) for rank in range(world_size)]
    asked = np.zeros(world_size, int)
    for step in range(order.steps()):
        for rank in range(world_size):
            ids = order.batch(3, step, rank, world_size)
            for number, home in zip(ids, order.holders(3, step, rank, world_size), strict=True):
                assert number in parts[home]
                asked[home] += 1
    assert asked.max() < 2 * asked.mean()  # a rank may be at the border of two shards


def test_epochs_seeds_and_shards_are_read_in_unrelated_orders():
    def read(seed, epoch, shard):
        order = Order(100_000, 2, 2000, seed)
        batches = [order.batch(epoch, step, shard, 2) for step in range(50)]
        return np.concatenate(batches) - 50_000 * shard

    first = read(1, 0, 0)
    for other in [read(2, 0, 0), read(1, 1, 0), read(1, 0, 1), read(0, 1, 0)]:
        assert (other == first).sum() < 10  # one in the mean


def test_the_order_is_the_same_for_ever():
    """Golden values: a run that resumes on another machine or version must not read other samples."""
    manifest = [649, 58428, 23523, 29085, 16031, 7186, 39437, 65672]
    scattered = [907241, 1182862, 335784, 208843, 811134, 219327, 286603, 88461]
    assert Order(IMAGENET, 16, 4096, 42).batch(5, 17, 1, 512).tolist() == manifest
    assert Order(IMAGENET, 16, 4096, 42, "hash").batch(5, 17, 1, 512).tolist() == scattered


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"shards": 0}, "shards: expected at least 1, got 0"),
        ({"samples": 3}, "samples: expected at least as many as shards = 4, got 3"),
        ({"global_batch": 6}, "global_batch: expected a multiple of shards = 4, got 6"),
        ({"global_batch": 0}, "global_batch: expected a multiple of shards = 4, got 0"),
        ({"placement": "random"}, "placement: expected 'manifest' or 'hash', got 'random'"),
        ({"remainder": "keep"}, "remainder: expected 'drop' or 'pad', got 'keep'"),
        ({"exchange": 1.1}, "exchange: expected a share from 0 to 1, got 1.1"),
        ({"shards": 1, "exchange": 0.1}, "exchange: expected 0 where there is one shard, got 0.1"),
    ],
)
def test_an_impossible_order_is_refused(settings, error):
    with pytest.raises(ValueError, match=error):
        Order(**{"samples": 100, "shards": 4, "global_batch": 8, "seed": 1, **settings})


TRAINING, EVALUATION = Order(100, 4, 8, seed=1), EvaluationOrder(21, 7, 2)


@pytest.mark.parametrize(
    ("order", "place", "error"),
    [
        (TRAINING, {"step": -1}, "step: expected at least 0, got -1"),
        (TRAINING, {"rank": 2}, "rank: expected 0 to 1, got 2"),
        (TRAINING, {"rank": -1}, "rank: expected 0 to 1, got -1"),
        (TRAINING, {"world_size": 3}, "world_size: expected a divisor of global_batch = 8, got 3"),
        (TRAINING, {"world_size": 0}, "world_size: expected at least 1, got 0"),
        (EVALUATION, {"step": -1}, "step: expected 0 to 1, got -1"),
        (EVALUATION, {"step": 2}, "step: expected 0 to 1, got 2"),
        (EVALUATION, {"world_size": 3}, "world_size: expected 2, got 3"),
    ],
)
def test_an_impossible_place_is_refused(order, place, error):
    with pytest.raises(ValueError, match=error):
        order.batch(**{"epoch": 0, "step": 0, "rank": 0, "world_size": 2, **place})


# ---------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("samples", [1, 3, 360, 361])
def test_every_rank_evaluates_as_many_full_batches_and_every_sample_counts_once(world_size, samples):
    order = EvaluationOrder(samples, 7, world_size)
    counted = []
    for rank in range(world_size):
        for step in range(order.steps()):
            ids, counts = order.batch(0, step, rank, world_size), order.counts(0, step, rank, world_size)
            assert ids.shape == counts.shape == (7,)
            assert np.isin(ids, order.part([rank], world_size)).all()
            assert (ids == order.batch(5, step, rank, world_size)).all()
            counted.extend(ids[counts])
    assert sorted(counted) == list(range(samples))
    assert order.part(range(world_size), world_size).tolist() == list(range(samples))


# ------------------------------------------------------------------------ orders of one's own


def test_an_order_of_ones_own_needs_steps_and_batches_only():
    class Backwards(BatchOrder):
        samples, seed, global_batch = 6, 0, 2

        def steps(self):
            return 3

        def batch(self, epoch, step, rank, world_size):
            return np.array([5 - 2 * step - rank])

    order = Backwards()
    assert order.counts(0, 1, 0, 2).tolist() == [True]
    assert order.part([0], 2).tolist() == list(range(6))
