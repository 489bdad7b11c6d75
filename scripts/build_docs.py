"""Build the documentation as a site: python scripts/build_docs.py, then open build/site/index.html.

The pages are copied to build/pages under the paths that they have in the repository, with the files that
they link to, so that relative links work. mkdocs.yml configures the site, and broken links are errors. The
API reference is made from the docstrings.
"""

import logging
import os
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pdoc
from mkdocs.commands.build import build
from mkdocs.config import load_config

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from commlib.tf_logging import without_noise

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ROOT / "mkdocs.yml"
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "datacache/README.md", "benchmarks/README.md"]
MODULES = (  # and what their __all__ names
    *("commlib", "commlib.cost", "commlib.gpu", "commlib.keras", "commlib.reducers", "commlib.selection"),
    *("commlib.tensorflow", "commlib.tuning.probe", "commlib.tuning.tuner", "commlib.wire", "commlib.work"),
    *("datacache", "datacache.sources", "datacache.tensorflow"),
    *("pto", "pto.keras", "pto.sharded"),
    *("training", "training.config.config", "training.config.records"),
    *(f"commlib.{name}" for name in ("torch", "jax") if find_spec(name)),
)
LINK = re.compile(r"(?<=\]\()[^)\s#:]+(?=[)#])")  # to a file, without the heading


def lay_out(folder: Path) -> None:
    """Copy the pages, the files that they link, and those in folders that they link, with a list."""
    _copy(ROOT / "docs" / "site.css", folder)
    for page in [*(ROOT / name for name in PAGES), *(ROOT / "docs").glob("*.md")]:
        text = page.read_text()
        for link in set(LINK.findall(text)):
            target = (page.parent / link).resolve()
            if target.is_dir():
                text = re.sub(rf"(?<=\]\(){re.escape(link)}(?=\))", f"{link}/files.md", text)
                _list(target, folder)
            elif target.is_file() and target.suffix != ".md":
                _copy(target, folder)
        _place(page, folder).write_text(text)


def _list(source: Path, folder: Path) -> None:
    files = sorted(each for each in source.iterdir() if each.is_file() and each.suffix != ".md")
    for file in files:
        _copy(file, folder)
    lines = [f"# {source.relative_to(ROOT)}", "", *(f"- [{file.name}]({file.name})" for file in files)]
    _place(source / "files.md", folder).write_text("\n".join(lines))


def _copy(file: Path, folder: Path) -> None:
    shutil.copyfile(file, _place(file, folder))


def _place(file: Path, folder: Path) -> Path:
    place = folder / file.relative_to(ROOT)
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def write_reference(folder: Path) -> None:
    """Write a page of the API reference for each module that users import from."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    with without_noise():
        import training

        vars(training)["Trainer"] = training.Trainer  # imported at the first access, which pdoc does not make
        pdoc.render.configure(docformat="restructuredtext", show_source=False)
        pdoc.pdoc(*MODULES, output_directory=folder)


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")  # where mkdocs says which link is dead
    pages = ROOT / "build" / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    lay_out(pages)
    write_reference(pages / "api")
    build(load_config(str(SETTINGS)))
