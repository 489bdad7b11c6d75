"""Measuring seconds: candidates alternate, on inputs that no cache holds."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TypeVar

import numpy as np

from commlib.vectors import Float32

Input = TypeVar("Input")
Candidate = TypeVar("Candidate")

WARM_UP_RUNS, FEWEST_RUNS = 2, 3
SHORTEST_SECONDS = 1e-6
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
USUAL_CACHE_BYTES = 32 << 20  # where the machine does not report it
MOST_INPUTS = 256


@dataclass(frozen=True)
class Seconds:
    """The seconds of several runs."""

    median: float
    min: float
    max: float
    runs: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Seconds":
        """Return the summary of one sample or more.

        >>> Seconds.of([3.0, 1.0, 2.0])
        Seconds(median=2.0, min=1.0, max=3.0, runs=3)
        """
        return cls(statistics.median(samples), min(samples), max(samples), len(samples))

    def per(self, count: int) -> "Seconds":
        """Return the seconds of one of ``count`` parts of a run."""
        return Seconds(self.median / count, self.min / count, self.max / count, self.runs)


def elapsed(
    candidate: Callable[[Input], object], given: Input, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds of one call."""
    start = clock()
    result = candidate(given)
    seconds = clock() - start
    del result  # only now: freeing memory is not part of the work
    return seconds


def alternate(
    candidates: Mapping[str, Candidate],
    inputs: Sequence[Input],
    runs: int,
    measure: Callable[[Candidate, Input], float] = elapsed,  # type: ignore[assignment]
    *,
    limit_seconds: float = math.inf,
) -> dict[str, Seconds]:
    """Return the seconds of each candidate; in every run each is called once, in the order given.

    So other load of the machine affects all of them. Each call gets the next of ``inputs``, round and round.
    The first runs are not counted. A candidate that would take more than ``limit_seconds`` has fewer runs.
    """
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    left = dict.fromkeys(candidates, WARM_UP_RUNS + runs)
    rotated = cycle(inputs)
    for _ in range(WARM_UP_RUNS + runs):
        for name in [name for name in candidates if left[name]]:
            samples[name].append(measure(candidates[name], next(rotated)))
            left[name] -= 1
            if len(samples[name]) == WARM_UP_RUNS:
                affordable = limit_seconds / max(samples[name][-1], SHORTEST_SECONDS)
                left[name] = int(min(left[name], max(FEWEST_RUNS, affordable)))
    return {name: Seconds.of(own[WARM_UP_RUNS:]) for name, own in samples.items()}


def rotations(vector: Float32) -> list[Float32]:
    """Return ``vector`` and rotated copies of it: two or more, together twice as large as the caches."""
    count = min(MOST_INPUTS, max(2, -(-2 * cache_bytes() // vector.nbytes)))
    return [np.roll(vector, number * len(vector) // count) for number in range(count)]


def cache_bytes() -> int:
    """Return the size of the processor's largest cache."""
    sizes = [path.read_text().strip() for path in CACHES.glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes), default=USUAL_CACHE_BYTES)
