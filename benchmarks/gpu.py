"""The selectors' kernels on a GPU, against their alternatives: python -m benchmarks.gpu [--json].

Times are those of CUDA events around a call. Before each call the device is kept busy, so that the host runs
ahead of it and launching costs nothing. Inputs alternate, and together are twice as large as the device's L2
cache, so that it holds nothing of the next one. JAX has streams of its own: it is timed by the host's clock,
until its result is there.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from typer import Option

from commlib.density import entries
from commlib.gpu import DEVICE_SELECTORS, GpuUnavailable
from commlib.gpu.cupy_engine import current_engine
from commlib.vectors import VALUE_BYTES, Float32
from training.bench.record import MOST_INPUTS, Record, WrongResult, alternate, elapsed, report, version_of
from training.bench.selection import case_table, check_selection, records_of
from training.process.job import FAILURE, log_error, usage_error

SIZES = tuple(1 << power for power in (18, 20, 22, 24, 25, 27, 29))  # 256 K … 512 M
DENSITY = 0.001
RUNS = 31
SECONDS_EACH = 2.0  # of one candidate in one case: a slower one has fewer runs
AHEAD = 1 << 28  # float32 that the device reads before each call, in which time the host launches it
DRIVER = Path("/sys/module/nvidia/version")
RECALL = 0.95
SUBJECTS = [name for name in DEVICE_SELECTORS if name != "mstopk"]  # which is "exact"
SWEEP = "exact, summed"
SEED = 1
PASSES = 30  # of the paper's search

Array = Any
BenchCandidate = Callable[[Array], Any]


def paper_search(vector: Float32, k: int, *, arrays: Any = np) -> tuple[float, float, int, int]:
    """Return the paper's two thresholds and their counts (HiTopKComm, algorithm 1, lines 1–24).

    ``(upper, lower, above_upper, above_lower)``: ``above_upper <= k`` entries reach the upper threshold, or
    the search found none and ``upper`` is 0 with ``above_upper`` 0. The reference for the kernels; it
    bisects between the mean and the largest magnitude, so the lower threshold stays 0 (and
    counts everything) where the k-th value lies below the mean. ``arrays``: NumPy, or the
    vector's own module.
    """
    magnitudes = arrays.abs(vector)
    mean, largest = float(magnitudes.mean(dtype=arrays.float32)), float(magnitudes.max())
    low, high = 0.0, 1.0
    upper, lower = 0.0, 0.0
    above_upper, above_lower = 0, len(vector)
    for _ in range(PASSES):
        ratio = low + (high - low) / 2
        threshold = mean + ratio * (largest - mean)
        count = int(arrays.count_nonzero(magnitudes >= threshold))
        if count <= k:
            high = ratio
            if count > above_upper:
                above_upper, upper = count, threshold
        else:
            low = ratio
            if count < above_lower:
                above_lower, lower = count, threshold
    return upper, lower, above_upper, above_lower


@dataclass(frozen=True)
class Device:
    """CuPy, and the facts that the numbers depend on."""

    cupy: Any
    facts: Mapping[str, Any]
    cache_bytes: int

    @classmethod
    def current(cls) -> "Device":
        """Return CuPy's current device; raises ``GpuUnavailable`` where there is none to use."""
        current_engine()
        import cupy

        runtime = cupy.cuda.runtime
        properties = runtime.getDeviceProperties(cupy.cuda.Device().id)
        facts = {
            "name": properties["name"].decode(),
            "compute_capability": f"{properties['major']}.{properties['minor']}",
            "multiprocessors": properties["multiProcessorCount"],
            "memory_gib": round(properties["totalGlobalMem"] / (1 << 30), 1),
            "l2_mib": round(properties["l2CacheSize"] / (1 << 20), 1),
            "driver": DRIVER.read_text().strip() if DRIVER.exists() else None,
            "driver_cuda": runtime.driverGetVersion(),
            "runtime": runtime.runtimeGetVersion(),
            "cupy": cupy.__version__,
            **{name: version_of(name) for name in ("torch", "jax")},
        }
        return cls(cupy, facts, properties["l2CacheSize"])

    @cached_property
    def _ahead(self) -> Array:
        return self.cupy.zeros(AHEAD, self.cupy.float32)

    def seconds(self, candidate: "Peer", given: Array) -> float:
        """Return the seconds of one call on the device, or by the host's clock."""
        if candidate.by_host:
            return elapsed(candidate.select, given)
        start, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        self._ahead.max()
        start.record()
        result = candidate.select(given)
        end.record()
        end.synchronize()
        del result
        return float(self.cupy.cuda.get_elapsed_time(start, end)) / 1e3

    def inputs(self, size: int) -> list[Array]:
        """Return normal vectors, two or more, together twice as large as the cache."""
        count = min(MOST_INPUTS, max(2, -(-2 * self.cache_bytes // (size * VALUE_BYTES))))
        generator = self.cupy.random.default_rng(SEED)
        return [generator.standard_normal(size, dtype=self.cupy.float32) for _ in range(count)]


@dataclass(frozen=True)
class Peer:
    """A candidate to compare with; ``by_host``: timed by the host's clock, until its result is there."""

    select: BenchCandidate
    by_host: bool = False


MakePeer = Callable[[int, int, Any], Peer]  # of k, the size, and CuPy; fails where there is none


def measure(device: Device, wrong: list[WrongResult]) -> Iterator[list[Record]]:
    """Yield the records of one size after the other, without selectors whose results are ``wrong``."""
    for size in SIZES:
        inputs = device.inputs(size)
        case = {"size": size, "density": DENSITY, "k": entries(DENSITY, size), "entry": "float32"}
        case |= {"device": "gpu", "inputs": len(inputs), "quick": False}
        yield _measure_case(case, inputs, device, wrong)
        del inputs
        device.cupy.get_default_memory_pool().free_all_blocks()


def _measure_case(
    case: dict[str, Any], inputs: Sequence[Array], device: Device, wrong: list[WrongResult]
) -> list[Record]:
    subjects = {}
    for name in SUBJECTS:
        try:
            subjects[name] = Peer(_checked(name, case, inputs[0], device.cupy))
        except WrongResult as error:
            wrong.append(error)
    selector = DEVICE_SELECTORS["exact"](case["size"], case["k"])
    residual, out = device.cupy.zeros((2, case["size"]), device.cupy.float32)
    subjects[SWEEP] = Peer(lambda gradient: selector.select_sum(gradient, residual, out))
    peers = {name: _tried(make, case, inputs[0], device.cupy) for name, make in PEERS.items()}
    found = {name: peer for name, peer in peers.items() if not isinstance(peer, str)}
    seconds = alternate(subjects | found, inputs, RUNS, device.seconds, limit_seconds=SECONDS_EACH)
    # The bytes that must move, at the rate of a copy: a selector reads the vector once; the sweep reads
    # gradient and residual and writes their sum.
    read_seconds = seconds["copy"].median / 2
    facts = {"gpu": dict(device.facts)}
    floors = dict.fromkeys(subjects, read_seconds) | {SWEEP: 3 * read_seconds}
    return [
        replace(each, bench="gpu_selection", more=facts | {"floor_seconds": floors[each.subject]})
        for each in records_of(dict.fromkeys(subjects, case), peers, seconds)
    ]


def _tried(make: MakePeer, case: dict[str, Any], vector: Array, cupy: Any) -> Peer | str:
    """Return a peer that has been called once, or why there is none."""
    try:
        peer = make(case["k"], case["size"], cupy)
        peer.select(vector)
        cupy.cuda.Device().synchronize()
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:  # noqa: BLE001 - of any kind: the others are measured all the same
        return f"it failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return peer


def _checked(name: str, case: dict[str, Any], vector: Array, cupy: Any) -> BenchCandidate:
    """Return a selector whose second result was right."""
    selector = DEVICE_SELECTORS[name](case["size"], case["k"])
    selector.select(vector)
    selection = selector.select(vector)
    found = selection.nnz()
    indices, values = selection.indices[:found], selection.values[:found]
    check_selection(name, case["k"], vector, indices, values, cupy)
    return selector.select


def _copy(k: int, size: int, cupy: Any) -> Peer:
    into: list[Array] = []

    def copy(vector: Array) -> None:
        if not into:  # in the first of the runs that do not count
            into.append(cupy.empty_like(vector))
        cupy.copyto(into[0], vector)

    return Peer(copy)


def _torch_topk(k: int, size: int, cupy: Any) -> Peer:
    import torch

    return Peer(lambda vector: torch.topk(torch.from_dlpack(vector).abs(), k))


def _approx_max_k(k: int, size: int, cupy: Any) -> Peer:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or it takes most of the memory
    import jax

    if jax.default_backend() not in ("gpu", "cuda"):
        raise RuntimeError("jax finds no GPU")
    select = jax.jit(lambda vector: jax.lax.approx_max_k(abs(vector), k, recall_target=RECALL))
    return Peer(lambda vector: jax.block_until_ready(select(jax.dlpack.from_dlpack(vector))), by_host=True)


def paper_select(vector: Array, k: int, arrays: Any) -> Array:
    """Return the indices that MSTopK selects (HiTopKComm, algorithm 1), with CuPy or NumPy as ``arrays``.

    Thirty passes count what reaches a threshold, each read by the host; then come all entries that reach the
    upper one, and the first of those between the two.
    """
    upper, lower, above_upper, _ = paper_search(vector, k, arrays=arrays)
    magnitudes = arrays.abs(vector)
    certain = arrays.flatnonzero(magnitudes >= upper) if above_upper else arrays.flatnonzero(magnitudes < 0)
    between = magnitudes >= lower
    if above_upper:
        between &= magnitudes < upper
    return arrays.concatenate([certain, arrays.flatnonzero(between)[: k - certain.size]])


PEERS: dict[str, MakePeer] = {
    "copy": _copy,
    "torch.topk": _torch_topk,
    "cupy.argpartition": lambda k, size, cupy: Peer(
        lambda vector: cupy.argpartition(cupy.abs(vector), size - k)[size - k :]
    ),
    "jax.lax.approx_max_k": _approx_max_k,
    "mstopk, 30 passes": lambda k, size, cupy: Peer(lambda vector: paper_select(vector, k, cupy)),
}


def main(as_json: Annotated[bool, Option("--json")] = False) -> None:
    """Time selectors on a GPU; see the module's docstring."""
    try:
        device = Device.current()
    except GpuUnavailable as error:
        usage_error(str(error))
    wrong: list[WrongResult] = []
    report(measure(device, wrong), as_json=as_json, show=lambda records: case_table(records).print())
    for error in wrong:
        log_error(str(error))
    raise typer.Exit(FAILURE if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
