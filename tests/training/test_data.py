"""What the phases of a run read, on simulated ranks."""

import re

import numpy as np
import pytest

from commlib import Topology, transport
from datacache import Arrays
from tests.launching import DIGITS
from training.config.config import load
from training.datasets import ImageDataset
from training.run.data import Data, load_data

SAMPLES, TESTS = 50, 21


def dataset():
    images = np.broadcast_to(np.arange(SAMPLES, dtype=np.uint8)[:, None, None, None], (SAMPLES, 8, 8, 1))
    labels = np.arange(SAMPLES)
    return ImageDataset(
        Arrays(images, labels), Arrays(images[:TESTS], labels[:TESTS]), channels=1, classes=SAMPLES
    )


def on_ranks(function, tmp_path, *words, ranks=4):
    folders = [f"cache.disk={tmp_path}/disk", f"cache.memory={tmp_path}/memory"]
    config = load(DIGITS, ["phases.0.batch_size=3", *folders, *words])

    def body(comm):
        return function(Data(config, Topology(comm, ranks_per_node=2), dataset()), config.phases[0])

    return transport.simulated.run(body, ranks)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_ranks_train_on_their_own_samples_and_test_each_once(tmp_path, shards):
    def read(data, phase):
        of_phase = data.of_phase(phase)
        assert of_phase.order.steps() == (4 if shards < 3 else SAMPLES // 4 // 3)
        trained = [batch.ids.tolist() for batch in of_phase.training_batches(epoch=3)]
        tested = [batch.labels[batch.counts].tolist() for batch in of_phase.test_batches()]
        of_phase.close()
        return trained, tested, data.read_so_far()

    ranks = on_ranks(read, tmp_path, f"cache.shards={shards}")
    trained = [sample for rank, _, _ in ranks for ids in rank for sample in ids]
    assert len(set(trained)) == len(trained) == 48
    assert sorted(label for _, rank, _ in ranks for labels in rank for label in labels) == list(range(TESTS))
    reads = ranks[0][2]
    assert all(each[2] == reads for each in ranks)
    assert reads.lines() == []
    assert reads.counts["storage"] >= 48 + TESTS


def test_damage_is_told_on_every_rank(tmp_path):
    def fill(data, phase):
        of_phase = data.of_phase(phase)
        of_phase.fill(lambda done, total: None)
        of_phase.close()

    def read(data, phase):
        of_phase = data.of_phase(phase)
        mended = of_phase.repair() if data.topology.world.rank == 0 else 0
        data.topology.world.barrier()
        return mended, data.read_so_far().lines()

    on_ranks(fill, tmp_path)
    for path in tmp_path.glob("memory/gen-*/records"):
        content = bytearray(path.read_bytes())
        place = content.find(bytes([7]) * 36)  # sample 7 at the phase's 6 × 6 pixels
        while place >= 0:
            content[place] ^= 1
            place = content.find(bytes([7]) * 36, place + 1)
        path.write_bytes(content)
    ranks = on_ranks(read, tmp_path)
    assert ranks[0][0] == 2  # among the training samples, and among those of the test that node 0 has
    assert [lines for _, lines in ranks] == [["2 damaged records of the cache were read again"]] * 4


def problem_of_ranks(datasets):
    """Load one data set on each of the ranks, two of them a node; return what each says."""

    def body(comm):
        comm.host = f"node{comm.rank // 2}"
        words = [f"phases.{phase}.batch_size=3" for phase in (0, 1)]
        config = load(DIGITS, [f"dataset={datasets[comm.rank]}", *words])
        try:
            load_data(config, Topology(comm))
        except ValueError as error:
            return str(error)
        return None

    return transport.simulated.run(body, len(datasets))


ONE = "{name: synthetic, samples: 64}"
MORE, CLASSES = (f"{{name: synthetic, samples: {each}}}" for each in ("72", "64, classes: 5"))
TESTS_64, TESTS_65 = (f"{{name: synthetic, test_samples: {each}}}" for each in (64, 65))


@pytest.mark.parametrize(
    ("datasets", "groups"),
    [
        (
            [ONE, ONE, MORE, MORE, ONE, ONE],
            ("training samples: .*node0, node2: 64 samples", "node1: 72 samples"),
        ),
        ([ONE, ONE, CLASSES, CLASSES], ("training samples: .*node0: 64 samples", "node1: 64 samples")),
        (
            [TESTS_64, TESTS_65],
            (r"test samples: .*node0 \(ranks 0\): 64 samples", r"node0 \(ranks 1\): 65 samples"),
        ),
    ],
    ids=["another number of samples", "other labels", "ranks of one node"],
)
def test_nodes_whose_data_sets_differ_are_named_before_the_first_step(datasets, groups):
    (line,) = set(problem_of_ranks(datasets))
    assert re.search(", fingerprint .*; ".join(groups), line)
    assert "\n" not in line


def test_a_node_that_cannot_read_its_data_set_says_so_and_the_others_do_not_wait():
    bad = "{name: synthetic, samples: -1}"
    problems = problem_of_ranks([ONE, ONE, bad, bad])
    assert problems[:2] == [None, None]
    assert "samples: expected a whole number from 1, got -1" in problems[2]
