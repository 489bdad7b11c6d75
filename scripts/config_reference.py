"""Write docs/configuration.md from the schema of configurations: python scripts/config_reference.py."""

import ast
import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml
from pydantic import AfterValidator, BaseModel, TypeAdapter, ValidationError

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from commlib import REDUCERS, SELECTORS, registry
from commlib.reducers import WRAPPERS
from training.callbacks import CALLBACKS
from training.config.config import Config
from training.config.optimizers import OPTIMIZERS
from training.config.schedules import SCHEDULES
from training.datasets import DATASETS
from training.linear.config import GeneratedData, LearningRate, LibsvmData, LinearConfig, LinearData
from training.models import IMAGES, MODELS, TextBuilder
from training.tasks import TASKS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
HEAD = """# Configuration reference

Every key that a configuration can have, made from the schema by `python scripts/config_reference.py`. What
keys are for, with examples: [training.md](training.md). On the command line, `phases.0.reducer.density=0.05`
gives a key inside another. What is wrong is refused before anything starts.

"""
PLAIN = {str: "text", bool: "`true`, `false`", float: "a number", dict[str, Any]: "keys and values"}
NAMED: list[dict[str, Any]] = [OPTIMIZERS, SCHEDULES, {name: task.Phase for name, task in TASKS.items()}]
# Those of training.linear.config, behind the others.
LINEAR: dict[type[BaseModel], str] = {
    LinearConfig: "Linear models",
    LinearData: "Linear models: `data`",
    LibsvmData: "Linear models: `data` of `libsvm`",
    GeneratedData: "Linear models: `data` of `generated`",
    LearningRate: "Linear models: `learning_rate`",
}
PARTS: dict[str, tuple[str, dict[str, Any], int]] = {  # place, table, arguments that are no options
    "tasks": ("training.md#tasks", dict(TASKS), 0),
    "data sets": ("training.md#data-sets", dict(DATASETS), 0),
    "models": ("training.md#models", dict(MODELS), len(IMAGES.arguments)),
    "reducers": ("reducers.md", dict(REDUCERS), 2),
    "selectors": ("reducers.md#selectors", dict(SELECTORS), 0),
    "wrappers": ("reducers.md#reducer-wrappers", dict(WRAPPERS), 1),
    "callbacks": ("callbacks.md", dict(CALLBACKS), 0),
}


def records() -> dict[type[BaseModel], str]:
    """Return all records with the titles of their sections, in the order of the configuration's keys."""
    titles: dict[type[BaseModel], str] = {Config: "The configuration"}
    queue: list[tuple[type[BaseModel], str]] = [(Config, "")]
    for record, path in queue:
        found = [(inner, f"`{path}{key}`") for key, hint in hints(record).items() for inner in inside(hint)]
        for table in NAMED:
            for each in table.values():
                names = ", ".join(f"`{name}`" for name in table if table[name] is each)
                found += [(each, f"{titles[record]}: {names}")] if issubclass(each, record) else []
        new = {inner: title for inner, title in reversed(found) if inner not in titles}
        titles |= {inner: new[inner] for inner, _ in found if inner in new}
        queue += [(inner, title.split("`")[1] + ".") for inner, title in new.items()]
    outer = ["The configuration", *Config.model_fields]
    return dict(
        sorted(titles.items(), key=lambda item: outer.index(re.split(r"[`.]", item[1].lstrip("`"))[0]))
    )


def hints(record: type[BaseModel]) -> dict[str, Any]:
    """Return the types of a record's keys, with what validates them."""
    known = get_type_hints(record, include_extras=True)
    return {key: known[key] for key in record.model_fields}


def inside(hint: Any) -> Iterator[type[BaseModel]]:
    """Yield the records that a type names."""
    if inspect.isclass(hint) and issubclass(hint, BaseModel):
        yield hint
    for part in get_args(hint):
        yield from inside(part)


