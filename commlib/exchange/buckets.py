"""Buckets: contiguous parts of a gradient, each with a reducer; together they are one step."""

import re
from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from commlib.agreement import differences, differing, digest
from commlib.errors import InvalidArgument, RanksDisagree
from commlib.reducers.report import Forgotten, Report, StageSeconds
from commlib.topology import Traffic
from commlib.transport.base import Communicator
from commlib.vectors import VALUE_BYTES

NUMBER_OF_A_LAYER = re.compile(r"_\d+(?=/|:|$)")


def bucket_bounds(sizes: Sequence[int], most_bytes: int) -> list[int]:
    """Return the bounds, in entries, of the buckets of variables of ``sizes`` entries.

    Backpropagation yields the gradients of the last variables first, so buckets are filled from the end. A
    bucket has at most ``most_bytes`` of float32 values, unless a single variable has more.

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
