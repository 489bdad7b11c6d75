"""Buckets: contiguous parts of a gradient that are reduced on their own, and count as one step."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from commlib.agreement import differences, differing, digest
from commlib.errors import InvalidArgument, RanksDisagree
from commlib.reducers import make_reducer, part_of_wrapper
from commlib.reducers.arguments import added_residual
from commlib.reducers.base import Reducer
from commlib.reducers.mean import AnyMeanBuffer
from commlib.reducers.report import Forgotten, Outcome, Report, StageSeconds
from commlib.topology import Topology, Traffic
from commlib.trace import Recorder
from commlib.transport.base import Communicator
from commlib.vectors import VALUE_BYTES, Float32, Index, SparseVector, non_finite

NUMBER_OF_A_LAYER = re.compile(r"_\d+(?=/|:|$)")


def bucket_bounds(sizes: Sequence[int], most_bytes: int) -> list[int]:
    """Return the bounds, in entries, of the buckets of variables of ``sizes`` entries: one more than buckets.

    Backpropagation yields the gradients of the last variables first, so buckets are filled from the end. None
    has more than ``most_bytes`` of float32 values, but for a variable that alone has more.

    >>> bucket_bounds([10, 20, 30, 5], most_bytes=4 * 40)
    [0, 30, 65]
    """
    if most_bytes < 1:
        raise InvalidArgument(f"bucket_bytes: expected at least 1, got {most_bytes!r}")
    ends = np.cumsum([0, *sizes]).tolist()
    bounds = [ends[-1]]
    for low, variable_low in zip(ends[-2::-1], ends[-3::-1] + [0], strict=False):
        if low < bounds[0] and VALUE_BYTES * (bounds[0] - variable_low) > most_bytes:
            bounds.insert(0, low)
    return bounds if bounds[0] == 0 else [0, *bounds]


def check_variables(world: Communicator, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise ``RanksDisagree``, on all ranks, unless all have the same variables in the same order.

    The numbers that Keras appends to the names of a process' second layer of a kind are not compared.
    """
    plain = [NUMBER_OF_A_LAYER.sub("", name) for name in names]
    own = [f"{name} of shape {shape}" for name, shape in zip(plain, shapes, strict=True)]
    if not differing(world.allgather_ints([digest([repr(own).encode()])])[:, 0]):
        return
    everywhere = world.allgather_objects(own)
    most = max(map(len, everywhere))
    settings = [
        {f"number {place}": each[place] if place < len(each) else "none" for place in range(most)}
        for each in everywhere
    ]
    first = differences(settings).split("; ")[0]
    raise RanksDisagree(f"variables: expected the same on all ranks, in the same order: {first}")


def merged(reports: Sequence[Report]) -> Report:
    """Return the report of a step from those of its buckets."""
    seconds = StageSeconds()
    for each in reports:
        for stage in fields(seconds):
            setattr(seconds, stage.name, getattr(seconds, stage.name) + getattr(each.seconds, stage.name))
    finite = all(each.finite for each in reports)
    return Report(
        finite=finite,
        selected=sum(each.selected for each in reports),
        applied=sum(each.applied for each in reports),
        traffic=sum((each.traffic for each in reports), Traffic()),
        seconds=seconds,
        flags=int(np.bitwise_or.reduce([each.flags for each in reports])),
        forgotten=sum((each.forgotten for each in reports if finite), Forgotten()),
    )


