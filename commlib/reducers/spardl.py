"""SparDL: reduce-scatter of selections in ⌈log₂ P⌉ rounds, all-gather in as many, and nothing lost between.

Zhao et al. 2023 (arXiv 2304.00737): Spar-Reduce-Scatter, Spar-All-Gather over teams, and global residual
collection, after its authors' code.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from commlib.cost import (
    LENGTH_BYTES,
    Cost,
    LinkSeconds,
    Step,
    by_link,
    doubling,
    doubling_bytes,
    sparse_bytes,
)
from commlib.entries import take_out, write_at
from commlib.errors import InvalidArgument, NonFiniteInput
from commlib.reducers.messages import exchange_packed, gather_doubling
from commlib.reducers.residual import State
from commlib.reducers.sparse import SparseOptions, SparseReducer
from commlib.selection import EVERYTHING
from commlib.topology import LinkBytes, Topology
from commlib.vectors import Float32, SparseVector, concatenate, non_finite, partition
from commlib.work import Work

TEAM_SCALE = 1.25  # of what a rank takes to other teams, in each step


def rounds_of(ranks: int) -> Iterator[tuple[int, int]]:
    """Yield the distance of each round of the reduce-scatter, and how many blocks a rank sends in it.

    >>> list(rounds_of(8)), list(rounds_of(5))
    ([(4, 4), (2, 2), (1, 1)], [(4, 1), (2, 2), (1, 1)])
    """
    distance, held = 1 << (ranks - 1).bit_length(), ranks
    while held > 1:
        distance //= 2
        yield distance, held - distance
        held = distance


def _block(step: Step) -> tuple[int, int]:
    """Return the ranks of a team, and the entries that a rank keeps of each block."""
    members, left = divmod(step.ranks, step.options["teams"])
    if left:
        raise _not_a_divisor(step.options["teams"], step.ranks)
    return members, -(-step.k // members)


def _not_a_divisor(teams: object, ranks: int) -> InvalidArgument:
    return InvalidArgument(f"teams: expected a divisor of the {ranks} ranks, got {teams!r}")


def _traffic(step: Step, rank: int) -> LinkBytes:
    """At most ``4k·(P − 1)/P`` words; with ``d`` teams, a block of ``d·k/P`` entries to other teams, too."""
    members, k = _block(step)
    teams, length = step.options["teams"], step.size // members + 1
    first, place = rank - rank % members, rank % members
    most = k * -(-step.most_selected(step.size) // step.k)  # some selectors return more
    message, final = step.message(min(most, length), length), sparse_bytes(min(most, length), length)
    to_each = Counter[int]()
    for distance, blocks in rounds_of(members):
        to_each[first + (place + distance) % members] += blocks * (message + LENGTH_BYTES)
    for to, sent in doubling_bytes(members, place, lambda block: final).items():
        to_each[first + to] += sent
    for to, sent in doubling_bytes(teams, rank // members, lambda team: final).items():
        to_each[to * members + place] += sent
    return by_link(step.nodes, rank, to_each)


def _seconds(step: Step) -> LinkSeconds:
    """``2·⌈log₂ P/d⌉ + ⌈log₂ d⌉`` rounds; ``4k/P·(P − d)`` words within teams, ``2k/P·(d − 1)`` beyond."""
    members, k = _block(step)
    length = step.size / members
    message, final = step.message(k, length), sparse_bytes(k, round(length))
    rounds = [(distance, blocks, message) for distance, blocks in rounds_of(members)]
    rounds += [(distance, blocks, final) for distance, blocks in doubling(members)]
    rounds += [(distance * members, blocks, final) for distance, blocks in doubling(step.options["teams"])]
    seconds = sum(step.world.round(each, blocks * (sent + LENGTH_BYTES)) for each, blocks, sent in rounds)
    return step.on_slowest_link(seconds)


def _work(step: Step) -> Work:
    """Accumulate; select once from every block; add up what comes, and keep what is overwritten.

    Half of the blocks are accumulated apart, before something is added to them, and then read once more.
    """
    members, k = _block(step)
    entries = k * members
    messages = members + (step.options["teams"] > 1)
    moved = Work(entry=4 * entries, coded=2 * entries, place=2 * entries, messages=messages)
    return step.selecting(step.size, entries) + Work(add=step.size) + moved + step.placing(step.k)


@dataclass(frozen=True)
class SparDLOptions(SparseOptions):
    """``teams``: groups of ranks that reduce among themselves first."""

    teams: int


@dataclass(frozen=True)
class SparDLState(State):
    """``held``: entries of its block that this rank takes to the other teams, ``h`` of the paper."""

    held: int


class SparDL(SparseReducer):
    """Spar-Reduce-Scatter within each team, Spar-All-Gather among teams, and an all-gather of the blocks.

    A team of ``n`` ranks cuts the gradient into ``n`` blocks. In each round a rank sends half of the blocks
    that it still holds, ``k/n`` entries of each, selected just before, after all sums (as the authors' code
    does; their text selects once more at the start). It ends with the sum of one block, and keeps ``k/n``.

    ``teams``: a divisor of the number of ranks. The ranks with the same block in all teams gather ``h``
    entries each (B-SAG, in ⌈log₂ d⌉ rounds), add them up and keep ``k/n``; ``h`` follows from how many
    distinct ones there were. More teams take fewer rounds and more words.

    Global residual collection: where an entry is not in the result, each rank restores what it held before;
    where it is, what a rank dropped on the way stays with that rank. So nothing is lost.
    """

    cost = Cost(_traffic, _seconds, _work, is_exact=False, applied=lambda step: step.k)
    needs_entries = True
    options: SparDLOptions
    state: SparDLState

    def __init__(self, topology: Topology, size: int, *, teams: int = 1, **options: Any) -> None:
        super().__init__(topology, size, **options)
        if self.sends_all:
            raise InvalidArgument(f"selector: expected one that selects k entries, got {EVERYTHING!r}")
        ranks = self.comm.size
        exchanges = topology.world.size > 1 and self.length > 0  # uneven nodes have ranks without a shard
        if type(teams) is not int or teams < 1 or (exchanges and ranks % teams):
            raise _not_a_divisor(teams, ranks)
        self.options = SparDLOptions(**asdict(self.options), teams=teams)
        self._members = max(1, ranks // teams)
        self._own = self.comm.rank % self._members
        self._first = self.comm.rank - self._own
        self._bounds = list(pairwise(partition(self.length, self._members).tolist()))
        self._renew_selectors(self._members)  # sums of more ranks have other thresholds
        self._summands: dict[int, tuple[Float32, Float32]] = {}  # of blocks that are not accumulated yet
        self._overwritten: list[list[SparseVector]] = []  # entries of each block, in the order of time
        self.state = SparDLState(-(-self._of_block // teams))

    @property
    def _of_block(self) -> int:
        """Entries that are kept of a block."""
        return -(-self.k // self._members)

    def set_density(self, density: float) -> None:
        super().set_density(density)
        self.state = SparDLState(-(-self._of_block // self.options.teams))

    def _exchange(self, collected: Float32) -> tuple[SparseVector, int]:
        self._overwritten, residual = [[] for _ in self._bounds], self._decayed()
        parts = [(collected[low:high], residual[low:high]) for low, high in self._bounds]
        self._summands = dict(enumerate(parts))
        selected = self._reduce_scatter()
        own = self._take(self._own, self._held)
        selected += own.nnz
        message = self.lossless.encode(self._among_teams(own))
        with self.measure(self.link):
            team = range(self._first, self._first + self._members)
            messages = gather_doubling(self.comm, team, message, self.workspace)
        with self.measure("combine"):
            sizes = [high - low for low, high in self._bounds]
            applied = list(map(self.lossless.decode, messages, sizes))
            self._collect_residuals(applied)
            return concatenate(applied), selected

    @property
    def _held(self) -> int:
        return self.state.held if self.options.teams > 1 else self._of_block

    def _reduce_scatter(self) -> int:
        """Leave the team's sum of this rank's block in the accumulated gradient; return the entries sent."""
        own, members, selected = self._own, self._members, 0
        for distance, blocks in rounds_of(members):
            sent = [(own + distance + each) % members for each in range(blocks)]
            taken = [self._take(block, self._of_block) for block in sent]
            selected += sum(vector.nnz for vector in taken)
            outgoing = [
                self.encode(vector, at=self._bounds[block][0])
                for block, vector in zip(sent, taken, strict=True)
            ]
            to, source = ((own + away) % members + self._first for away in (distance, -distance))
            with self.measure(self.link):
                incoming = exchange_packed(self.comm, outgoing, to, source, self.workspace, blocks)
            with self.measure("combine"):
                for each, message in enumerate(incoming):
                    self._add((own + each) % members, message)
        return selected

    def _take(self, block: int, k: int) -> SparseVector:
        """Return the ``k`` largest entries of a block, taken from it, or a NaN."""
        values, summands = self._block(block), self._summands.pop(block, None)
        selector = self.selectors[block]
        with self.measure("select"):
            try:
                if summands is None:
                    selected = selector.select(values, k)
                else:
                    selected = selector.select_sum(*summands, k, values)
            except NonFiniteInput:
                return non_finite(len(values), self.arrays)
            selected.subtract_from(values)
        self._overwritten[block].append(selected)
        return selected

    def _add(self, block: int, message: Any) -> None:
        values = self._block(block)
        if block in self._summands:
            np.add(*self._summands.pop(block), out=values)
        received = self.codec.decode(message, len(values))
        places = received.indices_or_range.copy()  # which may be in the message
        before = take_out(values, places)
        self._overwritten[block].append(SparseVector.trusted(len(values), places, before))
        write_at(values, places, before + received.values)

    def _block(self, block: int) -> Float32:
        """Return the entries of a block of the accumulated gradient, which becomes the next residual."""
        low, high = self._bounds[block]
        return self._spare[low:high]

    def _collect_residuals(self, applied: list[SparseVector]) -> None:
        """Restore what this rank held at first, but where entries are applied, keep what it dropped."""
        for block, (vector, overwritten) in enumerate(zip(applied, self._overwritten, strict=True)):
            values = self._block(block)
            # A dense message has zeros where nothing was applied.
            reached = vector.where(vector.values != 0) if vector.is_dense else vector
            places = reached.indices_or_range
            dropped = take_out(values, places)
            for before in reversed(overwritten):
                before.write_to(values)
            write_at(values, places, dropped)

    def _among_teams(self, own: SparseVector) -> SparseVector:
        """Return the sum of what all teams hold of this rank's block, its largest entries."""
        teams, members, k = self.options.teams, self._members, self._of_block
        if teams == 1:
            return own
        with self.measure(self.link):
            same_block = range(self._own, self.comm.size, members)
            messages = gather_doubling(self.comm, same_block, self.lossless.encode(own), self.workspace)
        with self.measure("combine"):
            total = self.sum_sparse([self.lossless.decode(each, own.size) for each in messages])
            held = self.state.held
            held = math.ceil(held * TEAM_SCALE) if total.nnz < k else math.floor(held / TEAM_SCALE)
            self.state = replace(self.state, held=int(np.clip(held, -(-k // teams), k)))
            return total if not total.is_finite else total.top_k(k)
