"""Reducers: all-reduce algorithms for gradients. One file each, one line in the table."""

from collections.abc import Mapping
from typing import Any

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
from commlib.registry import check_options, options_of, resolve
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

POSITIONAL = 2  # arguments of a reducer's constructor before its options: topology and size

__all__ = [
    "REDUCERS",
    "Reducer",
    "Report",
    "SelectingReducer",
    "SparseReducer",
    "StageSeconds",
    "check_reducer_options",
    "make_reducer",
    "reducer_class",
    "reducer_options",
]


def make_reducer(name: str, topology: Topology, size: int, **options: Any) -> Reducer:
    """Return a new reducer for gradients of ``size`` entries; all ranks of the topology call it together.

    ``name``: an entry of ``REDUCERS``, an entry point of the group ``cloudtrain.reducers``, or an import path
    ``package.module:Name`` of a subclass of ``Reducer``. Sparse ones take ``density`` in (0, 1], ``selector``
    (see ``SELECTORS``), ``wire`` (see ``CODECS``), and the options of their own class; an option that the
    class does not take raises ``InvalidArgument``.
    """
    check_reducer_options(name, options)
    return reducer_class(name)(topology, size, **options)


def check_reducer_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgument`` for an option that a reducer does not take, or lacks."""
    check_options(name, reducer_class(name), options, POSITIONAL)


def reducer_options(name: str) -> dict[str, Any]:
    """Return the options that a reducer takes, with their defaults.

    >>> reducer_options("dense"), reducer_options("hitopk")
    ({}, {'density': 0.01, 'selector': 'mstopk', 'wire': 'fp32'})
    """
    return options_of(reducer_class(name), POSITIONAL)


def reducer_class(name: str) -> type[Reducer]:
    """Return the class of a reducer, see :func:`make_reducer`."""
    return resolve(REDUCERS, "reducer", name, subclass_of=Reducer)