def make_buckets(
    name: str,
    topology: Topology,
    bounds: Sequence[int],
    *,
    wrappers: Sequence[Mapping[str, Any]] = (),
    **options: Any,
) -> Reducer:
    """Return a reducer for gradients of ``bounds[-1]`` entries, which takes each bucket on its own.

    ``bounds``: see :func:`bucket_bounds`; with a single bucket it is the plain reducer. The rest is as for
    :func:`commlib.make_reducer`. Wrappers are put around each bucket's reducer: of a norm to which the whole
    gradient would be clipped, a bucket of ``d_b`` entries gets the part ``√(d_b/d)``.
    """
    reducers = [
        make_reducer(
            name,
            topology,
            high - low,
            wrappers=[part_of_wrapper(record, (high - low) / bounds[-1]) for record in wrappers],
            **options,
        )
        for low, high in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    return reducers[0] if len(reducers) == 1 else Buckets(reducers)


class Buckets(Reducer):
    """Reducers of the parts of one gradient, in the order of its entries; to its user they are one reducer.

    ``reducers``: of one topology, each of one bucket. A step is finite for all of them or for none.
    ``slices``: the entries of each bucket. ``reduce`` takes one bucket after the other, the last one first;
    :class:`commlib.engine.Engine` takes each when it is submitted.
    """

    def __init__(self, reducers: Sequence[Reducer]) -> None:
        if not reducers:
            raise InvalidArgument("reducers: expected at least one, got none")
        super().__init__(reducers[0].topology, sum(reducer.size for reducer in reducers))
        self.reducers = list(reducers)
        bounds = np.cumsum([0, *(reducer.size for reducer in reducers)]).tolist()
        self.slices = [slice(low, high) for low, high in zip(bounds[:-1], bounds[1:], strict=True)]

    @property
    def sparse(self) -> bool:  # type: ignore[override]  # of a class it is known without an object
        """Whether the buckets are sparse."""
        return self._selecting[0].sparse

    @property
    def density(self) -> float:
        """The density of the next step."""
        density: float = self._selecting[0].density  # type: ignore[attr-defined]  # sparse reducers have one
        return density

    def set_density(self, density: float) -> None:
        """See :meth:`commlib.Reducer.set_density`; buckets of which all is sent stay as they are."""
        for reducer in self._selecting:
            reducer.set_density(density)
        self._shared = None

    @property
    def _selecting(self) -> list[Reducer]:
        """The reducers but for those that send all, or these where there are no others."""
        return [each for each in self.reducers if not getattr(each, "sends_all", False)] or self.reducers

    @property
    def takes_entries(self) -> bool:
        """See :attr:`commlib.Reducer.takes_entries`: each reducer is given those of its bucket."""
        return True

    def _reduce(self, gradient: Float32 | SparseVector, buffer: AnyMeanBuffer) -> Outcome:
        if isinstance(gradient, SparseVector):
            return self._reduce_entries(gradient, buffer)
        mean = buffer.dense()
        for number, part in reversed(list(enumerate(self.slices))):
            self.propose_bucket(number, gradient[part], out=mean[part])
        report = self._merged()
        return Outcome(mean if report.finite else None, report.selected, report.applied, report.forgotten)

    def _reduce_entries(self, gradient: SparseVector, buffer: AnyMeanBuffer) -> Outcome:
        means: list[tuple[int, SparseVector]] = []
        for number, part in reversed(list(enumerate(self.slices))):
            means.insert(0, (part.start, self.propose_bucket(number, gradient.slice(part.start, part.stop))))
        report = self._merged()
        mean = buffer.scatter(means) if report.finite else None
        return Outcome(mean, report.selected, report.applied, report.forgotten)

    def _merged(self) -> Report:
        report = merged(self.reports)
        self._stopwatch.seconds, self._flags = report.seconds, report.flags
        return report

    def _together(self, gradient: Float32 | SparseVector, buffer: AnyMeanBuffer) -> Outcome:
        return self._reduce(gradient, buffer)  # each bucket compares its own settings

    def _alone(self, gradient: Float32 | SparseVector, buffer: AnyMeanBuffer) -> Outcome:
        return self._reduce(gradient, buffer)

    def propose_bucket(self, number: int, gradient: Any, out: Float32 | None = None) -> Any:
        """Return the proposed mean of one bucket; arguments as of :meth:`commlib.Reducer.propose`."""
        now, recorder, reducer = self.topology.world.now, self._stopwatch.recorder, self.reducers[number]
        start = 0.0 if recorder is None else now()
        mean, reducer.last = reducer.propose(gradient, out)
        if recorder is not None:
            recorder.add(f"bucket {number}", start, now())
        return mean

    def record(self, recorder: Recorder | None) -> None:
        """See :meth:`commlib.Reducer.record`; each bucket has a span, too."""
        super().record(recorder)
        for reducer in self.reducers:
            reducer.record(recorder)

    @property
    def reports(self) -> list[Report]:
        """What each bucket did in its latest step."""
        return [reducer.last for reducer in self.reducers if reducer.last is not None]

    def settle(self, means: Sequence[Float32 | SparseVector]) -> list[Float32 | SparseVector]:
        """End a step that was proposed to the ``reducers`` one by one: commit it, or discard it.

        Return ``means``. The step is discarded where one of them is not finite; then they are filled with
        NaN. All ranks know of every bucket whether it is finite on all of them: nothing is exchanged.
        """
        self.steps += 1
        self.last = merged(self.reports)
        if self.last.finite:
            self.commit()
            return list(means)
        self.discard()
        return [self._voided(mean) for mean in means]

    def _voided(self, mean: Float32 | SparseVector) -> Float32 | SparseVector:
        if isinstance(mean, SparseVector):
            return non_finite(mean.size, self.arrays)
        mean.fill(np.nan)
        return mean

    def commit(self) -> None:
        """See :meth:`commlib.Reducer.commit`."""
        for reducer in self.reducers:
            reducer.commit()

    def discard(self) -> None:
        """See :meth:`commlib.Reducer.discard`."""
        for reducer, report in zip(self.reducers, self.reports, strict=True):
            if report.finite:  # the others have discarded theirs
                reducer.discard()

    def sent_indices(self, mean: Float32) -> Index:
        """See :meth:`commlib.Reducer.sent_indices`."""
        pairs = zip(self.reducers, self.slices, strict=True)
        return np.concatenate([reducer.sent_indices(mean[part]) + part.start for reducer, part in pairs])

    @property
    def residual(self) -> Float32:
        """See :attr:`commlib.Reducer.residual`."""
        residual: Float32 = self.arrays.concatenate([reducer.residual for reducer in self.reducers])
        return residual

    def add_residual(self, residual: Float32) -> None:
        """See :meth:`commlib.Reducer.add_residual`."""
        whole = added_residual(None, residual, self.size, self.arrays)
        for reducer, part in zip(self.reducers, self.slices, strict=True):
            reducer.add_residual(whole[part])

    def settings(self) -> dict[str, Any]:
        """Return what must be equal on all ranks, by name; of each bucket in ``buckets``."""
        return super().settings() | {"buckets": [reducer.settings() for reducer in self.reducers]}

    def mark_synchronized(self) -> None:
        """See :meth:`commlib.Reducer.mark_synchronized`; the settings of all buckets are among these."""
        super().mark_synchronized()
        for reducer in self.reducers:
            reducer.mark_synchronized()

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`commlib.Reducer.state_dict`; ``buckets`` are the states of each."""
        return super().state_dict() | {"buckets": [reducer.state_dict() for reducer in self.reducers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`commlib.Reducer.load_state_dict`."""
        super().load_state_dict(state)
        for reducer, each in zip(self.reducers, state["buckets"], strict=True):
            reducer.load_state_dict(each)

    def close(self) -> None:
        """See :meth:`commlib.Reducer.close`."""
        for reducer in self.reducers:
            reducer.close()
