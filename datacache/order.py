"""The order of the samples: a pure function of seed, epoch, step and rank, so that runs can be repeated.

``Order`` and ``Permutation`` store no list of samples: each batch is computed on request, so a run resumes at
any step without the steps before it. All of it is integer arithmetic, without NumPy's random generators, so
it is equal on every machine and under every version of NumPy.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])
Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

ROUNDS = 8
SMALLEST_BITS = 8  # halves of four bits: with fewer, some permutations of a few samples would never occur
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio
_ORDER, _PLACEMENT, _ORDER_WITHIN, _EXCHANGE = range(1, 5)  # so that keys of different uses differ


def compiled(function: Function) -> Function:
    """Compile a kernel that runs without the GIL, cached on disk where a cache folder can be written.

    Division by zero is not checked: a check would prevent the vectorization of loops.
    """
    try:
        kernel: Any = njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # neither the package nor a cache folder of the user can be written
        kernel = njit(nogil=True, error_model="numpy")(function)
    return kernel


# --------------------------------------------------------------------------------------- keys


@compiled
def mixed(value: np.uint64) -> np.uint64:
    """Return 64 bits that each depend on every bit of ``value``: the finalizer of SplitMix64."""
    bits = np.uint64(value)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@compiled
def folded(key: np.uint64, part: np.uint64) -> np.uint64:
    """Return a key made of a key and one more integer."""
    return mixed(np.uint64(key) ^ mixed(np.uint64(part) + GOLDEN))


@lru_cache(maxsize=128)  # one serves all batches of an epoch
def key_of(*parts: int) -> np.uint64:
    """Return one key for several integers, in this order; only their low 64 bits count.

    >>> len({int(key_of(1, 2)), int(key_of(1, 2)), int(key_of(2, 1))})
    2
    """
    key = np.uint64(0)
    for part in parts:
        key = np.uint64(folded(key, np.uint64(part % 2**64)))
    return key


@compiled
def _hash(numbers: Ids, key: np.uint64, out: npt.NDArray[np.uint64]) -> None:
    for i in range(len(numbers)):
        out[i] = folded(key, np.uint64(numbers[i]))


def hashed(numbers: Ids, *key: int) -> npt.NDArray[np.uint64]:
    """Return 64 bits for each number, uniform and independent for all numbers and keys.

    >>> hashed(np.array([1, 2, 1]), 7) % 10
    array([7, 1, 7], dtype=uint64)
    """
    out = np.empty(len(numbers), np.uint64)
    _hash(numbers.astype(np.int64, copy=False), key_of(*key), out)
    return out


# -------------------------------------------------------------------------------- permutations


@compiled
def permuted(position: int, size: int, key: np.uint64) -> int:
    """Return the element at ``position`` of the permutation of ``range(size)`` with this key.

    A Feistel network permutes the smallest power of two that is at least ``size`` and 256; values outside the
    range are permuted again until inside (cycle walking), under two passes on average if ``size`` > 128.
    """
    bits = SMALLEST_BITS
    while (1 << bits) < size:
        bits += 1
    low_bits = np.uint64(bits // 2)
    low_mask = (np.uint64(1) << low_bits) - np.uint64(1)
    high_mask = (np.uint64(1) << (np.uint64(bits) - low_bits)) - np.uint64(1)
    value = np.uint64(position)
    while True:
        low, high = value & low_mask, value >> low_bits
        round_key = np.uint64(key)
        for _ in range(ROUNDS // 2):
            low ^= mixed(round_key ^ high) & low_mask
            round_key += GOLDEN
            high ^= mixed(round_key ^ low) & high_mask
            round_key += GOLDEN
        value = (high << low_bits) | low
        if value < np.uint64(size):
            return np.int64(value)  # type: ignore[return-value, unused-ignore]  # an int once it leaves the kernel


@compiled
def _permute(positions: Ids, size: int, key: np.uint64, out: Ids) -> None:
    for i in range(len(positions)):
        out[i] = permuted(positions[i], size, key)


@compiled
def _permute_in_shards(positions: Ids, shards: Ids, sizes: Ids, key: np.uint64, out: Ids) -> None:
    for i in range(len(positions)):
        out[i] = permuted(positions[i] % sizes[i], sizes[i], folded(key, np.uint64(shards[i])))


class Permutation:
    """A permutation of ``range(size)``, keyed by integers, in O(1) memory.

    >>> permutation = Permutation(5, 7)
    >>> [permutation[position] for position in range(5)]
    [0, 2, 3, 4, 1]
    >>> permutation.at(np.array([4, 0]))
    array([1, 0])
    """

    def __init__(self, size: int, *key: int) -> None:
        check_at_least(0, size=size)
        self._size = size
        self._key = key_of(*key)

    def __getitem__(self, position: int) -> int:
        return int(self.at(np.array([position]))[0])

    def at(self, positions: Ids) -> Ids:
        """Return the elements at these positions, int64, as a new array."""
        if len(positions) and not 0 <= positions.min() <= positions.max() < self._size:
            found = f"{positions.min()} to {positions.max()}"
            raise IndexError(f"positions: expected 0 to {self._size - 1}, got {found}")
        out = np.empty(len(positions), np.int64)
        _permute(positions.astype(np.int64, copy=False), self._size, self._key, out)
        return out


# -------------------------------------------------------------------------------------- orders


class BatchOrder(ABC):
    """Which samples each rank reads at each step of an epoch: pure functions, equal on every machine.

    ``samples``: how many there are. ``seed``: of what is random in the order and in its batches.
    ``global_batch``: what a step takes over all ranks, in the order's own ``unit``.
    """

    samples: int
    seed: int
    global_batch: int
    unit: ClassVar[str] = "samples"

    @abstractmethod
    def steps(self) -> int:
        """Return how many global batches an epoch has: the same in every epoch."""

    @abstractmethod
    def batch(self, epoch: int, step: int, rank: int, world_size: int) -> Ids:
        """Return the ids that a rank reads at a step, as a new array."""

    def counts(self, epoch: int, step: int, rank: int, world_size: int) -> Flags:
        """Return for each sample of a rank's batch whether it counts; others repeat one, to pad."""
        return np.ones(len(self.batch(epoch, step, rank, world_size)), np.bool_)

    def part(self, ranks: Iterable[int], world_size: int) -> Ids:
        """Return the ids that the node of these ranks stores, ascending: all."""
        return np.arange(self.samples)


