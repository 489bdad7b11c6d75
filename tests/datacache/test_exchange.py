"""Samples that nodes lend each other: which come, from whom, and that each is the right one."""

import numpy as np
import pytest

from commlib.transport import simulated
from datacache import CacheDirs, CentreCrop, DataCache, Order
from datacache.cache import fetch_remote_samples
from datacache.errors import Damaged
from tests.datacache.test_cache import Counted

SAMPLES = 251


def sample_of(number):
    return np.full((1 + number % 3, 2, 1), number % 251, np.uint8)


def node_of(rank, nodes):
    return next(index for index, ranks in enumerate(nodes) if rank in ranks)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("most", [0, 3, 700])
def test_every_rank_gets_what_it_asks_for(world_size, most):
    def ask(comm):
        rng = np.random.default_rng([most, comm.rank])
        wanted = np.unique(rng.integers(0, 10**6, most * comm.rank // world_size + bool(most)))
        asked = []

        def read(ids):
            asked.extend(ids.tolist())
            return [sample_of(number) for number in ids.tolist()]

        return wanted, fetch_remote_samples(comm, wanted, wanted % world_size, read), asked

    results = simulated.run(ask, world_size)
    for wanted, got, _ in results:
        assert sorted(got) == wanted.tolist()
        assert all(np.array_equal(got[number], sample_of(number)) for number in got)
    for rank, (_, _, asked) in enumerate(results):
        assert all(number % world_size == rank for number in asked)


def test_a_record_that_arrives_damaged_is_no_sample(monkeypatch):
    def ask(comm):
        whole = comm.exchange

        def damaged(outgoing, incoming):
            whole(outgoing, incoming)
            for part in incoming:
                if part.dtype == np.uint8 and len(part):
                    part[-1] ^= 4

        comm.exchange = damaged
        wanted = np.array([7 + comm.rank])
        return fetch_remote_samples(
            comm, wanted, 1 - wanted % 2, lambda ids: [sample_of(each) for each in ids.tolist()]
        )

    with pytest.raises(Damaged, match="the payload is not what was written"):
        simulated.run(ask, 2)


@pytest.mark.parametrize("nodes", [[[0, 1], [2, 3]], [[0], [1, 2, 3]], [[0], [1], [2], [3]]])
def test_all_nodes_together_read_storage_once_whatever_travels(tmp_path, nodes):
    source = Counted(SAMPLES)
    order = Order(SAMPLES, 4, 8, seed=5, exchange=0.4)

    def train(comm):
        node = node_of(comm.rank, nodes)
        dirs = CacheDirs(tmp_path / f"disk {node}", tmp_path / f"memory {node}")
        cache = DataCache(source, part=order.part(nodes[node], 4), dirs=dirs)
        cache.fill()
        comm.barrier()
        came = []
        for epoch in range(3):
            came.append(cache.exchange(order, comm, epoch))
            for batch in cache.batches(order, CentreCrop(4, dtype="uint8"), comm.rank, 4, epoch):
                assert (batch.images == batch.ids[:, None, None, None]).all()
                assert (batch.labels == batch.ids + 100).all()
        cache.close()
        return came, cache.counts

    results = simulated.run(train, 4)
    for rank, (came, counts) in enumerate(results):
        held = order.part(nodes[node_of(rank, nodes)], 4)
        for epoch in range(3):
            ids = np.concatenate([order.batch(epoch, step, rank, 4) for step in range(order.steps())])
            assert came[epoch] == (~np.isin(ids, held)).sum()
        assert counts.remote == sum(came) > 0
    # Ranks of a node fill it at the same time, and may read a sample both; another node reads none of it.
    assert source.reads.max() <= max(map(len, nodes))
    assert source.reads.min() == 1


def test_without_the_exchange_batches_are_the_same_and_read_from_storage(tmp_path):
    source, order = Counted(SAMPLES), Order(SAMPLES, 2, 8, seed=5, exchange=0.5)

    def batches(comm, exchange):
        cache = DataCache(source, part=order.part([comm.rank], 2), dirs=CacheDirs(tmp_path / str(comm.rank)))
        if exchange:
            cache.exchange(order, comm, 1, start=3)
        return list(cache.batches(order, CentreCrop(4), comm.rank, 2, 1, start=3)), cache.counts

    lent, alone = (simulated.run(lambda comm, way=way: batches(comm, way), 2) for way in (True, False))
    for (ours, counts), (theirs, others) in zip(lent, alone, strict=True):
        assert all(np.array_equal(one.images, other.images) for one, other in zip(ours, theirs, strict=True))
        assert counts.remote > 0 == others.remote


def test_a_new_exchange_gives_up_what_the_one_before_brought():
    order = Order(SAMPLES, 2, 8, seed=5, exchange=0.5)

    def lent_twice(comm):
        cache = DataCache(Counted(SAMPLES), part=order.part([comm.rank], 2))
        cache.exchange(order, comm, 0)
        cache.exchange(order, comm, 1, start=order.steps())
        list(cache.batches(order, CentreCrop(4), comm.rank, 2, 0))
        return cache.counts.remote

    assert simulated.run(lent_twice, 2) == [0, 0]
