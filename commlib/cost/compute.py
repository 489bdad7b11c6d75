"""Seconds that a rank computes in one step of each reducer, from the speeds of the machine's kernels.

A step is taken as its passes over dense vectors, the entries that it selects from and selects, and how often
each sparse entry is handled: cut, encoded, decoded, added up, put into place.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields

from commlib.cost.step import Step, union
from commlib.errors import InvalidArgument


@dataclass(frozen=True)
class Speeds:
    """Seconds for one entry on every rank of a machine, until the last one has done it.

    ``add``: of the sum of two dense vectors; ``fill``: of a vector of zeros. ``select``: of the vector that
    is accumulated and selected from; ``keep``: of those selected, beside that. ``place``: of a sparse vector
    that goes into a dense one. ``entry``: of a sparse vector that is added to others; ``code``: of one that
    is encoded and decoded, by ``wire``.
    """

    add: float
    fill: float
    select: float
    keep: float
    place: float
    entry: float
    code: dict[str, float]

    def __post_init__(self) -> None:
        if not self.code:
            raise InvalidArgument("code: expected the seconds of one wire or more, got none")
        for name, seconds in (asdict(self) | self.code).items():
            if name != "code" and not 0 <= seconds < float("inf"):
                raise InvalidArgument(f"{name}: expected seconds from 0, got {seconds!r}")


@dataclass(frozen=True)
class Work:
    """What one rank computes: entries of each kind, as in :class:`Speeds`; ``coded`` in the step's codec."""

    add: float = 0.0
    fill: float = 0.0
    select: float = 0.0
    keep: float = 0.0
    place: float = 0.0
    entry: float = 0.0
    coded: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def seconds(self, speeds: Speeds, wire: str) -> float:
        """Return how long that takes."""
        if self.coded and wire not in speeds.code:
            measured = ", ".join(speeds.code)
            raise InvalidArgument(f"wire: expected one whose speed is known ({measured}), got {wire!r}")
        return (
            self.add * speeds.add
            + self.fill * speeds.fill
            + self.select * speeds.select
            + self.keep * speeds.keep
            + self.place * speeds.place
            + self.entry * speeds.entry
            + self.coded * speeds.code.get(wire, 0.0)
        )


def dense(step: Step) -> Work:
    """Add up ``P − 1`` parts of ``P``; divide the last one and look whether it is finite."""
    size = step.world.size
    return Work(add=step.size * (size + 1) / size)


def torus2d(step: Step) -> Work:
    """Add up the node's shards, then what ``dense`` does on the stream."""
    nodes = step.world.nodes
    return Work(add=_scatter(step).add + step.shard * (nodes + 1) / nodes)


def allgather(step: Step) -> Work:
    """Select; add up the ``k`` entries of every rank."""
    ranks, k = step.world.size, step.k
    gathered = Work(entry=ranks * k, coded=ranks * k)
    return _selecting(step.size, k) + gathered + _rounded_away(step, k) + _sum_to_mean(step)


def gtopk(step: Step) -> Work:
    """Select; merge two selections on each level of the tree, and hand the result down."""
    levels, k = (step.world.size - 1).bit_length(), step.k
    merges = Work(entry=2 * k * levels, coded=k * levels)
    return _selecting(step.size, k) + merges + _rounded_away(step, k) + _to_mean(step, k)


def ssar_doubling(step: Step) -> Work:
    """Select; add up what ``2ᵗ`` ranks hold, in every round ``t``."""
    rounds = range((step.world.size - 1).bit_length())
    merged = sum(2 * union(1 << each, step.k, step.size) for each in rounds)
    doubling = Work(entry=merged, coded=merged / 2) + _rounded_away(step, merged / 2)
    return _selecting(step.size, step.k) + doubling + _sum_to_mean(step)


def ssar_split(step: Step) -> Work:
    """Select; add up ``k/P`` entries of every rank; put the sums of all ranges together."""
    whole = union(step.world.size, step.k, step.size)
    split = Work(entry=step.k, coded=step.k + whole)
    return _selecting(step.size, step.k) + split + _rounded_away(step, step.k) + _sum_to_mean(step)


def dsar_split(step: Step) -> Work:
    """Select; add up ``k/P`` entries of every rank; the ranges travel dense, and are divided."""
    split = Work(entry=step.k, coded=step.k, add=2 * step.size)
    return _selecting(step.size, step.k) + split + _rounded_away(step, step.k)


def oktopk(step: Step) -> Work:
    """Select; split, reduce, gather the ``k`` entries of the result, and keep what is not in it."""
    return _selecting(step.size, step.k) + _oktopk(step, step.k) + _to_mean(step, step.k)


def _oktopk(step: Step, k: float) -> Work:
    """Add up a region, find what is applied and what is not; with a lossy codec, also what of it was sent."""
    work = Work(entry=3 * k, coded=k)
    return work if step.codec.lossless else work + Work(entry=3 * k, coded=k, place=3 * k)


def _rounded_away(step: Step, k: float) -> Work:
    """Decode what was encoded, and put it and its entries into the residual, where the codec is lossy."""
    return Work() if step.codec.lossless else Work(coded=k, place=2 * k)


def hitopk(step: Step) -> Work:
    """Add up the node's shards and select; add up the entries of every node; gather the shards."""
    k = step.shard * step.density
    gathered = Work(entry=step.world.nodes * k, coded=step.world.nodes * k)
    applied = union(step.world.nodes, k, step.shard) * step.streams
    selecting = _selecting(step.shard, k) + _rounded_away(step, k)
    return _scatter(step) + selecting + gathered + _to_mean(step, applied)


def hioktopk(step: Step) -> Work:
    """Add up the node's shards and select; Ok-Topk among the nodes; gather the shards."""
    k = step.shard * step.density
    return _scatter(step) + _selecting(step.shard, k) + _oktopk(step, k) + _to_mean(step, k * step.streams)


def _scatter(step: Step) -> Work:
    """Add up the shards of the node's other ranks."""
    return Work(add=step.shard * (step.streams - 1))


def _selecting(size: float, k: float) -> Work:
    """Accumulate and select; take what was selected out of the residual."""
    return Work(select=size, keep=k, place=k)


def _sum_to_mean(step: Step) -> Work:
    return _to_mean(step, union(step.world.size, step.k, step.size))


def _to_mean(step: Step, applied: float) -> Work:
    """Fill a dense vector with zeros and put the entries of the result into it."""
    return Work(fill=step.size, place=applied)


WORK: dict[str, Callable[[Step], Work]] = {
    "dense": dense,
    "torus2d": torus2d,
    "allgather": allgather,
    "gtopk": gtopk,
    "ssar_doubling": ssar_doubling,
    "ssar_split": ssar_split,
    "dsar_split": dsar_split,
    "oktopk": oktopk,
    "hitopk": hitopk,
    "hioktopk": hioktopk,
}
