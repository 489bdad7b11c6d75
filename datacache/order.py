"""Which sample is read when: pure functions of seed, epoch and place, so that a run can be repeated.

``Order`` and ``Permutation`` hold no list of samples: an order is computed where it is asked for, so that a
run resumes at any step without going through those before it. All of it is integer arithmetic of our own,
hence equal on every machine and under every version of NumPy.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from datacache.compiled import compiled

Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Placement = Literal["manifest", "hash"]
Remainder = Literal["drop", "pad"]

ROUNDS = 8
SMALLEST_BITS = 8  # halves of four bits: with fewer, some permutations of a few samples would never come up
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio
_ORDER, _PLACEMENT, _TURN, _EXCHANGE = range(1, 5)  # so that keys of different uses differ

# --------------------------------------------------------------------------------------- keys


@compiled
def mixed(value: np.uint64) -> np.uint64:
    """Return 64 bits each of which depends on every bit of ``value``: the finisher of SplitMix64."""
    bits = np.uint64(value)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@compiled
def folded(key: np.uint64, part: np.uint64) -> np.uint64:
    """Return another key for every ``part``."""
    return mixed(np.uint64(key) ^ mixed(np.uint64(part) + GOLDEN))


def key_of(*parts: int) -> np.uint64:
    """Return one key for several integers, in this order; of each, the low 64 bits count.

    >>> len({int(key_of(1, 2)), int(key_of(1, 2)), int(key_of(2, 1))})
    2
    """
    key = np.uint64(0)
    for part in parts:
        key = np.uint64(folded(key, np.uint64(part % 2**64)))
    return key


# -------------------------------------------------------------------------------- permutations


@compiled
def permuted(position: int, size: int, key: np.uint64) -> int:
    """Return what the permutation of ``range(size)`` with this key has at ``position``.

    A Feistel network permutes the smallest power of two that holds ``size``. What lands outside goes through
    it again until it is inside: less than two passes in the mean.
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
            return np.int64(value)  # type: ignore[return-value]  # an int once it leaves the kernel


@compiled
def _permute(positions: Ids, size: int, key: np.uint64, out: Ids) -> None:
    for i in range(len(positions)):
        out[i] = permuted(positions[i], size, key)


@compiled
def _permute_in_shards(positions: Ids, shards: Ids, sizes: Ids, key: np.uint64, out: Ids) -> None:
    for i in range(len(positions)):
        out[i] = permuted(positions[i] % sizes[i], sizes[i], folded(key, np.uint64(shards[i])))


class Permutation:
    """A permutation of ``range(size)`` chosen by integers, in O(1) memory.

    >>> permutation = Permutation(5, 7)
    >>> [permutation[position] for position in range(5)]
    [0, 2, 3, 4, 1]
    >>> permutation.at(np.array([4, 0]))
    array([1, 0])
    """

    def __init__(self, size: int, *key: int) -> None:
        _check_at_least("size", size, 0)
        self._size = size
        self._key = key_of(*key)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, position: int) -> int:
        return int(self.at(np.array([position]))[0])

    def at(self, positions: Ids) -> Ids:
        """Return what is at these positions, int64, as a new array."""
        if len(positions) and not 0 <= positions.min() <= positions.max() < self._size:
            found = f"{positions.min()} to {positions.max()}"
            raise IndexError(f"positions: expected 0 to {self._size - 1}, got {found}")
        out = np.empty(len(positions), np.int64)
        _permute(positions.astype(np.int64, copy=False), self._size, self._key, out)
        return out


# ------------------------------------------------------------------------------------ training


