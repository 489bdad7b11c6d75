"""Reducers: all-reduce algorithms for gradients. One file each, one line in the table."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from commlib.errors import InvalidArgument, look_up, shown, suggestion
from commlib.reducers.allgather import AllGather
from commlib.reducers.base import Options, Reducer
from commlib.reducers.dense import Dense
from commlib.reducers.gtopk import GTopK
from commlib.reducers.hierarchical import Shards
from commlib.reducers.hioktopk import HiOkTopK
from commlib.reducers.hitopk import HiTopK
from commlib.reducers.oktopk import OkTopK
from commlib.reducers.report import Outcome, Report, StageSeconds
from commlib.reducers.selecting import SelectingReducer, State
from commlib.reducers.sparse import SparseOptions, SparseReducer
from commlib.reducers.split import DSARSplit, SSARSplit
from commlib.reducers.ssar_doubling import SSARDoubling
from commlib.reducers.torus2d import Torus2D
from commlib.reducers.wrappers import WRAPPERS, LocalClipping, MomentumCorrection, ReducerWrapper
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
    "WRAPPERS",
    "LocalClipping",
    "MomentumCorrection",
    "Options",
    "Outcome",
    "Reducer",
    "ReducerWrapper",
    "Report",
    "SelectingReducer",
    "Shards",
    "SparseOptions",
    "SparseReducer",
    "StageSeconds",
    "State",
    "make_reducer",
    "reducer_options",
]


def make_reducer(
    name: str,
    topology: Topology,
    size: int,
    *,
    wrappers: Sequence[Mapping[str, Any]] = (),
    **options: Any,
) -> Reducer:
    """Return a new reducer of the table ``REDUCERS`` for gradients of ``size`` entries.

    Sparse ones take ``density`` in (0, 1], ``selector`` (see ``SELECTORS``), ``wire`` (see ``CODECS``), and
    what their own class names. ``wrappers``: records of what is put around it, the innermost first:
    ``{"name": "momentum_correction", "momentum": 0.9}``, names of ``WRAPPERS``. An option that has no effect
    is refused with ``InvalidArgument``. All ranks of the topology call it together.
    """
    reducer = look_up(REDUCERS, "reducer", name)
    check_options(name, options_of(reducer, 2), options)
    around = [_wrapper(record) for record in wrappers]
    made = reducer(topology, size, **options)
    for wrapper, own in around:
        made = wrapper(made, **own)
    made.synchronize()
    return made


def _wrapper(record: Mapping[str, Any]) -> tuple[type[ReducerWrapper], dict[str, Any]]:
    """Return the class and the options of a wrapper."""
    if not isinstance(record, Mapping) or "name" not in record:
        raise InvalidArgument(f"wrappers: expected records of a name and options, got {shown(record)}")
    options = dict(record)
    name = options.pop("name")
    wrapper = look_up(WRAPPERS, "wrapper", name)
    check_options(name, options_of(wrapper, 1), options)
    return wrapper, options


def reducer_options(name: str) -> dict[str, Any]:
    """Return the options that a reducer takes, with their defaults.

    >>> reducer_options("dense"), reducer_options("hitopk")
    ({}, {'density': 0.01, 'selector': 'mstopk', 'wire': 'fp32'})
    """
    return options_of(look_up(REDUCERS, "reducer", name), 2)


def options_of(part: type, positional: int) -> dict[str, Any]:
    """Return the parameters of a constructor after the first ``positional`` ones, with their defaults.

    A constructor that ends in ``**options`` has those of its base class as well.
    """
    options: dict[str, Any] = {}
    for ancestor in part.__mro__:
        if constructor := vars(ancestor).get("__init__"):
            parameters = list(inspect.signature(constructor).parameters.values())[1 + positional :]
            is_open = any(each.kind is each.VAR_KEYWORD for each in parameters)
            named = {each.name: each.default for each in parameters if each.kind is not each.VAR_KEYWORD}
            options = {**named, **options}
            if not is_open:
                break
    return options


def check_options(name: str, allowed: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgument`` for an option that is not allowed, and for one that is missing."""
    for option in options:
        if option not in allowed:
            known = ", ".join(allowed) or "none"
            raise InvalidArgument(
                f"{option}: {name} has no such option (its options: {known}){suggestion(option, allowed)}"
            )
    for option, default in allowed.items():
        if default is inspect.Parameter.empty and option not in options:
            raise InvalidArgument(f"{option}: {name} needs this option, got none")
