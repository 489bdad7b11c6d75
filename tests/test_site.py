"""The site of the documents builds without a dead link, and its reference of configurations has every key."""

import logging
import re

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

from scripts import build_docs, config_reference
from training.config.config import Config
from training.config.optimizers import OPTIMIZERS
from training.config.schedules import SCHEDULES
from training.tasks import TASKS


def build_site(pages, site, **changes):
    build(load_config(str(build_docs.SETTINGS), docs_dir=str(pages), site_dir=str(site), **changes))


def test_the_site_has_every_page_and_no_dead_link(tmp_path):
    pages, site = tmp_path / "pages", tmp_path / "site"
    build_docs.lay_out(pages)
    (pages / "api").mkdir()
    (pages / "api" / "index.html").touch()  # in place of the API reference, which takes a while
    build_site(pages, site)  # ends with an error where a page is not in the navigation, or a link is dead
    assert (site / "index.html").is_file()
    for page in pages.glob("docs/*.md"):
        assert (site / "docs" / f"{page.stem}.html").is_file()
    assert (site / "configs" / "digits.yaml").is_file()  # which the first page links
    assert (site / "commlib" / "gpu" / "kernels" / "files.html").is_file()  # of a folder that a page links
    assert "unpkg.com" not in (site / "index.html").read_text()  # nothing is loaded from elsewhere


def test_dead_links_and_pages_outside_of_the_navigation_are_refused(tmp_path, caplog):
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "training.md").write_text("[dead](nowhere.md) [dead](training.md#no-heading)")
    (pages / "new.md").touch()
    with caplog.at_level(logging.WARNING), pytest.raises(Abort, match="strict"):
        build_site(pages, tmp_path / "site", nav=["training.md"])
    assert all(said in caplog.text for said in ("nowhere.md", "no-heading", "not included in the"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The module specification")  # commlib.cost is in commlib.__all__, too
def test_every_link_of_the_reference_leads_to_a_page_and_an_anchor(tmp_path):
    build_docs.write_reference(tmp_path)
    pages = {page: page.read_text() for page in tmp_path.rglob("*.html")}
    assert {tmp_path / f"{module.replace('.', '/')}.html" for module in build_docs.MODULES} <= set(pages)
    ids = {page: {"", *re.findall(r' id="([^"]*)"', text)} for page, text in pages.items()}
    broken = []
    for page, text in pages.items():
        for target in set(re.findall(r'<a [^>]*href="(?!http|mailto|\$)([^"]*)"', text)):
            path, _, anchor = target.partition("#")
            other = (page.parent / path).resolve() if path else page
            # pdoc also links members that it leaves out: those that a class has from Keras, or sets in itself
            if {anchor, anchor.rpartition(".")[0]}.isdisjoint(ids.get(other, ())):
                broken.append((str(page.relative_to(tmp_path)), target))
    assert broken == []


# ------------------------------------------------------------- the configuration reference


def rows(title):
    """Return the rows of a section's table by key: what it takes, the default, and the meaning."""
    text = config_reference.PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    cells = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {key.strip("`"): rest for key, *rest in cells}


def test_the_configuration_reference_is_what_the_schema_says():
    # To write it again: python scripts/config_reference.py
    assert config_reference.PAGE.read_text() == config_reference.page()


def test_the_configuration_reference_has_every_key_with_its_meaning():
    titles = config_reference.records()
    phases = {task.Phase for task in TASKS.values()}
    assert {Config, *OPTIMIZERS.values(), *SCHEDULES.values(), *phases} <= set(titles)
    for record, title in titles.items():
        assert all(len(row) == 3 and all(row) for row in rows(title).values()), title
        described = {key for kind in record.__mro__ if kind in titles for key in rows(titles[kind])}
        assert described == set(record.model_fields), title
