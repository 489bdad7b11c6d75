"""``cloudtrain bench selection``: every selector against torch.topk, np.partition and a bare read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from commlib import SELECTORS
from commlib.arrays import compiled
from commlib.density import check_density, entries
from commlib.errors import InvalidArgument
from commlib.selection import make_selector
from commlib.tuning.probe import SEED
from commlib.vectors import Float32
from training.bench.record import WARM_UP_RUNS, Record, Seconds, WrongResult, alternate, report, rotations
from training.commands.printing import Table, milliseconds, times
from training.process.job import usage_error

SIZES, QUICK_SIZES = (1_000_000, 25_000_000), (1_000_000, 4_000_000)
DENSITIES = (0.001, 0.01)
RUNS, QUICK_RUNS = 11, 5
# The distributions that the entries are drawn from, always by the same seed.
LAWS: dict[str, Callable[[np.random.Generator, int], npt.NDArray[np.float64]]] = {
    "gaussian": lambda generator, size: generator.standard_normal(size),
    "student-t, 2 degrees": lambda generator, size: generator.standard_t(2, size),
}
# The state that the first calls leave a selector in, and in which it is timed.
STATES = {"reused": {"state": "reused threshold"}}

Candidate = Callable[[Float32], Any]


def bench(as_json: bool, *, sizes: Sequence[int], densities: Sequence[float], quick: bool) -> int:
    """Print the records of all cases and return the exit status."""
    if min(sizes, default=1) < 1:
        usage_error(f"--size: expected at least 1, got {min(sizes)}")
    try:
        for density in densities:
            check_density(density)
    except InvalidArgument as error:
        usage_error(str(error))
    cases = measure(sizes or (QUICK_SIZES if quick else SIZES), densities or DENSITIES, quick)
    return report(cases, as_json=as_json, show=lambda records: case_table(records).print())


def measure(sizes: Sequence[int], densities: Sequence[float], quick: bool) -> Iterator[list[Record]]:
    """Yield the records of one case after the other: size, input, density."""
    for size in sizes:
        for law in LAWS:
            vector = LAWS[law](np.random.default_rng(SEED), size).astype(np.float32)
            inputs = rotations(vector)
            for density in densities:
                k = entries(density, size)
                case = {"size": size, "density": density, "k": k, "input": law, "inputs": len(inputs)}
                yield _measure_case(case | {"quick": quick}, inputs)


def _measure_case(case: dict[str, Any], inputs: Sequence[Float32]) -> list[Record]:
    k = case["k"]
    subjects = {name: _checked(name, k, inputs[0]) for name in SELECTORS}
    peers = {name: find(k) for name, find in PEERS.items()}
    found = {name: peer for name, peer in peers.items() if not isinstance(peer, str)}
    seconds = alternate(subjects | found, inputs, QUICK_RUNS if case["quick"] else RUNS)
    cases = {subject: case | STATES.get(subject, {}) for subject in subjects}
    return records_of(cases, peers, seconds)


def records_of(
    cases: Mapping[str, dict[str, Any]], peers: Mapping[str, object], seconds: Mapping[str, Seconds]
) -> list[Record]:
    """Return a record of each subject in ``cases`` against each peer; a text says why a peer is missing."""
    missing = {name: peer for name, peer in peers.items() if isinstance(peer, str)}
    return [
        Record("selection", case, subject, seconds[subject], peer, seconds.get(peer), missing.get(peer))
        for subject, case in cases.items()
        for peer in peers
    ]


def _checked(name: str, k: int, vector: Float32) -> Candidate:
    """Return a selector whose third result, in the state that is timed, was right."""
    selector = make_selector(name)
    for _ in range(WARM_UP_RUNS):
        selector.select(vector, k)
    selected = selector.select(vector, k)
    check_selection(name, k, vector, selected.indices_or_range, selected.values)
    return lambda given: selector.select(given, k)


# ---- Checks ----


class Promise(NamedTuple):
    """The promise of a selector that is not exact: it selects ``least·k`` to ``most·k`` entries.

    Of every ``bucket`` entries, or of all, no entry that is left out is larger than one that is selected.
    """

    least: float
    most: float
    bucket: int | None = None


INEXACT = {"gaussian": Promise(0.75, 2), "reused": Promise(0.5, 2), "bucketed": Promise(1, 1, bucket=512)}


def check_selection(name: str, k: int, vector: Any, indices: Any, values: Any, arrays: Any = np) -> None:
    """Raise :class:`WrongResult` where the entries break the promise of the selector ``name``.

    ``arrays``: the module of the arrays, NumPy or CuPy.
    """
    least, most, bucket = INEXACT.get(name, Promise(1, 1))
    if not least * k <= len(indices) <= most * k:
        raise WrongResult(f"{name}: expected {least * k:g} to {most * k:g} entries, got {len(indices)}")
    if bool((indices[1:] <= indices[:-1]).any()):
        raise WrongResult(f"{name}: expected ascending indices, got others")
    if not bool((vector[indices].astype(np.float32) == values).all()):
        raise WrongResult(f"{name}: expected values of the vector at their indices, got others")
    bucket = bucket or len(vector)
    left_out, selected = arrays.abs(vector), arrays.full(len(vector), np.inf, np.float32)
    left_out[indices], selected[indices] = 0, arrays.abs(values)
    beyond = (0, -len(vector) % bucket)
    largest = arrays.pad(left_out, beyond).reshape(-1, bucket).max(axis=1)
    smallest = arrays.pad(selected, beyond, constant_values=np.inf).reshape(-1, bucket).min(axis=1)
    if wrong := int((largest > smallest).sum()):
        got = f"got smaller ones in {wrong} of {len(largest)}"
        raise WrongResult(f"{name}: expected the largest of every {bucket} entries, {got}")


# ---- Peers ----


def _torch_topk(k: int) -> Candidate | str:
    """Return ``torch.topk`` of the magnitudes on one thread, or why there is none."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    torch.set_num_threads(1)

    def select(vector: Float32) -> Any:
        tensor = torch.from_numpy(vector)
        indices = torch.topk(tensor.abs(), k, sorted=False).indices
        return indices, tensor[indices]

    return select


