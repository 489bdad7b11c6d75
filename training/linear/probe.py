"""``reducer: auto``: the fastest of the reducers that send everything, on gradients of the run itself.

How long a sum of sparse gradients takes depends on how many entries they share, which no profile knows
beforehand (SparCML, section 5.3).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from commlib import REDUCERS, SparseVector, Topology
from training.linear.settings import make_lossless

WIRES = ("fp32", "gap")  # those of the codecs that lose nothing
WARM_UP = 1  # steps


@dataclass(frozen=True)
class Choice:
    """A reducer, and the seconds of its steps and of those of ``dense``, on the slowest rank."""

    name: str
    options: dict[str, str]
    seconds: float
    dense_seconds: float

    def __str__(self) -> str:
        wire = f" with {self.options['wire']}" if self.options else ""
        times = f"{self.seconds * 1e3:.3g} ms a step, dense {self.dense_seconds * 1e3:.3g} ms"
        return f"reducer: {self.name}{wire}, {times}"


def candidates() -> list[tuple[str, dict[str, str]]]:
    """Return the names of all reducers and their options: the sparse ones with each codec."""
    return [
        (name, options)
        for name, reducer in REDUCERS.items()
        for options in ([{"wire": wire} for wire in WIRES] if reducer.sparse else [{}])
    ]


def choose(topology: Topology, gradients: Sequence[SparseVector]) -> Choice:
    """Return the reducer that is the fastest with these gradients, equal on all ranks; collective."""
    seconds = {
        number: _seconds(topology, name, options, gradients)
        for number, (name, options) in enumerate(candidates())
    }
    best = min(seconds, key=lambda number: seconds[number])
    name, options = candidates()[best]
    dense = next(number for number, (each, _) in enumerate(candidates()) if each == "dense")
    return Choice(name, options, seconds[best], seconds[dense])


def _seconds(
    topology: Topology, name: str, options: dict[str, str], gradients: Sequence[SparseVector]
) -> float:
    """Return the median of the steps, each that of the slowest rank."""
    world, own = topology.world, list[float]()
    with make_lossless(name, topology, gradients[0].size, options) as reducer:
        for gradient in gradients:
            world.barrier()
            start = world.now()
            reducer.reduce(gradient)
            own.append(world.now() - start)
    everyone: list[list[float]] = world.allgather_objects(own)
    slowest: list[float] = [max(step) for step in zip(*everyone, strict=True)]
    return median(slowest[WARM_UP:])
