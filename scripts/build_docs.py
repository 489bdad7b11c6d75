"""Build the documentation as a site: python scripts/build_docs.py, then open build/site/index.html.

The pages are laid out in build/pages as they lie in the repository, with the files that they link: so links
lead where they do there. mkdocs.yml says what the site is like, and refuses links that lead nowhere.
"""

import logging
import re
import shutil
import sys
from pathlib import Path

from mkdocs.commands.build import build
from mkdocs.config import load_config

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import api_reference

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ROOT / "mkdocs.yml"
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "datacache/README.md", "benchmarks/README.md"]
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


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")  # where mkdocs says which link is dead
    pages = ROOT / "build" / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    lay_out(pages)
    api_reference.build(pages / "api")
    build(load_config(str(SETTINGS)))
