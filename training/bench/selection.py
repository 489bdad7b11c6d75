"""``cloudtrain bench selection``: every selector against torch.topk, np.partition and a bare read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from commlib import SELECTORS
from commlib.compiled import compiled
from commlib.density import check_density, entries
from commlib.errors import InvalidArgument
from commlib.selection import make_selector
from commlib.tuning.gradients import SEED
from commlib.vectors import Float32
from training.bench.checks import Order, check_selection, ranking
from training.bench.record import Record
from training.bench.reporting import report_cases
from training.bench.timing import WARM_UP_RUNS, Seconds, alternate, rotations
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
# The state of a selector while it is timed, which its first calls, before the check, have brought about.
STATES = {"reused": {"state": "reused threshold"}}

BenchCandidate = Callable[[Float32], Any]


@dataclass(frozen=True)
class Options:
    """Sizes in entries and densities to measure; empty ones stand for the defaults."""

    sizes: Sequence[int] = ()
    densities: Sequence[float] = ()
    quick: bool = False

    def __post_init__(self) -> None:
        for size in self.sizes:
            if size < 1:
                raise InvalidArgument(f"--size: expected at least 1, got {size}")
        for density in self.densities:
            check_density(density)


def bench(as_json: bool, **options: Any) -> int:
    """Print the records of all cases and return the exit status."""
    try:
        asked = Options(**options)
    except InvalidArgument as error:
        usage_error(str(error))
    return report_cases(measure(asked), as_json=as_json, show=lambda records: case_table(records).print())


def measure(options: Options) -> Iterator[list[Record]]:
    """Yield the records of one case after the other: size, input, density."""
    densities = options.densities or DENSITIES
    for size in options.sizes or (QUICK_SIZES if options.quick else SIZES):
        for law in LAWS:
            vector = LAWS[law](np.random.default_rng(SEED), size).astype(np.float32)
            inputs = rotations(vector)
            order = ranking(inputs[0], max(entries(density, size) for density in densities))
            for density in densities:
                k = entries(density, size)
                case = {"size": size, "density": density, "k": k, "input": law, "inputs": len(inputs)}
                yield _measure_case(case | {"quick": options.quick}, inputs, order[:k])


def _measure_case(case: dict[str, Any], inputs: Sequence[Float32], largest: Order) -> list[Record]:
    k = len(largest)
    subjects: dict[str, BenchCandidate] = {name: _checked(name, inputs[0], largest) for name in SELECTORS}
    peers = {name: find(k) for name, find in PEERS.items()}
    found = {name: peer for name, peer in peers.items() if not isinstance(peer, str)}
    seconds = alternate(subjects | found, inputs, QUICK_RUNS if case["quick"] else RUNS)
    cases = {subject: case | STATES.get(subject, {}) for subject in subjects}
    return records_of(cases, peers, seconds)


def records_of(
    cases: Mapping[str, dict[str, Any]],
    peers: Mapping[str, object],
    seconds: Mapping[str, Seconds],
    more: Callable[[str], dict[str, Any]] = lambda subject: {},
) -> list[Record]:
    """Return the records of all subjects, which are the keys of ``cases``, against all peers.

    A peer that is missing is a text that gives the reason. ``more(subject)``: further keys of its records.
    """
    return [
        Record(
            bench="selection",
            case=case,
            subject=subject,
            seconds=seconds[subject],
            peer=name,
            peer_seconds=seconds.get(name),
            missing=peer if isinstance(peer, str) else None,
            more=more(subject),
        )
        for subject, case in cases.items()
        for name, peer in peers.items()
    ]


def _checked(name: str, vector: Float32, largest: Order) -> BenchCandidate:
    """Return a selector whose third result, in the state that is timed, was right."""
    selector = make_selector(name)
    for _ in range(WARM_UP_RUNS):
        selector.select(vector, len(largest))
    check_selection(name, vector, largest, selector.select(vector, len(largest)))
    return lambda given: selector.select(given, len(largest))


def _torch_topk(k: int) -> BenchCandidate | str:
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


def _np_partition(k: int) -> BenchCandidate:
    return partial(partition_and_compare, k=k)


def partition_and_compare(vector: Float32, k: int) -> tuple[npt.NDArray[np.int64], Float32]:
    """Return indices and values of the entries that reach the ``k``-th largest magnitude, in plain NumPy."""
    magnitudes = np.abs(vector)
    threshold = np.partition(magnitudes, len(vector) - k)[len(vector) - k]
    indices = np.flatnonzero(magnitudes >= threshold)
    return indices, vector[indices]


def _read(k: int) -> BenchCandidate:
    return lambda vector: largest_magnitude(vector.view(np.uint32))


@compiled
def largest_magnitude(bits: npt.NDArray[np.uint32]) -> np.uint32:
    """Return the largest magnitude, as bits: one pass over the vector, a lower bound of every selector."""
    largest = np.uint32(0)
    for i in range(len(bits)):  # by index: LLVM makes vector instructions of this, and none of an iterator
        largest = max(largest, bits[i] & np.uint32(0x7FFF_FFFF))
    return largest


PEERS: dict[str, Callable[[int], BenchCandidate | str]] = {
    "torch.topk": _torch_topk,
    "np.partition": _np_partition,
    "read": _read,
}


def case_table(records: Sequence[Record]) -> Table:
    """Return a table: a line a selector, a column a peer; on a GPU also the least time of its bytes."""
    case, has_floors = records[0].case, "floor_seconds" in records[0].more
    entries = case["entry"] if has_floors else case["input"]
    title = f"{case['size']:,} entries, {entries}, density {case['density']:.3%}, k = {case['k']:,}"
    rows = []
    for subject in dict.fromkeys(record.subject for record in records):
        own = [record for record in records if record.subject == subject]
        seconds = own[0].seconds
        row = [subject, *map(milliseconds, (seconds.median, seconds.min, seconds.max))]
        if has_floors:
            floor = own[0].more["floor_seconds"]
            row += [milliseconds(floor), f"{seconds.median / floor:.2f}"]
        rows.append([*row, *(times(record.ratio) for record in own)])
    peers = {record.peer: record for record in records}
    floors = ["floor ms", "ms/floor"] if has_floors else []
    header = ["selector", "ms", "min ms", "max ms", *floors, *(f"× {name}" for name in peers)]
    notes = ["floor: the bytes that must move, at the rate of the copy"] if has_floors else []
    notes += map(note_of, peers.values())
    return Table(title + ("  (quick)" if case["quick"] else ""), header, rows, notes)


def note_of(record: Record) -> str:
    """Return the note on a record's peer."""
    if record.peer_seconds is None:
        return f"× {record.peer}: {record.missing}"
    median, runs = milliseconds(record.peer_seconds.median), record.peer_seconds.runs
    return f"× {record.peer}: how many times as fast as its {median} ms, the median of {runs}"
