"""Reducers: all-reduce algorithms for gradients. One file each, one line in the table."""

from collections.abc import Mapping, Sequence
from typing import Any

from commlib.errors import InvalidArgument, shown
from commlib.reducers.allgather import AllGather
from commlib.reducers.arctopk import ARCTopK
from commlib.reducers.base import Options, Reducer
from commlib.reducers.dense import Dense
from commlib.reducers.exdyna import ExDyna
from commlib.reducers.gtopk import GTopK
from commlib.reducers.hioktopk import HiOkTopK
from commlib.reducers.hitopk import HiTopK
from commlib.reducers.layouts import Shards
from commlib.reducers.oktopk import OkTopK
from commlib.reducers.powersgd import PowerSGD
from commlib.reducers.report import Outcome, Report, StageSeconds
from commlib.reducers.residual import ResidualReducer, State
from commlib.reducers.spardl import SparDL
from commlib.reducers.sparse import SelectingReducer, SparseOptions
from commlib.reducers.split import DSARSplit, SSARSplit
from commlib.reducers.ssar_doubling import SSARDoubling
from commlib.reducers.torus2d import Torus2D
from commlib.reducers.wrappers import LocalClipping, MomentumCorrection, ReducerWrapper
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
    "exdyna": ExDyna,
    "spardl": SparDL,
    "arctopk": ARCTopK,
    "powersgd": PowerSGD,
}

WRAPPERS: dict[str, type[ReducerWrapper]] = {
    "momentum_correction": MomentumCorrection,
    "local_clipping": LocalClipping,
}

POSITIONAL = 2  # arguments of a reducer's constructor before its options: topology and size

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
    "ResidualReducer",
    "SelectingReducer",
    "Shards",
    "SparseOptions",
    "StageSeconds",
    "State",
    "check_reducer_options",
    "check_wrapper",
    "make_reducer",
    "part_of_wrapper",
    "reducer_class",
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
    """Return a new reducer for gradients of ``size`` entries; all ranks of the topology call it together.

    ``name``: an entry of ``REDUCERS``, an entry point of the group ``cloudtrain.reducers``, or an import path
    ``package.module:Name`` of a subclass of ``Reducer``. Sparse ones take ``density`` and the ``decay``
    of the residual, both in (0, 1], ``hierarchical``, most also ``selector`` (see ``SELECTORS``) and ``wire``
    (see ``CODECS``), and options of their own class; an unknown option raises ``InvalidArgument``.
    ``wrappers``: records of the wrappers around the reducer, the innermost first, as
    ``{"name": "momentum_correction", "momentum": 0.9}``; names are those of ``WRAPPERS`` or import paths.
    """
    check_reducer_options(name, options)
    around = [_wrapper(record) for record in wrappers]
    made: Reducer = reducer_class(name)(topology, size, **options)
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
    wrapper = resolve(WRAPPERS, "wrapper", name, subclass_of=ReducerWrapper)
    check_options(name, wrapper, options, positional=1)
    return wrapper, options


def check_wrapper(record: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgument`` where a record names no wrapper, or an option that it does not take."""
    _wrapper(record)


def part_of_wrapper(record: Mapping[str, Any], share: float) -> dict[str, Any]:
    """Return the record of a wrapper for a part of the gradient with this share of its entries."""
    wrapper, options = _wrapper(record)
    return {"name": record["name"], **wrapper.options_of_part(options, share)}


def check_reducer_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgument`` for an unknown or a missing option of a reducer."""
    check_options(name, reducer_class(name), options, POSITIONAL)


def reducer_options(name: str) -> dict[str, Any]:
    """Return the options that a reducer takes, with their defaults.

    >>> reducer_options("dense")
    {'values': 'fp32'}
    >>> reducer_options("hitopk")
    {'density': 0.01, 'decay': 1.0, 'hierarchical': True, 'selector': 'mstopk', 'wire': 'fp32'}
    """
    return options_of(reducer_class(name), POSITIONAL)


def reducer_class(name: str) -> type[Reducer]:
    """Return the class of a reducer, see :func:`make_reducer`."""
    return resolve(REDUCERS, "reducer", name, subclass_of=Reducer)
