"""Parts by name: from a table, from an installed package's entry points, or by an import path.

An import path is ``package.module:Name``. The entry points of reducers are the group ``cloudtrain.reducers``,
and so for every other kind of part.
"""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoints, entry_points
from typing import Any, NoReturn, TypeVar

from commlib.errors import InvalidArgument, UnknownName, look_up, one_line, shown, suggestion

Member = TypeVar("Member")

REQUIRED = inspect.Parameter.empty  # in place of the default of an option that has none
NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def is_import_path(name: object) -> bool:
    """Return whether ``name`` has the form of an import path; nothing is imported.

    >>> is_import_path("my_package.my_module:MyReducer"), is_import_path("hitopk")
    (True, False)
    """
    if not isinstance(name, str):
        return False
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(each.isidentifier() for each in (module + "." + attribute).split("."))


def resolve(table: Mapping[str, Member], kind: str, name: str, subclass_of: type | None = None) -> Member:
    """Return the part called ``name``: an entry of ``table``, else an entry point, else an import path.

    An unknown name raises ``UnknownName``. A path that cannot be imported, or that does not name something
    callable, or a subclass of ``subclass_of`` where that is given, raises ``InvalidArgument``.

    >>> resolve({}, "model", "collections:Counter")("aab")
    Counter({'a': 2, 'b': 1})
    """
    if not isinstance(name, str) or name in table:
        return look_up(table, kind, name)
    part = _imported(kind, name, import_path(table, kind, name))
    _check_kind(kind, name, part, subclass_of)
    return part


def names(table: Mapping[str, object], kind: str) -> list[str]:
    """Return the names of the table, then the names of installed packages' entry points."""
    return list(dict.fromkeys([*table, *(point.name for point in _entry_points(kind))]))


def _entry_points(kind: str) -> EntryPoints:
    return entry_points(group=f"cloudtrain.{kind}s")


def import_path(table: Mapping[str, object], kind: str, name: str) -> str:
    """Return ``name`` if it is an import path, else that of its entry point; ``table`` does not hold it."""
    if is_import_path(name):
        return name
    points = _entry_points(kind)
    try:
        look_up({**table, **{point.name: point for point in points}}, kind, name)
    except UnknownName as error:
        hint = "; an import path is written package.module:Name" if {":", "."} & set(name) else ""
        raise UnknownName(f"{error}{hint}") from None
    paths = sorted({f"{point.module}:{point.attr or ''}" for point in points if point.name == name})
    if len(paths) > 1:
        _fail(kind, name, f"expected one installed package that provides it, got {', '.join(paths)}")
    if not is_import_path(paths[0]):
        _fail(kind, name, f"expected an entry point package.module:Name, got {shown(paths[0])}")
    return paths[0]


def _imported(kind: str, name: str, path: str) -> Any:
    """Return the object that ``path`` names; a failure is one line that begins with its kind and name."""
    module_name, _, attributes = path.partition(":")
    try:
        found = import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            how = "install it, or add its folder to PYTHONPATH"
            _fail(kind, name, f"there is no module {missing} ({how})", error)
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        _fail(kind, name, f"importing {module_name} raised {what}", error)
    reached = module_name
    for attribute in attributes.split("."):
        try:
            found = getattr(found, attribute)
        except AttributeError as error:
            near = suggestion(attribute, dir(found))
            _fail(kind, name, f"{reached} has no {attribute}{near}", error)
        reached += f".{attribute}"
    return found


def _check_kind(kind: str, name: str, part: object, subclass_of: type | None) -> None:
    if subclass_of is None:
        if not callable(part):
            _fail(kind, name, f"expected a class or a function, got {shown(part)}")
    elif not (isinstance(part, type) and issubclass(part, subclass_of)):
        _fail(kind, name, f"expected a subclass of {subclass_of.__name__}, got {shown(part)}")
    elif missing := sorted(getattr(part, "__abstractmethods__", ())):
        _fail(kind, name, f"{part.__name__} does not define {', '.join(missing)}")


def _fail(kind: str, name: str, reason: str, cause: BaseException | None = None) -> NoReturn:
    raise InvalidArgument(one_line(f'{kind} "{shown(name)[1:-1]}": {reason}')) from cause


def options_of(part: Callable[..., object], positional: int = 0) -> dict[str, Any]:
    """Return the options of a class or function with their defaults, ``REQUIRED`` for those without one.

    ``positional``: how many arguments the caller gives before the options. The constructor of a class that
    ends in ``**options`` has the options of its base class as well.

    >>> options_of(sorted, positional=1)
    {'key': None, 'reverse': False}
    """
    options: dict[str, Any] = {}
    for parameters in reversed(_parameters(part)):
        first = [each for each in parameters if each.kind in POSITIONAL][:positional]
        own = [each for each in parameters if each.kind in NAMED and each not in first]
        options |= {each.name: each.default for each in own}
    return options


def check_options(
    name: str, part: Callable[..., object], options: Mapping[str, Any], positional: int = 0
) -> None:
    """Raise ``InvalidArgument`` unless ``part(*arguments, **options)`` fits its signature.

    ``name``: of the part in messages. ``positional``: as in ``options_of``.
    """
    known = options_of(part, positional)
    takes_any = not isinstance(part, type) and _is_open(_parameters(part)[0])
    for option in options:
        if option not in known and not takes_any:
            listed = ", ".join(known) or "none"
            near = suggestion(option, known)
            raise InvalidArgument(f"{name} has no such option (its options: {listed}){near}", key=option)
    for option, default in known.items():
        if default is REQUIRED and option not in options:
            raise InvalidArgument(f"{option}: {name} needs this option, got none")
    try:
        _signature(part).bind(*[None] * positional, **options)
    except TypeError as error:
        expected = f"expected one that takes {positional} arguments and its options"
        raise InvalidArgument(f"{name}: {expected}, got another signature: {error}") from error


def _parameters(part: Callable[..., object]) -> list[list[inspect.Parameter]]:
    """Return the parameters of a function, or of a class's constructors as far as options are passed on."""
    if not isinstance(part, type):
        return [list(_signature(part).parameters.values())]
    constructors = []
    for ancestor in part.__mro__[:-1]:
        if constructor := vars(ancestor).get("__init__"):
            constructors.append(list(_signature(constructor).parameters.values())[1:])
            if not _is_open(constructors[-1]):
                break
    return constructors


def _signature(part: Callable[..., object]) -> inspect.Signature:
    try:
        return inspect.signature(part)
    except ValueError as error:  # of some functions written in C
        raise InvalidArgument(one_line(f"expected a signature that can be read: {error}")) from error


def _is_open(parameters: list[inspect.Parameter]) -> bool:
    """Return whether the parameters end in ``**options``."""
    return any(each.kind is each.VAR_KEYWORD for each in parameters)
