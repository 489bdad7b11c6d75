"""Any operation that all ranks would repeat, computed in parts (HiTopKComm, section 4.2).

The operation must be a pure function, with the same result on every rank: planning calls it several times,
and decides which rank calls it for which tensor.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from pto.comm import Array, Choice, Comm, Seconds, agree_on, choose, rounds, slowest
from pto.errors import DependsOnRank, InvalidArgument
from pto.partition import by_tensor, equal_bounds

Operation: TypeAlias = Callable[..., npt.ArrayLike]
Tensors: TypeAlias = Sequence[Any] | Array
How: TypeAlias = Literal["auto", "parts", "local"]
Cost: TypeAlias = Callable[..., float]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Call: TypeAlias = tuple[Array, ...]  # the arguments of one call of the operation
Signature: TypeAlias = tuple[tuple[tuple[int, ...], "np.dtype[Any]"], ...]  # shapes and dtypes of a call

HOW = {"auto": "as measured", "parts": "in parts: as asked for", "local": "locally: as asked for"}


@dataclass
class _Result:
    """Shape and dtype of the result for one item, and where its bytes begin in the exchange."""

    shape: tuple[int, ...]
    dtype: "np.dtype[Any]"
    start: int = 0

    def within(self, buffer: Bytes) -> Array:
        return np.ndarray(self.shape, self.dtype, buffer, self.start)

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class Parallel:
    """``operation`` on tensors of fixed shapes and dtypes, planned once: in parts on all ranks, or locally.

    All ranks make it together, with equal tensors. ``tensors``: a list, of which the operation takes one at a
    time (an item that is a tuple of arrays gives several arguments); or one vector, of which it takes a
    contiguous slice and returns an array with a row for each entry or some fixed rows for each slice.

    ``cost(tensor)``: of each call, in any unit; by default the number of entries. ``how``: "auto" measures
    whether computing in parts is faster with its exchange; "parts" and "local" force it. ``check=True`` finds
    operations that depend on the rank, by computing everything on every rank too. ``choice``: whether it runs
    in parts, and why.

    >>> import numpy as np
    >>> from commlib.transport import simulated
    >>> def norms(comm):
    ...     layers = [np.full((2, 8), 1.0), np.full(9, 2.0), np.array(3.0)]
    ...     return parallel(np.linalg.norm, layers, comm, how="parts")(layers)
    >>> [float(norm) for norm in simulated.run(norms, world_size=2)[1]]
    [4.0, 6.0, 3.0]
    """

    def __init__(
        self,
        operation: Operation,
        tensors: Tensors,
        comm: Comm,
        cost: Cost | None = None,
        *,
        check: bool = False,
        how: How = "auto",
    ) -> None:
        if how not in HOW:
            raise InvalidArgument(f'how: expected one of {", ".join(HOW)}, got "{how}"')
        self._name = getattr(operation, "__name__", "operation")
        self._operation, self._comm, self._check = operation, comm, check
        self._is_vector = isinstance(tensors, np.ndarray)
        if self._is_vector and cost is not None:
            raise InvalidArgument("cost: expected none for one vector, whose slices are equal")
        calls = self._calls(tensors)
        for i, call in enumerate(calls):
            for array in call:
                _expect_numbers(self._item(i), array.dtype)
        self._planned = [_signature(call) for call in calls]
        self._owned: list[list[int]] = []
        self._results: list[_Result] = []
        self._bounds = [0]  # in the exchange, rank r sends the bytes from bounds[r] to bounds[r + 1]
        self.choice = self._plan(calls, cost, how)

    def __call__(self, tensors: Tensors) -> Any:
        """Return the results for tensors of the planned shapes: a list of arrays, for one vector an array.

        All ranks call it together. In parts, the results are new arrays, bitwise equal on all ranks, from one
        exchange; they are views of one buffer.
        """
        calls = self._calls(tensors)
        self._expect_planned(calls)
        if self._check:
            self._compare(self._items(calls))
        if not self.choice.in_parts:
            results = [np.asarray(self._operation(*call)) for call in calls]
            return results[0] if self._is_vector else results
        items = self._items(calls)
        buffer = self._exchange(self._own_part(items))
        if not self._is_vector:
            return [result.within(buffer) for result in self._results]
        first, rows = self._results[0], sum(result.shape[0] for result in self._results)
        return buffer.view(first.dtype).reshape(rows, *first.shape[1:])  # slices follow each other

    def _calls(self, tensors: Tensors) -> list[Call]:
        """Return the arguments of the calls that compute everything on one rank."""
        if not self._is_vector:
            return [tuple(map(np.asarray, each if isinstance(each, tuple) else (each,))) for each in tensors]
        if not isinstance(tensors, np.ndarray) or tensors.ndim != 1:
            raise InvalidArgument(
                f"one vector: expected an array of one dimension, got {_described(tensors)};"
                " several tensors are given as a list"
            )
        return [(tensors,)]

    def _items(self, calls: list[Call]) -> list[Call]:
        """Return the items that are assigned to ranks: whole tensors, or non-empty slices of one vector."""
        if not self._is_vector:
            return calls
        vector = calls[0][0]
        bounds = equal_bounds(len(vector), min(self._comm.size, len(vector)) or 1)
        return [(vector[low:high],) for low, high in pairwise(bounds) if low < high]

    def _plan(self, calls: list[Call], cost: Cost | None, how: How) -> Choice:
        if self._comm.size == 1:
            self._check = False
            return Choice(False, f"{self._name} locally: there is one rank")
        settings = {"how": how, "check": str(self._check), "one vector": str(self._is_vector)}
        agree_on(self._comm, "settings", settings)
        agree_on(self._comm, "tensors", {self._item(i): _text(each) for i, each in enumerate(self._planned)})
        items = self._items(calls)
        if not items:
            self._check = False
            return Choice(False, f"{self._name} locally: there is nothing to compute")
        self._owned = self._assign(items, cost)
        if how != "local" or self._check:
            self._plan_layout(items)
        if how == "auto":
            return self._measure(items)
        return Choice(how == "parts", f"{self._name} {HOW[how]}")

    def _assign(self, items: list[Call], cost: Cost | None) -> list[list[int]]:
        """Return the items that each rank owns."""
        if self._is_vector:
            return [[rank] if rank < len(items) else [] for rank in range(self._comm.size)]
        entries = [sum(array.size for array in item) for item in items]
        costs = [float(cost(*item)) for item in items] if cost else list(map(float, entries))
        facts = {f"the cost of {self._item(i)}": repr(each) for i, each in enumerate(costs)}
        agree_on(self._comm, "tensors", facts)
        return [[piece.tensor for piece in own] for own in by_tensor(entries, self._comm.size, costs).pieces]

    def _plan_layout(self, items: list[Call]) -> None:
        """Gather the shapes and dtypes of all results from their owners, and place them in the exchange."""
        own = ((i, np.asarray(self._operation(*items[i]))) for i in self._owned[self._comm.rank])
        forms = {i: (result.shape, result.dtype) for i, result in own}
        gathered = {i: each for part in self._comm.allgather_objects(forms) for i, each in part.items()}
        results = [_Result(*gathered[i]) for i in range(len(items))]
        for i, result in enumerate(results):  # after the exchange, so that all ranks raise
            _expect_numbers(f"{self._name}: the result of {self._item(i)}", result.dtype)
        rows = {(each.shape[1:], each.dtype) for each in results}
        if self._is_vector and (len(rows) > 1 or not all(each.shape for each in results)):
            raise InvalidArgument(
                f"{self._name}: expected arrays of the slices that differ in their first dimension at most,"
                f" got {', '.join(dict.fromkeys(map(str, results)))}"
            )
        end = 0
        for owned in self._owned:
            for result in (results[i] for i in owned):
                result.start = -(-end // result.dtype.alignment) * result.dtype.alignment
                end = result.start + math.prod(result.shape) * result.dtype.itemsize
            self._bounds.append(end)
        self._results = results

    def _measure(self, items: list[Call]) -> Choice:
        part = rounds(self._comm, lambda: self._own_part(items))
        exchange = rounds(self._comm, lambda: self._exchange(np.empty(self._bounds[-1], np.uint8)))
        whole = float(np.median(part.sum(axis=0)))  # the seconds of all owners together
        return choose(self._name, Seconds(whole, slowest(part), slowest(exchange)))

    def _own_part(self, items: list[Call]) -> Bytes:
        """Return a buffer for all results with this rank's own computed."""
        buffer = np.empty(self._bounds[-1], np.uint8)
        for i in self._owned[self._comm.rank]:
            planned, result = self._results[i], np.asarray(self._operation(*items[i]))
            if (result.shape, result.dtype) != (planned.shape, planned.dtype):
                raise InvalidArgument(
                    f"{self._name}: expected {planned} of {self._item(i)} as when it was planned,"
                    f" got {_described(result)}"
                )
            planned.within(buffer)[...] = result
        return buffer

    def _exchange(self, buffer: Bytes) -> Bytes:
        parts = [buffer[low:high] for low, high in pairwise(self._bounds)]
        self._comm.allgather(parts[self._comm.rank], parts)
        return buffer

    def _compare(self, items: list[Call]) -> None:
        """Raise ``DependsOnRank`` on all ranks if any rank's result differs from its owner's."""
        buffer = self._exchange(self._own_part(items))
        gathered = [result.within(buffer) for result in self._results]
        here = [np.asarray(self._operation(*item)) for item in items]
        same = [_same(own, other) for own, other in zip(here, gathered, strict=True)]
        everywhere = self._comm.allgather_objects([i for i, is_same in enumerate(same) if not is_same])
        if not any(everywhere):
            return
        first = min(i for each in everywhere for i in each)
        owner = next(rank for rank, own in enumerate(self._owned) if first in own)
        ranks = [rank for rank, each in enumerate(everywhere) if first in each]
        raise DependsOnRank(
            f"{self._name}: the result of {self._item(first)}, computed on rank {owner}, is another on"
            f" ranks {ranks}: the operation, or what it was given, depends on the rank or on the call"
        )

    def _expect_planned(self, calls: list[Call]) -> None:
        if len(calls) != len(self._planned):
            raise InvalidArgument(f"tensors: expected {len(self._planned)} as planned, got {len(calls)}")
        for i, (planned, given) in enumerate(zip(self._planned, map(_signature, calls), strict=True)):
            if given != planned:
                raise InvalidArgument(
                    f"{self._item(i)}: expected {_text(planned)} as planned, got {_text(given)}"
                )

    def _item(self, number: int) -> str:
        return f"slice {number}" if self._is_vector else f"tensor {number}"


parallel = Parallel  # the verb for what makes one


def _expect_numbers(what: str, dtype: "np.dtype[Any]") -> None:
    if dtype.hasobject or dtype.kind not in "biufcV":  # V: bfloat16 is of none of NumPy's kinds
        raise InvalidArgument(f"{what}: expected numbers, got {dtype}")


def _signature(call: Call) -> Signature:
    return tuple((array.shape, array.dtype) for array in call)


def _text(signature: Signature) -> str:
    return ", ".join(f"{dtype} {shape}" for shape, dtype in signature)


def _described(value: object) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__


def _same(one: Array, other: Array) -> bool:
    """Return whether two arrays are equal to the bit: a NaN is equal to itself."""
    return (one.shape, one.dtype, one.tobytes()) == (other.shape, other.dtype, other.tobytes())
