"""Selectors: which entries of a dense vector are sent. One file each, one line in the table."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from commlib.errors import InvalidArgument, shown
from commlib.registry import check_options, resolve
from commlib.selection.base import Selector
from commlib.selection.bucketed import Bucketed
from commlib.selection.dgc import DGC
from commlib.selection.exact import Exact
from commlib.selection.gaussian import Gaussian
from commlib.selection.reused import Reused
from commlib.vectors import Float32, SparseVector

SELECTORS: dict[str, type[Selector]] = {
    "exact": Exact,
    "mstopk": Exact,  # the paper's name: its entries are those of "exact" here
    "dgc": DGC,
    "gaussian": Gaussian,
    "reused": Reused,
    "bucketed": Bucketed,
}

GivenSelector = str | Mapping[str, Any]  # a name, or a record of ``name`` and the selector's options

EVERYTHING = "all"  # in place of a selector: reducers then send every entry that is not 0

__all__ = [
    "EVERYTHING",
    "SELECTORS",
    "GivenSelector",
    "Selector",
    "make_selector",
    "select",
    "selector_class",
]


def selector_class(selector: GivenSelector) -> type[Selector]:
    """Return an entry of ``SELECTORS``, or what an entry point or an import path names.

    An unknown name raises ``UnknownName``.
    """
    return resolve(SELECTORS, "selector", _record(selector)["name"], subclass_of=Selector)


def make_selector(selector: GivenSelector) -> Selector:
    """Return a new selector, see :func:`selector_class`; with the options of a record.

    >>> make_selector({"name": "bucketed", "bucket": 2}).select(np.array([1, 2, 9, 8], np.float32), 2).indices
    array([1, 2], dtype=int32)
    """
    options = dict(_record(selector))
    name, made = options.pop("name"), selector_class(selector)
    check_options(name, made, options)
    return made(**options)


def _record(selector: GivenSelector) -> Mapping[str, Any]:
    if not isinstance(selector, Mapping):
        return {"name": selector}
    if "name" not in selector:
        raise InvalidArgument(
            f"selector: expected a name, or a record of one and options, got {shown(selector)}"
        )
    return selector


def select(name: str, vector: Float32, k: int) -> SparseVector:
    """Return the entries of ``vector``, float32 of shape ``(d,)``, that the selector ``name`` picks.

    They are ``min(k, d)`` entries, except for ``gaussian``: ``3k/4`` to ``2k``. A NaN or an infinity
    in ``vector`` raises ``NonFiniteInput``.

    >>> import numpy as np
    >>> select("mstopk", np.array([1, -5, 3, 5], np.float32), 2).indices
    array([1, 3], dtype=int32)
    """
    if not isinstance(vector, np.ndarray) or vector.dtype != np.float32 or vector.ndim != 1:
        found = f"{vector.dtype} {vector.shape}" if isinstance(vector, np.ndarray) else type(vector).__name__
        raise InvalidArgument(f"vector: expected a float32 array of one dimension, got {found}")
    if not isinstance(k, (int, np.integer)) or k < 0:
        raise InvalidArgument(f"k: expected a whole number from 0, got {k!r}")
    return make_selector(name).select(np.ascontiguousarray(vector), int(k))
