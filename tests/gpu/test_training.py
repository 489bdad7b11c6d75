"""Training whose gradients lie on GPUs: the weights are those of the CPU, to the bit, and nothing is copied.

TensorFlow's part of a GPU is the CPU here, where the fake arrays lie; the kernels are run by the emulator.
"""

import dataclasses
import os
import re
import sys
import threading
from contextlib import nullcontext

import keras
import numpy as np
import pytest
from keras import layers

from commlib import Topology
from commlib import tensorflow as adapter
from commlib.transport import mpi, simulated
from tests.gpu.fake_cupy import FakeCuPy, installed
from tests.gpu.on_gpu import GPURanks, kernels_for
from tests.launching import DIGITS
from tests.training.replicas import Replica, batch_of
from tests.training.small import phase, trainer
from training.config.config import load
from training.config.schema import ConfigurationError
from training.datasets import make_dataset
from training.models import MODELS
from training.models.images import image_input
from training.process import devices as gpus
from training.process.job import LocalRank
from training.results import StepHyperparameters
from training.run.build import build
from training.run.data import Data

BATCH = 8
STEPS = 3


@pytest.fixture(autouse=True)
def gpus_that_are_processors(monkeypatch):
    for module in (adapter, adapter.gradients):  # what training asks, and what the gradients use
        monkeypatch.setattr(module, "tensorflow_device", lambda gpu: "CPU:0")
    monkeypatch.setitem(MODELS, "two_layers", two_layers)


# ---------------------------------------------------------------------------------------- a replica


def two_layers(channels, classes, *, normalised=False):
    images, x = image_input(channels, normalised=normalised)
    x = layers.Flatten()(layers.Resizing(4, 4, interpolation="area")(x))
    x = layers.BatchNormalization()(layers.Dense(20, activation="relu")(x))
    return keras.Model(images, layers.Dense(classes, dtype="float32")(x))


two_layers.smallest_side = 4


def learned(comm, config, dataset, spoil):
    """Return the weights after each step of two phases, and what was held back at the switch."""
    topology = Topology(comm, ranks_per_node=2)
    keras.utils.set_random_seed(3)  # and no other rank, a thread, has its turn before the model is there
    replica = Replica(build(config, topology, Data(config, topology, dataset)))
    seen = []
    for number, each in enumerate(config.phases):
        if number:
            seen.append(replica.begin(each))
        backward = replica.backward_of(each)
        for step in range(STEPS):
            batch = batch_of(comm.rank, STEPS * number + step)
            if spoil == (comm.rank, STEPS * number + step):
                replica.variables[-1].assign(np.full(replica.variables[-1].shape, np.nan, np.float32))
            before = [variable.numpy() for variable in replica.variables]
            _, report = replica.step(backward, batch, StepHyperparameters(0.1, 0.9))
            seen.append((report.finite, report.selected, report.traffic))
            if not report.finite:
                for variable, value in zip(replica.variables, before, strict=True):
                    np.testing.assert_array_equal(variable.numpy(), value)
        seen.append([variable.numpy().tobytes() for variable in replica.variables])
    norms = [] if config.phases[-1].reducer.name == "torus2d" else [replica.parts.exchange.residual_norm()]
    return seen, norms


LARS = "optimizer={name: lars, weight_decay: 0.01, trust: 0.1, norms: layers}"
CASES = {
    "lars, clipped, average": (LARS, "clip_norm=0.01", "average=0.9"),
    "scaled, in parts": ("precision=float16", "accumulate=2"),
    "local steps": ("phases.0.local_steps=1", "phases.1.local_steps=1", "phases.1.local=rank"),
}


def config_of(*words, reducers=("{name: hitopk, density: 0.05}", "dense")):
    phases = ", ".join(phase(size=8, batch=BATCH, epochs=1, reducer=each) for each in reducers)
    plain = ("model=two_layers", "reducer=dense", "cache={}")
    return load(DIGITS, [f"phases=[{phases}]", "ranks_per_node=2", *plain, *words])


def on_gpus(config, spoil=None):
    dataset = make_dataset("digits")
    ranks = GPURanks(3)
    return ranks.run(lambda comm: learned(comm, config, dataset, spoil)), ranks.cupy


def on_both(config, spoil=None):
    dataset = make_dataset("digits")
    on_cpu = simulated.run(lambda comm: learned(comm, config, dataset, spoil), 3)
    return on_cpu, on_gpus(config, spoil)[0]


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_cpu_to_the_bit(case):
    on_cpu, on_gpu = on_both(config_of(*CASES[case]))
    assert on_gpu == on_cpu


def test_a_void_step_changes_nothing_on_gpus_either():
    on_cpu, on_gpu = on_both(config_of(LARS, reducers=("{name: hitopk, density: 0.05}",)), spoil=(1, 1))
    assert [[entry[0] for entry in seen[:STEPS]] for seen, _ in on_gpu] == [[True, False, False]] * 3
    assert [seen[:STEPS] for seen, _ in on_gpu] == [seen[:STEPS] for seen, _ in on_cpu]


def test_no_step_copies_a_vector_to_the_host():
    config = config_of(LARS, "clip_norm=0.01", reducers=("torus2d",))
    _, cupy = on_gpus(config)
    tensors = 6
    assert max(cupy.copied_to_host) == 8 * tensors  # sums of squares


# ---------------------------------------------------------------------------------------- a whole run