@dataclass(frozen=True)
class Order:
    """Which samples each rank reads at each training step.

    The samples are divided into ``shards`` of nearly equal size. Each global batch takes equally many of
    every shard, in the order of the shard's own permutation of the epoch: slot ``j`` of a batch belongs to
    shard ``j·shards // global_batch``. Of ``P`` ranks, the ``r``-th fills the ``r``-th part of the slots. So
    global batches are the same at every world size, and a node reads in all epochs only the shards that its
    ranks' slots belong to. With one shard, batches are drawn from all samples; with as many as there are
    nodes, each node holds its own part.

    ``placement`` says which samples a shard holds: with ``"manifest"`` consecutive ids, which are cheap to
    read where neighbours are in one file; with ``"hash"`` scattered ones, so that classes mix where the
    manifest is sorted by them. Neither depends on ``seed``: a node's cache serves runs of any seed.

    ``exchange``: the share of every shard's samples, others in each epoch, that change places with those of
    other shards (partial local shuffling, Nguyen et al. 2022), so that in the long run every rank sees all.
    Nodes lend them to each other for the epoch: see :meth:`DataCache.exchange`.

    >>> order = Order(samples=10, shards=2, global_batch=4, seed=1)
    >>> [order.batch(0, step, rank=1, world_size=2) for step in range(order.steps("drop"))]
    [array([5, 8]), array([6, 7])]
    """

    samples: int
    shards: int
    global_batch: int
    seed: int
    placement: Placement = "manifest"
    exchange: float = 0.0

    def __post_init__(self) -> None:
        _check_at_least("shards", self.shards, 1)
        if self.samples < self.shards:
            expected = f"at least as many as shards = {self.shards}"
            raise ValueError(f"samples: expected {expected}, got {self.samples}")
        if self.global_batch < 1 or self.global_batch % self.shards:
            expected = f"a multiple of shards = {self.shards}"
            raise ValueError(f"global_batch: expected {expected}, got {self.global_batch}")
        if self.placement not in ("manifest", "hash"):
            raise ValueError(f"placement: expected 'manifest' or 'hash', got {self.placement!r}")
        if not 0 <= self.exchange <= 1:
            raise ValueError(f"exchange: expected a share from 0 to 1, got {self.exchange}")
        if self.exchange and self.shards == 1:
            raise ValueError(f"exchange: expected 0 where there is one shard, got {self.exchange}")

    def steps(self, remainder: Remainder) -> int:
        """Return how many global batches an epoch has.

        ``"drop"``: those that are full; the samples left over differ from epoch to epoch. ``"pad"``: until
        every sample was read; the order of a shard that ends before begins again.
        """
        per_step = self.global_batch // self.shards
        if remainder == "drop":
            return self.samples // self.shards // per_step
        if remainder == "pad":
            return _rounded_up(_rounded_up(self.samples, self.shards), per_step)
        raise ValueError(f"remainder: expected 'drop' or 'pad', got {remainder!r}")

    def batch(self, epoch: int, step: int, rank: int, world_size: int) -> Ids:
        """Return the ids a rank reads at a step, ``global_batch / world_size`` of them, as a new array."""
        shards, places = self._drawn(epoch, *self._places(step, rank, world_size))
        return self._placed(self._starts(shards) + places)

    def homes(self, epoch: int, step: int, rank: int, world_size: int) -> Ids:
        """Return for each sample of a rank's batch a rank whose node holds it in all epochs.

        The samples of a shard are asked in turn of all ranks that read it.
        """
        shards, places = self._drawn(epoch, *self._places(step, rank, world_size))
        per_shard, per_rank = self.global_batch // self.shards, self.global_batch // world_size
        first, last = shards * per_shard // per_rank, ((shards + 1) * per_shard - 1) // per_rank
        return first + places % (last - first + 1)

    def counts(self, step: int, rank: int, world_size: int) -> Flags:
        """Return for each sample of a rank's batch whether it is one of the epoch, or repeated to pad it."""
        shards, positions = self._places(step, rank, world_size)
        return positions < self._starts(shards + 1) - self._starts(shards)

    def part(self, ranks: Iterable[int], world_size: int) -> Ids:
        """Return all ids that these ranks ever read, ascending: what their node has to hold."""
        shards = {int(shard) for rank in ranks for shard in np.unique(self._places(0, rank, world_size)[0])}
        parts = [np.arange(*self._starts(np.array([shard, shard + 1]))) for shard in sorted(shards)]
        return np.sort(self._placed(np.concatenate([np.empty(0, np.int64), *parts])))

    def _places(self, step: int, rank: int, world_size: int) -> tuple[Ids, Ids]:
        """Return the shard of each slot of a rank, and the slot's position in the order of that shard."""
        _check_at_least("step", step, 0)
        _check_rank(rank, world_size)
        if self.global_batch % world_size:
            expected = f"a divisor of global_batch = {self.global_batch}"
            raise ValueError(f"world_size: expected {expected}, got {world_size}")
        local_batch = self.global_batch // world_size
        slots = np.arange(rank * local_batch, (rank + 1) * local_batch, dtype=np.int64)
        shards, slots_of_shard = np.divmod(slots, self.global_batch // self.shards)
        return shards, step * (self.global_batch // self.shards) + slots_of_shard

    def _drawn(self, epoch: int, shards: Ids, positions: Ids) -> tuple[Ids, Ids]:
        """Return the shard of the sample at each position of a shard's order, and its place in that shard."""
        order = key_of(_ORDER, self.seed, epoch)
        drawn = self._permuted(shards, positions, order)
        exchanged = int(self.exchange * (self.samples // self.shards))
        if exchanged == 0:
            return shards, drawn
        # The first so many of what is drawn in each shard change places; a second order says which these are.
        is_exchanged = drawn < exchanged
        positions = (shards * exchanged + drawn)[is_exchanged]
        to = Permutation(exchanged * self.shards, _EXCHANGE, self.seed, epoch).at(positions)
        shards = shards.copy()
        shards[is_exchanged], drawn[is_exchanged] = np.divmod(to, exchanged)
        return shards, self._permuted(shards, drawn, key_of(_TURN, self.seed, epoch))

    def _permuted(self, shards: Ids, positions: Ids, key: np.uint64) -> Ids:
        """Return what each shard's own permutation has at positions, which begin again at its end."""
        out = np.empty_like(positions)
        _permute_in_shards(positions, shards, self._starts(shards + 1) - self._starts(shards), key, out)
        return out

    def _starts(self, shards: Ids) -> Ids:
        return shards * self.samples // self.shards

    def _placed(self, places: Ids) -> Ids:
        if self.placement == "manifest":
            return places
        return Permutation(self.samples, _PLACEMENT).at(places)


# ---------------------------------------------------------------------------------- evaluation


def evaluation_steps(samples: int, world_size: int, batch_size: int) -> int:
    """Return how many batches every rank evaluates.

    >>> evaluation_steps(5, world_size=2, batch_size=2)
    2
    """
    return _rounded_up(_rounded_up(samples, world_size), batch_size)


def evaluation_batch(
    samples: int, step: int, rank: int, world_size: int, batch_size: int
) -> tuple[Ids, Flags]:
    """Return the ids a rank evaluates at a step, ``batch_size`` of them, and which of these count.

    The order is fixed. Over all ranks and steps every sample counts exactly once; the others are repeated to
    fill the batch, from the rank's own part.

    >>> evaluation_batch(5, step=1, rank=1, world_size=2, batch_size=2)
    (array([4, 4]), array([ True, False]))
    """
    steps = evaluation_steps(samples, world_size, batch_size)
    if not 0 <= step < steps:
        raise ValueError(f"step: expected 0 to {steps - 1}, got {step}")
    start, stop = _evaluated(samples, rank, world_size)
    ids = np.arange(step * batch_size, (step + 1) * batch_size, dtype=np.int64) + start
    return np.minimum(ids, max(start, stop - 1)), ids < stop


def evaluation_part(samples: int, ranks: Iterable[int], world_size: int) -> Ids:
    """Return all ids that these ranks evaluate, ascending: what their node has to hold.

    >>> evaluation_part(5, ranks=[1], world_size=2)
    array([2, 3, 4])
    """
    bounds = [_evaluated(samples, rank, world_size) for rank in ranks]
    # A rank without samples of its own, there being fewer than ranks, pads its batch with one of another's.
    parts = [np.arange(start, min(max(stop, start + 1), samples)) for start, stop in bounds]
    ids: Ids = np.unique(np.concatenate([np.empty(0, np.int64), *parts]))
    return ids


def _evaluated(samples: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the first id a rank evaluates, and the one after its last."""
    _check_rank(rank, world_size)
    return samples * rank // world_size, samples * (rank + 1) // world_size


def _rounded_up(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def _check_rank(rank: int, world_size: int) -> None:
    _check_at_least("world_size", world_size, 1)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank: expected 0 to {world_size - 1}, got {rank}")