@dataclass(frozen=True)
class Order(BatchOrder):
    """Which samples each rank reads at each training step.

    The samples are divided into ``shards`` of nearly equal size. Each global batch takes equally many
    samples of every shard, in the order of the shard's permutation of the epoch: slot ``j`` of a batch
    belongs to shard ``j·shards // global_batch``. Of ``P`` ranks, rank ``r`` reads the ``r``-th part of the
    slots. So global batches are the same at every world size, and a node reads in all epochs only the shards
    of its ranks' slots. With one shard, batches are drawn from all samples; with one shard a node, each node
    stores its own part.

    ``placement``: which samples a shard has: ``"manifest"``, consecutive ids, which are cheap to read where
    neighbours are in one file; or ``"hash"``, scattered ids, so that a shard has all classes where the
    manifest is sorted by them. Neither depends on ``seed``: a node's cache serves runs of any seed.

    ``exchange``: the size of the exchanged subset, as a share of each shard. Its samples, a new choice in
    each epoch, swap shards (partial local shuffling, Nguyen et al. 2022), so that in the long run every rank
    sees all samples. They are remote samples for the epoch: see :meth:`DataCache.exchange`.

    >>> order = Order(samples=10, shards=2, global_batch=4, seed=1)
    >>> [order.batch(0, step, rank=1, world_size=2) for step in range(order.steps())]
    [array([5, 8]), array([6, 7])]
    """

    samples: int
    shards: int
    global_batch: int
    seed: int
    placement: Literal["manifest", "hash"] = "manifest"
    exchange: float = 0.0
    remainder: Literal["drop", "pad"] = "drop"

    def __post_init__(self) -> None:
        check_at_least(1, shards=self.shards)
        if self.samples < self.shards:
            expected = f"at least as many as shards = {self.shards}"
            raise ValueError(f"samples: expected {expected}, got {self.samples}")
        if self.global_batch < 1 or self.global_batch % self.shards:
            expected = f"a multiple of shards = {self.shards}"
            raise ValueError(f"global_batch: expected {expected}, got {self.global_batch}")
        if self.placement not in ("manifest", "hash"):
            raise ValueError(f"placement: expected 'manifest' or 'hash', got {self.placement!r}")
        if self.remainder not in ("drop", "pad"):
            raise ValueError(f"remainder: expected 'drop' or 'pad', got {self.remainder!r}")
        if not 0 <= self.exchange <= 1:
            raise ValueError(f"exchange: expected a share from 0 to 1, got {self.exchange}")
        if self.exchange and self.shards == 1:
            raise ValueError(f"exchange: expected 0 where there is one shard, got {self.exchange}")

    def steps(self) -> int:
        if self.remainder == "drop":
            return self.samples // self.global_batch
        return -(-self.samples // self.global_batch)

    def batch(self, epoch: int, step: int, rank: int, world_size: int) -> Ids:
        shards, offsets = self._samples(epoch, *self._slots(step, rank, world_size))
        return self._ids(self._starts(shards) + offsets)

    def holders(self, epoch: int, step: int, rank: int, world_size: int) -> Ids:
        """Return for each sample of a rank's batch a rank whose node stores it, evenly over those ranks."""
        shards, offsets = self._samples(epoch, *self._slots(step, rank, world_size))
        per_shard, per_rank = self.global_batch // self.shards, self.global_batch // world_size
        first, last = shards * per_shard // per_rank, ((shards + 1) * per_shard - 1) // per_rank
        return first + offsets % (last - first + 1)

    def counts(self, epoch: int, step: int, rank: int, world_size: int) -> Flags:
        shards, positions = self._slots(step, rank, world_size)
        return positions < self._starts(shards + 1) - self._starts(shards)

    def part(self, ranks: Iterable[int], world_size: int) -> Ids:
        shards = {int(shard) for rank in ranks for shard in np.unique(self._slots(0, rank, world_size)[0])}
        parts = [np.arange(*self._starts(np.array([shard, shard + 1]))) for shard in sorted(shards)]
        return np.sort(self._ids(np.concatenate([np.empty(0, np.int64), *parts])))

    def _slots(self, step: int, rank: int, world_size: int) -> tuple[Ids, Ids]:
        """Return the shard of each slot of a rank, and the slot's position in the order of that shard."""
        check_at_least(0, step=step)
        check_rank(rank, world_size)
        if self.global_batch % world_size:
            expected = f"a divisor of global_batch = {self.global_batch}"
            raise ValueError(f"world_size: expected {expected}, got {world_size}")
        local_batch = self.global_batch // world_size
        slots = np.arange(rank * local_batch, (rank + 1) * local_batch, dtype=np.int64)
        shards, slots_of_shard = np.divmod(slots, self.global_batch // self.shards)
        return shards, step * (self.global_batch // self.shards) + slots_of_shard

    def _samples(self, epoch: int, shards: Ids, positions: Ids) -> tuple[Ids, Ids]:
        """Return the sample at each position of a shard's order: its own shard, and its offset in that."""
        order = key_of(_ORDER, self.seed, epoch)
        drawn = self._permuted(shards, positions, order)
        exchanged = int(self.exchange * (self.samples // self.shards))
        if exchanged == 0:
            return shards, drawn
        # The first offsets of each shard are exchanged; a second permutation chooses which samples these are.
        is_exchanged = drawn < exchanged
        positions = (shards * exchanged + drawn)[is_exchanged]
        to = Permutation(exchanged * self.shards, _EXCHANGE, self.seed, epoch).at(positions)
        shards = shards.copy()
        shards[is_exchanged], drawn[is_exchanged] = np.divmod(to, exchanged)
        return shards, self._permuted(shards, drawn, key_of(_ORDER_WITHIN, self.seed, epoch))

    def _permuted(self, shards: Ids, positions: Ids, key: np.uint64) -> Ids:
        """Return the elements of each shard's permutation at positions, which wrap around at its end."""
        out = np.empty_like(positions)
        _permute_in_shards(positions, shards, self._starts(shards + 1) - self._starts(shards), key, out)
        return out

    def _starts(self, shards: Ids) -> Ids:
        return shards * self.samples // self.shards

    def _ids(self, positions: Ids) -> Ids:
        if self.placement == "manifest":
            return positions
        return Permutation(self.samples, _PLACEMENT).at(positions)


@dataclass(frozen=True)
class EvaluationOrder(BatchOrder):
    """Each sample once over all ranks and steps, in a fixed order: each rank has a range of ids.

    ``batch_size``: samples of one rank at a step; repetitions from the rank's own part pad its last batch.
    All ranks have equally many steps, and all epochs are equal.

    >>> order = EvaluationOrder(samples=5, batch_size=2, world_size=2)
    >>> order.steps(), order.batch(0, 1, rank=1, world_size=2), order.counts(0, 1, rank=1, world_size=2)
    (2, array([4, 4]), array([ True, False]))
    """

    samples: int
    batch_size: int
    world_size: int
    seed: int = 0

    @property
    def global_batch(self) -> int:  # type: ignore[override]  # as a property it cannot be set
        """Samples of all ranks at a step."""
        return self.batch_size * self.world_size

    def steps(self) -> int:
        return -(-self.samples // self.global_batch)

    def batch(self, epoch: int, step: int, rank: int, world_size: int) -> Ids:
        start, stop = self._range(rank, world_size)
        return np.minimum(self._positions(start, step), max(start, stop - 1))

    def counts(self, epoch: int, step: int, rank: int, world_size: int) -> Flags:
        start, stop = self._range(rank, world_size)
        return self._positions(start, step) < stop

    def part(self, ranks: Iterable[int], world_size: int) -> Ids:
        bounds = [self._range(rank, world_size) for rank in ranks]
        # A rank without samples (there are more ranks than samples) pads its batch with another rank's.
        parts = [np.arange(start, min(max(stop, start + 1), self.samples)) for start, stop in bounds]
        return np.unique(np.concatenate([np.empty(0, np.int64), *parts]))

    def _positions(self, start: int, step: int) -> Ids:
        check_step(step, self.steps())
        return np.arange(step * self.batch_size, (step + 1) * self.batch_size, dtype=np.int64) + start

    def _range(self, rank: int, world_size: int) -> tuple[int, int]:
        """Return the first id that a rank evaluates, and the one after its last."""
        check_rank(rank, world_size)
        if world_size != self.world_size:
            raise ValueError(f"world_size: expected {self.world_size}, got {world_size}")
        return self.samples * rank // world_size, self.samples * (rank + 1) // world_size


def check_at_least(least: int, **values: int) -> None:
    """Raise ``ValueError`` that names an argument below ``least``."""
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")


def check_step(step: int, steps: int) -> None:
    """Raise ``ValueError`` unless an epoch of so many steps has this one."""
    if not 0 <= step < steps:
        raise ValueError(f"step: expected 0 to {steps - 1}, got {step}")


def check_rank(rank: int, world_size: int) -> None:
    """Raise ``ValueError`` unless there is such a rank."""
    check_at_least(1, world_size=world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank: expected 0 to {world_size - 1}, got {rank}")