def takes(hint: Any, titles: dict[type[BaseModel], str]) -> str:
    """Return what a key takes, in words."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated and (list(inside(hint)) or not (wrong := expected(hint))):
        is_name = any(isinstance(each, AfterValidator) for each in hint.__metadata__)
        return "a name" if is_name and parts[0] is str else takes(parts[0], titles)
    if origin is Annotated:
        return wrong
    if origin in (Union, types.UnionType):
        return " or ".join(takes(part, titles) for part in parts if part is not types.NoneType)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in parts)
    if origin in (list, tuple):
        return f"{'list' if origin is list else 'pair'}: {takes(parts[0], titles).removeprefix('a ')}"
    return f"[keys](#{slug(titles[hint])})" if hint in titles else PLAIN[hint]


def expected(hint: Any) -> str:
    """Return what the error about a wrong value says that was expected."""
    try:
        TypeAdapter(hint).validate_python(...)
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
        return said.removeprefix("expected ").rpartition(", got ")[0]
    raise AssertionError(f"{hint} takes anything")


def slug(title: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def code(value: Any) -> str:
    """Return a value as YAML has it, for a cell of a table; a record that has a name as that."""
    value = getattr(value, "name", {} if isinstance(value, BaseModel) else value)
    value = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(value, default_flow_style=True, width=200).split("\n")[0]
    return f"<code>{text.replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


def meanings(record: type[BaseModel]) -> dict[str, str]:
    """Return what the docstrings below the keys of a record, and of those that it extends, say."""
    found: dict[str, str] = {}
    for kind in record.__mro__[::-1]:
        lines = (
            inspect.getsource(kind) if issubclass(kind, BaseModel) and kind is not BaseModel else "class _: 0"
        )
        for node, after in zip(body := ast.parse(lines).body[0].body, body[1:]):  # type: ignore[attr-defined]  # noqa: B905
            match node, after:
                case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[key] = plain(text)
    return found


def plain(docstring: str) -> str:
    """Return a docstring as one line of Markdown."""
    return re.sub(r"(?::\w+:`~?|``)(.*?)`+", r"`\1`", " ".join(docstring.split())).replace("|", "\\|")


def section(record: type[BaseModel], titles: dict[type[BaseModel], str]) -> Iterator[str]:
    """Yield the lines of a record's section, without the keys that it shares with another section."""
    base = next((each for each in record.__mro__[1:] if each in titles), None)
    more = f" Besides the keys of [{titles[base]}](#{slug(titles[base])}):" if base else ""
    yield from ("", f"## {titles[record]}", "", plain((record.__doc__ or "").split("\n\n")[0]) + more, "")
    yield from ("| key | takes | default | meaning |", "|---|---|---|---|")
    said, types_of = meanings(record), hints(record)
    for key, field in record.model_fields.items():
        is_name = key in ("name", "schedule") and base is not None
        if not is_name and (
            not base or key not in base.model_fields or field.default != base.model_fields[key].default
        ):
            default = "required" if field.is_required() else code(field.default)
            yield f"| `{key}` | {takes(types_of[key], titles)} | {default} | {said.get(key, '')} |"


def options(kind: str) -> Iterator[str]:
    """Yield the lines of the section of the options that parts of a kind take."""
    place, table, arguments = PARTS[kind]
    yield from ("", f"## Options of {kind}", "", f"What they do: [{place.partition('#')[0]}]({place}).", "")
    yield from ("| name | options with their defaults |", "|---|---|")
    for name, part in table.items():
        known = registry.options_of(part, arguments)
        if isinstance(part, TextBuilder):
            known = {key: field.default for key, field in part.options.model_fields.items()} | part.defaults
        shown = [
            key if value is registry.REQUIRED else f"{key}: {code(value)[1:-1]}"
            for key, value in known.items()
            if key not in IMAGES.given and not inspect.isfunction(value)
        ]
        if shown:
            yield f"| `{name}` | {', '.join(f'`{each}`' for each in shown)} |"


def page() -> str:
    """Return the page."""
    titles = records() | LINEAR
    lines = [line for record in titles for line in section(record, titles)]
    return (
        HEAD.strip() + "\n" + "\n".join([*lines, *(line for kind in PARTS for line in options(kind))]) + "\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page())
