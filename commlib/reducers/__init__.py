"""Reducers: all-reduce algorithms for gradients. One file each, one line in the table."""

import inspect
from typing import Any

from commlib.errors import InvalidArgument, look_up, suggestion
from commlib.reducers.allgather import AllGather
from commlib.reducers.base import Reducer, Report, StageSeconds
from commlib.reducers.dense import Dense
from commlib.reducers.gtopk import GTopK
from commlib.reducers.hioktopk import HiOkTopK
from commlib.reducers.hitopk import HiTopK
from commlib.reducers.oktopk import OkTopK
from commlib.reducers.sparse import SelectingReducer, SparseReducer
from commlib.reducers.split import DSARSplit, SSARSplit
from commlib.reducers.ssar_doubling import SSARDoubling
from commlib.reducers.torus2d import Torus2D
from commlib.topology import Topology

REDUCERS: dict[str, type[Reducer]] = {
    "dense": Dense,
    "torus2d": Torus2D,
    "allgather": AllGather,
    "gtopk": GTopK,
    "ssar_doubling": SSARDoubling,
    "ssar_split": SSARSplit,
    "dsar_split": DSARSplit,
    "oktopk": OkTopK,
    "hitopk": HiTopK,
    "hioktopk": HiOkTopK,
}

__all__ = [
    "REDUCERS",
    "Reducer",
    "Report",
    "SelectingReducer",
    "SparseReducer",
    "StageSeconds",
    "make_reducer",
    "reducer_options",
]


def make_reducer(name: str, topology: Topology, size: int, **options: Any) -> Reducer:
    """Return a new reducer of the table ``REDUCERS`` for gradients of ``size`` entries.

    Sparse ones take ``density`` in (0, 1], ``selector`` (see ``SELECTORS``), ``wire`` (see ``CODECS``), and
    what their own class names beside. An option that has no effect is refused with ``InvalidArgument``.
    All ranks of the topology call it together.
    """
    reducer = look_up(REDUCERS, "reducer", name)
    allowed = reducer_options(name)
    for option in options:
        if option not in allowed:
            known = ", ".join(allowed) or "none"
            raise InvalidArgument(
                f"{option}: {name} has no such option (its options: {known}){suggestion(option, allowed)}"
            )
    return reducer(topology, size, **options)


def reducer_options(name: str) -> dict[str, Any]:
    """Return the options that a reducer takes, with their defaults.

    >>> reducer_options("dense"), reducer_options("hitopk")
    ({}, {'density': 0.01, 'selector': 'mstopk', 'wire': 'fp32'})
    """
    options: dict[str, Any] = {}
    for ancestor in reversed(look_up(REDUCERS, "reducer", name).__mro__):
        if constructor := vars(ancestor).get("__init__"):
            parameters = inspect.signature(constructor).parameters.values()
            options |= {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    return options
