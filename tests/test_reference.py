"""Links and references of the documents and docstrings lead somewhere, and what is public is described."""

import ast
import importlib
import inspect
import re
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest

from scripts.api_reference import MODULES, build
from tests.launching import ROOT
from tests.test_imports import sources

PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    ROOT / "datacache/README.md",
    ROOT / "benchmarks/README.md",
]
ROLE = re.compile(r":(?:class|mod|func|meth|data|exc|attr):`~?([^`]+)`")


# ------------------------------------------------------------- pages


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


# ------------------------------------------------------------- docstrings


@cache
def classes() -> dict[str, set[str]]:
    """Return the names of our classes' methods; two classes may have one name."""
    found: dict[str, set[str]] = {}
    for tree in sources().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = {each.name for each in ast.walk(node) if isinstance(each, ast.FunctionDef)}
                found[node.name] = found.get(node.name, set()) | methods
    return found


def leads_somewhere(name: str, module: str, scope: str | None) -> bool:
    """Return whether a name in a docstring is of its class or module, a class of ours, or a full name."""
    owner, _, member = name.rpartition(".")
    if name in classes() or member in classes().get(owner or scope or "", ()):
        return True
    parts = name.split(".")
    for start in (module, None):
        place = importlib.import_module(start or parts[0])
        rest = parts if start else parts[1:]
        for part in rest:
            try:
                place = getattr(place, part, None) or importlib.import_module(f"{place.__name__}.{part}")
            except (AttributeError, ImportError):
                break
        else:
            return True
        if parts[0] not in sys.modules:
            return False
    return False


def test_every_reference_in_a_docstring_leads_to_a_name_that_is_there():
    broken = []
    for module, tree in sources().items():
        scopes = [
            (tree, None),
            *((node, node.name) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)),
        ]
        for holder, scope in scopes:
            for node in [holder, *ast.iter_child_nodes(holder)]:
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    names = ROLE.findall(ast.get_docstring(node) or "")
                    inside = node.name if isinstance(node, ast.ClassDef) else scope
                    broken += [(module, name) for name in names if not leads_somewhere(name, module, inside)]
    assert sorted(set(broken)) == []


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_docstring(module):
    module = importlib.import_module(module)
    assert module.__doc__
    for name in getattr(module, "__all__", ()):
        member = getattr(module, name)
        if inspect.ismodule(member) or inspect.isroutine(member) or inspect.isclass(member):
            assert inspect.getdoc(member), name
        for part, value in vars(member).items() if inspect.isclass(member) else ():
            if not part.startswith("_") and (inspect.isroutine(value) or isinstance(value, property)):
                assert inspect.getdoc(getattr(member, part)), f"{name}.{part}"


# ------------------------------------------------------------- the API reference


class Links(HTMLParser):
    """The anchors of a page and what it links to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids, self.targets = set(), set()
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids.add(given.get("id"))
        if tag == "a" and not given.get("href", "http").startswith(("http", "mailto")):
            self.targets.add(given["href"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The module specification")  # commlib.cost is in commlib.__all__, too
def test_every_link_of_the_reference_leads_to_a_page_and_an_anchor(tmp_path):
    build(tmp_path)
    pages = {page: Links(page) for page in tmp_path.rglob("*.html")}
    assert {tmp_path / f"{module.replace('.', '/')}.html" for module in MODULES} <= set(pages)
    broken = []
    for page, links in pages.items():
        for target in links.targets:
            path, _, anchor = target.partition("#")
            other = (page.parent / path).resolve() if path else page
            # pdoc also links members that it leaves out: those that a class has from Keras, or sets in itself
            if other not in pages or {anchor, anchor.rpartition(".")[0]}.isdisjoint(pages[other].ids | {""}):
                broken.append((str(page.relative_to(tmp_path)), target))
    assert broken == []
