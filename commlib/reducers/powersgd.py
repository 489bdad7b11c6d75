"""PowerSGD: low-rank approximations of the gradient's matrices, with error feedback and warm start.

Vogels et al. 2019 (arXiv 1905.13727), algorithms 1 and 2.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from commlib.cost import (
    LENGTH_BYTES,
    Cost,
    LinkSeconds,
    Step,
    allreduce_traffic,
    by_link,
    doubling,
    doubling_bytes,
    whole_size,
)
from commlib.errors import InvalidArgument, shown
from commlib.products import add_and_multiply, multiply, multiply_transposed, reconstruct
from commlib.reducers.messages import gather_doubling
from commlib.reducers.residual import ResidualOptions, ResidualReducer, State
from commlib.topology import LinkBytes, Topology
from commlib.vectors import VALUE_BYTES, Float32, Index, SparseVector, index_dtype, is_finite, non_finite
from commlib.work import Work

SEED = 0x50_53_47_44  # of the first factors, on all ranks and in all runs

# Of a step of a million entries: the time of products and reconstruction, and what each rank of a matrix
# adds, of the time to add two vectors.
PASSES, COLUMN = 2.0, 0.2
NEGLIGIBLE = 1e-6  # a direction that is so much shorter than the longest one

Shapes = Sequence[Sequence[int]]


class Matrix(NamedTuple):
    """A part of the gradient that is approximated: where it begins, its sides and its rank."""

    low: int
    rows: int
    columns: int
    rank: int

    @property
    def entries(self) -> slice:
        """Its entries in the gradient."""
        return slice(self.low, self.low + self.rows * self.columns)


def matrices_of(size: int, density: float, matrix_rank: int | None, shapes: Shapes | None) -> list[Matrix]:
    """Return the matrices of a gradient; what is in none of them stays dense.

    A variable becomes a matrix of some leading dimensions by the others, as nearly square as possible: for a
    convolution, the filters by the rest (section 3). Without ``shapes``, as much of the vector as possible
    becomes one nearly square matrix. A matrix whose factors are not smaller stays dense.
    """
    side = math.isqrt(size)
    found, low = [], 0
    for shape in shapes if shapes is not None else [(side, size // side)] if side else []:
        entries = math.prod(shape)
        cuts = [math.prod(shape[:dimensions]) for dimensions in range(1, len(shape))] if entries else []
        rows = min(cuts, key=lambda rows: rows + entries // rows, default=1)
        columns = entries // rows
        own = matrix_rank or max(1, round(density * entries / (rows + columns)))
        if own * (rows + columns) < entries and own <= min(rows, columns):
            found.append(Matrix(low, rows, columns, own))
        low += entries
    return found


class Plan:
    """Where the factors of all matrices lie in the messages of a step; dense entries follow the left ones."""

    def __init__(self, size: int, matrices: list[Matrix]) -> None:
        self.matrices = matrices
        self.dense = size - sum(each.rows * each.columns for each in matrices)
        self.lefts = list(accumulate((each.rows * each.rank for each in matrices), initial=0))
        self.rights = list(accumulate((each.columns * each.rank for each in matrices), initial=0))

    def dense_indices(self, size: int) -> Any:
        """Return the indices of the entries that are in no matrix."""
        is_dense = np.ones(size, bool)
        for each in self.matrices:
            is_dense[each.entries] = False
        return np.flatnonzero(is_dense)


def _plan(step: Step) -> Plan:
    options = step.options
    shapes = None if step.whole else options["shapes"]
    return Plan(step.size, matrices_of(step.size, step.density, options["matrix_rank"], shapes))


def _basis_bytes(plan: Plan, ranks: int, rank: int) -> int:
    return VALUE_BYTES * sum(each.rank**2 for each in plan.matrices[rank::ranks])


def _traffic(step: Step, rank: int) -> LinkBytes:
    """All-reduce the left factors, and the right ones; ``r²`` values between for each matrix."""
    plan = _plan(step)
    left = allreduce_traffic(step.nodes, rank, plan.lefts[-1] + plan.dense)
    bases = doubling_bytes(step.ranks, rank, partial(_basis_bytes, plan, step.ranks))
    return left + by_link(step.nodes, rank, bases) + allreduce_traffic(step.nodes, rank, plan.rights[-1])


def _seconds(step: Step) -> LinkSeconds:
    """``2·(P − 1)/P·r·(n + m)·β`` for a matrix, in the rounds of two all-reduces and a short all-gather."""
    plan, ranks = _plan(step), step.world.size
    mean = LENGTH_BYTES + sum(_basis_bytes(plan, ranks, rank) for rank in range(ranks)) / ranks
    bases = sum(step.world.round(distance, count * mean) for distance, count in doubling(ranks))
    sums = step.allreduce(plan.lefts[-1] + plan.dense) + step.allreduce(plan.rights[-1])
    return step.after_comparison(sums + bases)


def _work(step: Step) -> Work:
    """Accumulate; two products and the reconstruction."""
    passes = sum((PASSES + COLUMN * each.rank) * each.rows * each.columns for each in _plan(step).matrices)
    return Work(add=step.size * (1 + step.decays) + passes)


@dataclass(frozen=True)
class PowerSGDOptions(ResidualOptions):
    """``matrix_rank``: of every matrix; ``shapes``: of the variables in the gradient, in order."""

    matrix_rank: int | None
    shapes: Shapes | None


@dataclass(frozen=True)
class PowerSGDState(State):
    """``right``: the right factors of the latest step, ``r`` rows each (warm start)."""

    right: npt.NDArray[np.float32]


class PowerSGD(ResidualReducer):
    """``M ≈ P̂·Qᵀ`` for each matrix, by one step of subspace iteration from the latest ``Q``.

    1. ``P = Σ M·Q``, all-reduced. Of each matrix one rank finds the small matrix ``T`` that makes the columns
       of ``P̂ = P·T`` orthonormal, and all ranks get it: they hold the same bits.
    2. ``Q = Σ Mᵀ·P̂``, all-reduced.
    3. The mean is ``P̂·Qᵀ/P``; a rank keeps ``M − P̂·Qᵀ/P``.

    ``matrix_rank``, or for each matrix the rank whose factors have the share ``density`` of its entries.
    ``shapes``: of the variables; frameworks give them. Variables of one dimension, and small matrices, are
    all-reduced as they are. Without ``shapes``, and of a shard with ``hierarchical``, the vector is one
    matrix that is nearly square.
    """

    cost = Cost(_traffic, _seconds, _work, is_exact=False, applied=whole_size, most=whole_size)
    needs_entries = True
    approximates = True
    returns_mean = True  # made in the pass that makes the residual
    options: PowerSGDOptions
    state: PowerSGDState

    def __init__(
        self,
        topology: Topology,
        size: int,
        *,
        matrix_rank: int | None = None,
        shapes: Shapes | None = None,
        **options: Any,
    ) -> None:
        super().__init__(topology, size, **options)
        try:
            shapes = None if shapes is None else [tuple(map(int, shape)) for shape in shapes]
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"shapes: expected a list of shapes, got {shown(shapes)}") from error
        if shapes is not None and sum(map(math.prod, shapes)) != size:
            raise InvalidArgument(f"shapes: expected shapes of {size} entries together, got {shapes}")
        if matrix_rank is not None:
            _check_rank(matrix_rank, shapes or [])
        self.options = PowerSGDOptions(**asdict(self.options), matrix_rank=matrix_rank, shapes=shapes)
        self._make_plan()

    def _make_plan(self) -> None:
        shapes = None if self.options.hierarchical else self.options.shapes
        matrices = matrices_of(self.length, self.density, self.options.matrix_rank, shapes)
        self._plan = Plan(self.length, matrices)
        self._dense = self._plan.dense_indices(self.length)
        drawn = np.random.default_rng(SEED).standard_normal(self._plan.rights[-1], np.float32)
        self._drawn = self.arrays.asarray(drawn)
        self.state = PowerSGDState(self._drawn)

    def set_density(self, density: float) -> None:
        """See :meth:`ResidualReducer.set_density`; the factors begin anew."""
        super().set_density(density)
        self._make_plan()

    def sent_indices(self, mean: Float32) -> Index:
        """Return none: factors carry a part of every entry, so that masking has nothing to start again."""
        return np.empty(0, index_dtype(self.size))

    def _exchange(self, collected: Float32) -> tuple[SparseVector, int]:
        residual, accumulated, plan = self._decayed(), self._spare, self._plan
        first = np.empty(plan.lefts[-1] + plan.dense, np.float32)
        with self.measure("select"):
            for each, left, right in zip(plan.matrices, self._lefts(first), self._rights(), strict=True):
                own = each.entries
                add_and_multiply(collected[own], residual[own], right, accumulated[own], left)
            first[plan.lefts[-1] :] = collected[self._dense] + residual[self._dense]
            accumulated[self._dense] = first[plan.lefts[-1] :]
        self.wait_for_comparison()  # ranks of another density have other factors
        summed = self.all_reduce(first)
        if not is_finite(summed):
            return non_finite(self.length, self.arrays), 0
        dense = summed[plan.lefts[-1] :] / np.float32(self.topology.world.size)
        lefts = self._orthonormal(summed)
        with self.measure("select"):
            pairs = zip(lefts, plan.matrices, strict=True)
            rights = [
                multiply_transposed(left, self._matrix(accumulated, each)).ravel() for left, each in pairs
            ]
        total = self.all_reduce(np.concatenate([np.empty(0, np.float32), *rights]))
        latest = total / np.float32(self.comm.size)
        with self.measure("combine"):
            mean = self._reconstruct(lefts, self._rights(latest), dense)
        for right, drawn in zip(self._rights(latest), self._rights(self._drawn), strict=True):
            is_lost = ~right.any(axis=1)
            right[is_lost] = drawn[is_lost]  # else a direction that was 0 once would stay so
        self.state = PowerSGDState(latest)
        return mean, len(first) + len(total)

    def _matrix(self, vector: Float32, matrix: Matrix) -> Float32:
        return vector[matrix.entries].reshape(matrix.rows, matrix.columns)

    def _lefts(self, factors: Float32) -> list[Float32]:
        """Return the left factors, a column for each rank."""
        parts = zip(pairwise(self._plan.lefts), self._plan.matrices, strict=True)
        return [factors[low:high].reshape(each.rows, each.rank) for (low, high), each in parts]

    def _rights(self, factors: Float32 | None = None) -> list[Float32]:
        """Return the right factors, those of the latest step or the given ones, a row for each rank."""
        plan, factors = self._plan, self.state.right if factors is None else factors
        parts = zip(pairwise(plan.rights), plan.matrices, strict=True)
        return [factors[low:high].reshape(each.rank, each.columns) for (low, high), each in parts]

    def _orthonormal(self, summed: Float32) -> list[Float32]:
        """Return the left factors with orthonormal columns; zeros for those that depend on the others."""
        comm, lefts = self.comm, self._lefts(summed)
        with self.measure("combine"):
            own = [_basis(left).ravel() for left in lefts[comm.rank :: comm.size]]
            message = np.concatenate([np.empty(0, np.float32), *own]).view(np.uint8)
        with self.measure(self.link):
            messages = gather_doubling(comm, range(comm.size), message, self.workspace)
        with self.measure("combine"):
            products = [np.empty_like(left) for left in lefts]
            for rank, received in enumerate(messages):
                bases, start = received.view(np.float32), 0
                for left, product in zip(lefts[rank :: comm.size], products[rank :: comm.size], strict=True):
                    width = left.shape[1]
                    multiply(left, bases[start : start + width**2].reshape(width, width), product)
                    start += width**2
        return products

    def _reconstruct(self, lefts: list[Float32], rights: list[Float32], dense: Float32) -> SparseVector:
        """Return the mean of all ranks, and leave in the residual what is not in the mean of ``comm``'s."""
        mean, residual = self.part_of_mean(0, self.length), self._spare
        mean[self._dense], residual[self._dense] = dense, 0
        share = self.comm.size / self.topology.world.size
        are_finite = [
            reconstruct(left, right, self._matrix(mean, each), self._matrix(residual, each), share)
            for left, right, each in zip(lefts, rights, self._plan.matrices, strict=True)
        ]
        if not all(are_finite):
            return non_finite(self.length, self.arrays)
        return SparseVector.trusted(self.length, None, mean)


def _basis(left: Float32) -> Float32:
    """Return ``T``, for which the columns of ``left·T`` are orthonormal, or 0."""
    triangle = np.linalg.qr(left.astype(np.float64), mode="r")
    _, sizes, right = np.linalg.svd(triangle)
    is_lost = sizes <= sizes[0] * NEGLIGIBLE
    inverse = np.where(is_lost, 0.0, 1.0 / np.where(is_lost, 1.0, sizes))
    return np.ascontiguousarray(right.T * inverse, np.float32)


def _check_rank(rank: object, shapes: Shapes) -> None:
    largest = max((max(shape) for shape in shapes if len(shape) > 1), default=None)
    if type(rank) is not int or rank < 1 or (largest is not None and rank > largest):
        most = f" to {largest}, the longest side of a matrix" if largest else ""
        raise InvalidArgument(f"matrix_rank: expected a whole number from 1{most}, got {rank!r}")
