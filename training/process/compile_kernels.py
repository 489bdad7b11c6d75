"""Compile the CPU's kernels ahead of time; print a line in a run where that was not done.

Numba compiles a kernel at its first call, and caches it next to its source or in the user's cache. That
takes half a minute for all of them, in which a run would print nothing: ``scripts/install.sh`` runs
``python -m training.process.compile_kernels``.
"""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numba.core import event

from commlib import CODECS, REDUCERS, SELECTORS, Communicator, Topology, make_reducer, select, transport
from commlib.reducers import reducer_options
from commlib.transport.polling import Sleeper
from commlib.wire import VALUE_CODECS, make_codec
from datacache import Arrays, Augmentation, CacheDirs, CentreCrop, DataCache, Order
from datacache.augmentation import DTYPES
from datacache.order import Permutation, hashed
from pto import sum_of_squares
from training.process.job import log_error

PACKAGES = ("commlib.", "datacache.", "pto.", "training.")
SIZE = 5000  # of a gradient: as with longer ones, less than δ is selected of it
WIRES = ("fp32", "gap+fp16")


def compile_kernels() -> None:
    """Call every kernel of commlib, datacache and pto with the types that runs call it with."""
    for ranks in (1, 4):
        transport.simulated.run(_reduce, ranks, ranks_per_node=min(2, ranks))
    gradient = _gradient(0)
    selected = [select(name, gradient, SIZE // 100) for name in SELECTORS][0]
    for index in CODECS.keys() - VALUE_CODECS.keys():
        for value in VALUE_CODECS:
            codec = make_codec(f"{index}+{value}")
            codec.decode(codec.encode(selected), SIZE)
    with tempfile.TemporaryDirectory(prefix="cloudtrain-") as folder:
        for channels in (1, 3):
            _read(channels, CacheDirs(Path(folder, f"disk{channels}"), Path(folder, f"memory{channels}")))
    from mpi4py import MPI  # which initialises it

    Sleeper(MPI).sleep_until(lambda: True, MPI.Request())
    Permutation(9, 1)[0]
    hashed(np.arange(3), 1)
    for dtype in (np.float32, np.float64, ml_dtypes.bfloat16):
        tensor = np.ones(100, dtype)
        sum_of_squares(tensor)
        tensor.flags.writeable = False
        sum_of_squares(tensor)


def _gradient(rank: int) -> Any:
    return np.random.default_rng(rank).standard_normal(SIZE, np.float32)


def _reduce(comm: Communicator) -> None:
    topology = Topology(comm)
    for name, kind in REDUCERS.items():
        density: dict[str, Any] = {"density": 0.01, "decay": 0.9} if kind.sparse else {}
        wires: list[dict[str, str]] = [{"wire": wire} for wire in WIRES]
        for options in wires if "wire" in reducer_options(name) else [{}]:
            reducer = make_reducer(name, topology, SIZE, **(density | options))
            for is_own in (True, False):  # TensorFlow's arrays are read-only: another type for Numba
                gradient = _gradient(comm.rank)
                gradient.flags.writeable = is_own
                reducer.reduce(gradient)


def _read(channels: int, dirs: CacheDirs) -> None:
    images = np.zeros((8, 6, 6, channels), np.uint8)
    order = Order(samples=len(images), shards=1, global_batch=4, seed=1)
    cached = DataCache(Arrays(images, np.arange(len(images))), dirs=dirs)
    for dtype in DTYPES:
        for crop in (Augmentation(4, dtype=dtype), CentreCrop(4, dtype=dtype)):
            for _ in range(2):  # from the source, then from a cache level
                list(cached.batches(order, crop, rank=0, world_size=2, epoch=0))
    cached.close()


class _Announcement(event.Listener):
    """Reports once that kernels of this project are being compiled."""

    reported = False

    def on_start(self, event: Any) -> None:
        """Report, before a function that is not cached is compiled."""
        own = event.data["dispatcher"].py_func.__module__.startswith(PACKAGES)
        if own and not self.reported:
            self.reported = True
            log_error("compiling CPU kernels (about 30 s; cached for later runs)")

    def on_end(self, event: Any) -> None:
        """Do nothing after it was compiled."""


@cache  # one per process
def announce_compiling() -> None:
    """From now on, print one line when the first kernel has to be compiled in this process."""
    event.register("numba:compile", _Announcement())  # type: ignore[no-untyped-call]  # Numba has no types


if __name__ == "__main__":
    compile_kernels()