@pytest.fixture
def cupy_of_one_process():
    cupy = FakeCuPy()
    cupy.nccl.speaks_as(mpi.world())
    with installed(cupy), kernels_for(cupy):
        yield cupy


def test_a_run_whose_rank_has_a_gpu_ends_with_the_weights_of_the_cpu(
    tmp_path, monkeypatch, cupy_of_one_process
):
    words = ("checkpoints={every_epochs: 1}", "clip_norm=0.5")
    ends = []
    for name, seen in (("cpu", 0), ("gpu", 1)):
        monkeypatch.setattr(gpus, "_seen_by_tensorflow", lambda seen=seen: seen)
        monkeypatch.setattr(gpus, "gpus_here", lambda seen=seen: seen)
        run = trainer(tmp_path / name, *words, phases=(phase(steps=4), phase(steps=3)))
        run.fit()
        ends.append([variable.numpy().tobytes() for variable in run.model.weights])
        is_on_gpu = run.topology.world.arrays is cupy_of_one_process
        assert is_on_gpu == bool(seen)
    assert ends[0] == ends[1]


def test_tables_are_refused_where_gradients_stay_on_gpus_but_not_with_mpi(
    tmp_path, monkeypatch, cupy_of_one_process
):
    monkeypatch.setattr(gpus, "_seen_by_tensorflow", lambda: 1)
    monkeypatch.setattr(gpus, "gpus_here", lambda: 1)
    assert trainer(tmp_path, "transport=mpi").topology.world.arrays is np
    with pytest.raises(ConfigurationError, match="^sparse_tables: expected false, or transport=mpi"):
        trainer(tmp_path, "sparse_tables=true")


# ---------------------------------------------------------------------------------------- whose GPU it is


@pytest.mark.parametrize(
    ("visible", "here", "number", "expected"),
    [
        *((None, 0, 3, None), (None, 1, 3, None), (None, 4, 3, "3"), (None, 4, 6, "2")),
        *(("2,5", 8, 0, "2"), ("2,5", 8, 1, "5"), ("GPU-1f,GPU-2a,GPU-3b", 3, 2, "GPU-3b")),
        *(("7", 8, 3, "7"), ("", 8, 3, "")),
    ],
)
def test_a_rank_sees_the_gpu_of_its_place_alone(monkeypatch, visible, here, number, expected):
    monkeypatch.setattr(gpus, "gpus_here", lambda: here)
    monkeypatch.setenv(gpus.VISIBLE, "")  # so that what is set here is undone
    monkeypatch.delenv(gpus.VISIBLE)
    if visible is not None:
        monkeypatch.setenv(gpus.VISIBLE, visible)
    gpus.see_own_gpu(LocalRank(number, 8))
    assert os.environ.get(gpus.VISIBLE) == expected
    gpus.see_own_gpu(LocalRank(number, 8))  # of a second run in the process
    assert os.environ.get(gpus.VISIBLE) == expected


@dataclasses.dataclass(frozen=True)
class Machine:
    """What ranks find: GPUs that TensorFlow sees on each, those of CuPy, device files."""

    seen: tuple[int, ...] = (1, 1)
    cupy: FakeCuPy | None = None
    files: int = 2


def outcome(monkeypatch, machine, transport="auto"):
    """Return whether each of two ranks is on a GPU, and what is said about it."""
    here = threading.local()

    def body(comm):
        here.rank = comm.rank
        if machine.cupy is not None:
            machine.cupy.nccl.speaks_as(comm)
        topology, why = gpus.with_gpus(Topology(comm, ranks_per_node=2), transport)
        return topology.world.arrays is not np, why

    monkeypatch.setattr(gpus, "_seen_by_tensorflow", lambda: machine.seen[here.rank])
    monkeypatch.setattr(gpus, "gpus_here", lambda: machine.files)
    with nullcontext() if machine.cupy is None else installed(machine.cupy):
        return simulated.run(body, world_size=2)


@pytest.mark.parametrize("machine", [Machine(cupy=FakeCuPy()), Machine(seen=(0, 0), files=0)])
def test_gpus_are_used_where_every_rank_has_one_and_nothing_is_said_where_there_is_none(monkeypatch, machine):
    assert outcome(monkeypatch, machine) == [(machine.cupy is not None, None)] * 2


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        (Machine(seen=(0, 0)), "TensorFlow sees no GPU on rank 0"),
        (Machine(seen=(1, 0), cupy=FakeCuPy()), "TensorFlow sees no GPU on rank 1"),
        (Machine(), "rank 0: CuPy cannot be imported"),
        (Machine(cupy=FakeCuPy(gpus=1)), "ranks 0 and 1 share GPU 0000:00:00.0"),
    ],
    ids=["no CUDA in TensorFlow", "one has none", "no CuPy", "shared"],
)
def test_why_a_gpu_is_left_out_is_said_alike_on_all_ranks(monkeypatch, machine, why):
    if machine.cupy is None:
        monkeypatch.setitem(sys.modules, "cupy", None)
    (first, said), (second, also_said) = outcome(monkeypatch, machine)
    assert (first, second) == (False, False)
    assert said == also_said
    assert said.startswith(f"gradients go through host memory: {why}")


@pytest.mark.parametrize("transport", ["nccl", "nccl+mpi"])
def test_a_transport_by_name_that_cannot_be_is_refused(monkeypatch, transport):
    with pytest.raises(ConfigurationError, match=f"transport: .*got {re.escape(transport)}: TensorFlow"):
        outcome(monkeypatch, Machine(seen=(0, 0)), transport)
