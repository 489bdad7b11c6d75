"""The reducer of a phase: a name, or a record of the name, its options and its wrappers.

``reducer: hitopk`` or ``reducer: {name: oktopk, density: 0.01, leftovers: owner}``. The options are those of
the reducer's signature. A phase inherits the options of the configuration's reducer one by one, where its own
reducer takes them; what the phase gives replaces them.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, model_validator

from commlib import REDUCERS, Reducer, registry
from commlib.errors import InvalidArgument, shown, suggestion
from commlib.reducers import WRAPPERS, check_wrapper
from commlib.registry import is_import_path
from commlib.selection import make_selector
from commlib.wire import make_codec
from training.config.schema import ConfigurationError, Density, PartRecord, Record, imported, named, part_in

AUTO = "auto"  # the reducer that is chosen when the run begins, from the profile of its ranks
DEFAULT_REDUCER = "dense"
# All sparse reducers have the same.
DEFAULT_DENSITY: float = registry.options_of(REDUCERS["allgather"], positional=2)["density"]
OPTIONS_INSIDE = ("density", "selector", "wire")


def _check_codec(name: str) -> str:
    """Accept what ``make_codec`` accepts; parts that are to be imported are checked when they are."""
    try:
        if not any(map(is_import_path, name.split("+"))):
            make_codec(name)
    except InvalidArgument as error:  # without its key, which is this one
        raise ConfigurationError(error.text) from error
    return name


def _selector(given: Any) -> Any:
    """Accept the name of a selector, or a record of the name and the selector's options."""
    name = given.get("name") if isinstance(given, Mapping) else given
    if not isinstance(name, str):
        raise ConfigurationError(f"expected a name, or the key name and options, got {shown(given)}")
    if not is_import_path(name):
        make_selector(given)
    return given


ReducerName = Annotated[str, part_in({**REDUCERS, AUTO: None}, "reducer")]
GivenSelector = Annotated[str | dict[str, Any], BeforeValidator(_selector)]
CodecName = Annotated[str, AfterValidator(_check_codec)]


class WrapperRecord(PartRecord):
    """A wrapper of a sparse reducer: its name, and its own options."""

    name: Annotated[str, part_in(WRAPPERS, "wrapper")]
    """A name of ``commlib.reducers.WRAPPERS``, or an import path."""

    @model_validator(mode="after")
    def _takes_what_is_given(self) -> "WrapperRecord":
        if self.name in WRAPPERS:
            check_wrapper(self.model_dump())
        return self


class ReducerRecord(Record):
    """A reducer, its options and its wrappers. Those that are ``None`` are not given."""

    model_config = ConfigDict(extra="allow")

    name: ReducerName | None = None
    """A name of ``commlib.REDUCERS``, ``auto`` or an import path; a phase inherits the configuration's."""
    density: Density | None = None
    """Share of the entries that a sparse reducer selects."""
    selector: GivenSelector | None = None
    """A name of ``commlib.SELECTORS`` or an import path, or a record of it and the selector's options."""
    wire: CodecName | None = None
    """A name of ``commlib.CODECS`` or an import path, or an index and a value codec joined by ``+``."""
    wrappers: list[WrapperRecord] | None = None
    """Wrappers of a sparse reducer, the innermost first; an empty list for none."""

    @property
    def options(self) -> dict[str, Any]:
        """Return the options that are given, by name."""
        given = self.model_dump(exclude={"name"})
        return {key: value for key, value in given.items() if value is not None}

    @property
    def parts(self) -> list[str]:
        """Return the names of selector, codecs and wrappers."""
        selector = self.selector["name"] if isinstance(self.selector, Mapping) else self.selector
        wrappers = [each.name for each in self.wrappers or ()]
        return [*([selector] if selector else []), *(self.wire or "").split("+"), *wrappers]

    def check_parts(self) -> None:
        """Import selector, codecs and wrappers; ``InvalidArgument`` names what is wrong with one."""
        if self.selector is not None:
            make_selector(self.selector)
        if self.wire is not None:
            make_codec(self.wire)
        for each in self.wrappers or ():
            check_wrapper(each.model_dump())


GivenReducer = Annotated[ReducerRecord, BeforeValidator(named)]


def inherited(above: ReducerRecord, own: ReducerRecord | None) -> dict[str, Any]:
    """Return the options of a phase's reducer, which override those of the configuration one by one."""
    return above.options | (own.options if own is not None else {})


class Reducing(Record):
    """A record with a reducer. It refuses the options that once stood beside it, and names the new place."""

    @model_validator(mode="before")
    @classmethod
    def _has_no_old_spelling(cls, value: Any) -> Any:
        for key in OPTIONS_INSIDE if isinstance(value, Mapping) else ():
            if key in value:
                inside = "{name: …, " + f"{key}: {shown(value[key])}" + "}"
                raise ConfigurationError(
                    f"expected inside the reducer: reducer: {inside}, or reducer.{key}=…", key=key
                )
        return value


def class_of(name: str) -> type[Reducer] | None:
    """Return the class of a reducer; ``None`` for ``auto``, and for one that is not imported yet.

    What is imported and is no reducer is refused when a run imports its parts.
    """
    found = None if name == AUTO else imported(REDUCERS, "reducer", name)
    return found if isinstance(found, type) and issubclass(found, Reducer) else None


def options_of(name: str) -> dict[str, Any] | None:
    """Return the options of a reducer with their defaults, ``None`` for one that is not imported yet.

    ``auto`` has only the density, as it picks the others. Options without a default are ``REQUIRED``.
    """
    if name == AUTO:
        return {"density": DEFAULT_DENSITY}
    if (reducer := class_of(name)) is None:
        return None
    wrappers: dict[str, Any] = {"wrappers": []} if reducer.sparse else {}
    return registry.options_of(reducer, positional=2) | wrappers


def written_out(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a reducer takes of those ``given``, and its defaults for the others."""
    known = options_of(name)
    options = dict(given) if known is None else {key: given.get(key, known[key]) for key in known}
    return {key: value for key, value in options.items() if value not in (None, [], registry.REQUIRED)}


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise ``InvalidArgument`` where a reducer, if it is imported, does not take these options."""
    if (reducer := class_of(name)) is not None:
        own = {key: value for key, value in options.items() if key != "wrappers"}
        registry.check_options(name, reducer, own, positional=2)


def check_takes(name: str, record: ReducerRecord | None, path: str) -> None:
    """Raise a problem for an option of ``record`` that the reducer ``name`` does not have."""
    known = options_of(name)
    if record is None or known is None:
        return
    for option, value in record.options.items():
        if option not in known:
            does = f"{name} has no such option (its options: {', '.join(known) or 'none'})"
            if name == AUTO:
                does = f"{AUTO} picks its own; got {shown(value)}"
            raise ConfigurationError(f"{does}{suggestion(option, known)}", key=f"{path}.{option}")
