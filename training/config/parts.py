"""Parts of a run by name: of the built-in tables, of an entry point, or by an import path.

An import path is ``package.module:Name``; the groups of entry points are ``cloudtrain.reducers``, and so for
models, datasets, tasks and callbacks. Nothing is imported here: what is not imported yet is checked when a
run begins, by :mod:`training.run.parts`.
"""

import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from pydantic import AfterValidator, ConfigDict

from commlib.errors import UnknownName, look_up
from commlib.registry import is_import_path
from training.config.schema import Discreet, problem


class PartRecord(Discreet):
    """A part of a run: its name, and its own options."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of this part alone."""
        return dict(self.model_extra or {})


def part_in(table: Mapping[str, Any], kind: str) -> AfterValidator:
    """Accept names of a table and of entry points, and import paths; list the names for any other."""

    def check(name: str) -> str:
        if not is_import_path(name):
            try:
                look_up({**table, **dict.fromkeys(_entry_points(kind))}, kind, name)
            except UnknownName as error:
                hint = "; an import path is written package.module:Name" if {":", "."} & set(name) else ""
                raise problem(f"{error}{hint}") from error
        return name

    return AfterValidator(check)


def imported(table: Mapping[str, Any], kind: str, name: str) -> Any:
    """Return the part of that name, or ``None`` where its module would have to be imported for it."""
    if name in table:
        return table[name]
    module, _, attributes = (name if is_import_path(name) else _entry_points(kind).get(name, "")).partition(
        ":"
    )
    found: Any = sys.modules.get(module)
    for attribute in attributes.split("."):
        found = getattr(found, attribute, None)
    return found


def _entry_points(kind: str) -> dict[str, str]:
    """Return the import paths of installed entry points, by name."""
    return {point.name: point.value for point in entry_points(group=f"cloudtrain.{kind}s")}