def partition_and_compare(vector: Float32, k: int) -> tuple[npt.NDArray[np.int64], Float32]:
    """Return indices and values of the entries that reach the ``k``-th largest magnitude, in plain NumPy."""
    magnitudes = np.abs(vector)
    threshold = np.partition(magnitudes, len(vector) - k)[len(vector) - k]
    indices = np.flatnonzero(magnitudes >= threshold)
    return indices, vector[indices]


@compiled
def largest_magnitude(bits: npt.NDArray[np.uint32]) -> np.uint32:
    """Return the largest magnitude, as bits: one pass over the vector, a lower bound of every selector."""
    largest = np.uint32(0)
    for i in range(len(bits)):  # by index: LLVM makes vector instructions of this, and none of an iterator
        largest = max(largest, bits[i] & np.uint32(0x7FFF_FFFF))
    return largest


PEERS: dict[str, Callable[[int], Candidate | str]] = {
    "torch.topk": _torch_topk,
    "np.partition": lambda k: partial(partition_and_compare, k=k),
    "read": lambda k: lambda vector: largest_magnitude(vector.view(np.uint32)),
}


def case_table(records: Sequence[Record]) -> Table:
    """Return a table: a line a selector, a column a peer."""
    case = records[0].case
    kind = case.get("input", case.get("entry"))
    title = f"{case['size']:,} entries, {kind}, density {case['density']:.3%}, k = {case['k']:,}"
    rows = []
    for subject in dict.fromkeys(record.subject for record in records):
        own = [record for record in records if record.subject == subject]
        seconds = own[0].seconds
        found = map(milliseconds, (seconds.median, seconds.min, seconds.max))
        rows.append([subject, *found, *(times(record.ratio) for record in own)])
    peers = {record.peer: record for record in records}
    header = ["selector", "ms", "min ms", "max ms", *(f"× {name}" for name in peers)]
    notes = []
    for name, record in peers.items():
        note = str(record.missing)
        if record.peer_seconds is not None:
            median, runs = milliseconds(record.peer_seconds.median), record.peer_seconds.runs
            note = f"how many times as fast as its {median} ms, the median of {runs}"
        notes.append(f"× {name}: {note}")
    return Table(title + ("  (quick)" if case["quick"] else ""), header, rows, notes)
