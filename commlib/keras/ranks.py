"""What ranks exchange besides gradients: where they are, the values of variables, and metrics."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from commlib.agreement import differences, digest
from commlib.errors import RanksDisagree
from commlib.topology import Topology
from commlib.transport.base import Closing, Communicator
from commlib.transport.watchdog import Watchdog


class Ranks(Closing):
    """All ranks of ``world``, by a communicator of its own, apart from the gradients'.

    All ranks make it together. Ranks that come to different exchanges raise ``RanksDisagree``. ``seconds``
    bounds how long a rank waits for the others; ``None``: without bound. ``close`` frees the communicator.
    """

    def __init__(self, world: Communicator, seconds: float | None) -> None:
        self._comm = world.split(0)
        self.rank, self.size = world.rank, world.size
        self._watchdog = Watchdog() if seconds is None else self._comm.watchdog(seconds)

    def waiting(self, place: str) -> AbstractContextManager[None]:
        """Return a context that waits for the other ranks no longer than it may."""
        return self._watchdog.waiting(place)

    def close(self) -> None:
        """Free the communicator; all ranks call it together."""
        self._comm.close()

    def gather(self, place: str, value: Any) -> list[Any]:
        """Return every rank's picklable ``value``; ``RanksDisagree`` where they are not all at ``place``."""
        with self.waiting(place):
            rows = self._comm.allgather_objects((place, value))
        if any(row[0] != place for row in rows):
            apart = differences([{"the next exchange": row[0]} for row in rows])
            raise RanksDisagree(
                f"the ranks are not at the same point of training: {apart}; "
                "expected equal numbers of steps and epochs, and callbacks that stop all ranks or none"
            )
        return [row[1] for row in rows]

    def broadcast(self, variables: Sequence[Any]) -> None:
        """Give the variables the values of rank 0."""
        place = "a broadcast of variables"
        shapes = [tuple(variable.shape) for variable in variables]  # names differ in a process' second model
        everywhere = self.gather(place, shapes)
        if any(others != shapes for others in everywhere):
            first = differences([{"number": len(each), **_numbered(each)} for each in everywhere])
            raise RanksDisagree(f"variables: expected equal shapes on all ranks: {first.split('; ')[0]}")
        for variable in variables:
            value = self.gather(place, variable.numpy() if self.rank == 0 else None)[0]
            if self.rank > 0:
                variable.assign(value)

    def differing(self, variables: Sequence[Any]) -> dict[int, list[int]]:
        """Return by the numbers of the variables that differ which ranks do not have the values of rank 0."""
        own = [_digest_of(variable.numpy()) for variable in variables]
        digests = np.array(self.gather(f"a comparison of {len(own)} variables", own), np.int64)
        unlike = digests != digests[0]
        found = np.flatnonzero(unlike.any(axis=0))
        return {int(number): np.flatnonzero(unlike[:, number]).tolist() for number in found}

    def expect_equal(self, variables: Sequence[Any]) -> None:
        """Raise ``RanksDisagree`` on all ranks where a variable is not the same on all of them."""
        differing = self.differing(variables)
        if differing:
            number, ranks = next(iter(differing.items()))
            raise RanksDisagree(
                f"variables: {len(differing)} of {len(variables)} are not those of rank 0, first "
                f"{path_of(variables[number])} on ranks {ranks}: begin with the callback BroadcastVariables, "
                "or with broadcast_variables, of commlib.keras"
            )

    def average(self, place: str, arrays: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[np.float64]]:
        """Return the means over ranks, added up in the order of the ranks in float64."""
        everywhere = self.gather(place, list(arrays))
        return [
            np.sum([np.asarray(each, np.float64) for each in parts], axis=0) / self.size
            for parts in zip(*everywhere, strict=True)
        ]


def broadcast_variables(variables: Sequence[Any], topology: Topology) -> None:
    """Give variables of TensorFlow or Keras the values of rank 0; all ranks call it together.

    Of a model these are ``model.weights``: ``model.variables`` holds the states of random generators as well,
    with which every rank would draw the same dropout.
    """
    with Ranks(topology.world, None) as ranks:
        ranks.broadcast(variables)


def average_metrics(
    metrics: Mapping[str, float], topology: Topology, *, samples: float | None = None
) -> dict[str, float]:
    """Return the means over ranks of numbers by name, weighted by ``samples``; all ranks call it together.

    ``samples``: those of this rank, above 0; ``None``: every rank has the same weight. A number that only
    some ranks have is averaged over these.
    """
    weights = dict.fromkeys(metrics, 1.0 if samples is None else samples)
    return weighted_means(topology.world.allgather_objects((dict(metrics), weights)))


def weighted_means(everywhere: list[tuple[Mapping[str, float], Mapping[str, float]]]) -> dict[str, float]:
    """Return the means by name of every rank's metrics and weights."""
    means = {}
    for name in dict.fromkeys(name for metrics, _ in everywhere for name in metrics):
        values = [metrics[name] for metrics, _ in everywhere if name in metrics]
        weights = [own[name] for metrics, own in everywhere if name in metrics]
        means[name] = float(np.average(values, weights=weights if min(weights) > 0 else None))
    return means


def path_of(variable: Any) -> str:
    """Return the path of a Keras variable, or the name of a TensorFlow variable."""
    return str(getattr(variable, "path", variable.name))


def _numbered(shapes: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    return {f"the shape of variable {number}": shape for number, shape in enumerate(shapes)}


def _digest_of(value: npt.NDArray[Any]) -> int:
    flat = np.ascontiguousarray(value).reshape(-1)
    return digest([flat.view(np.uint8).tobytes()])
