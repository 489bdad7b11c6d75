"""The site of the documents builds without a dead link, and its reference of configurations has every key."""

import logging

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

from scripts import build_docs, config_reference
from training.config.config import Config
from training.config.optimizers import OPTIMIZERS
from training.config.schedules import SCHEDULES
from training.tasks import TASKS


def lay_out(folder):
    """Lay the pages out, with an empty page in place of the API reference, which takes a while."""
    build_docs.lay_out(folder)
    (folder / "api").mkdir()
    (folder / "api" / "index.html").touch()


def build_site(pages, site, **changes):
    build(load_config(str(build_docs.SETTINGS), docs_dir=str(pages), site_dir=str(site), **changes))


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents") / "pages"
    lay_out(folder)
    return folder


def test_the_site_has_every_page_and_no_dead_link(pages, tmp_path):
    build_site(pages, tmp_path)  # ends with an error where a page is not in the navigation, or a link is dead
    assert (tmp_path / "index.html").is_file()
    for page in pages.glob("docs/*.md"):
        assert (tmp_path / "docs" / f"{page.stem}.html").is_file()
    assert (tmp_path / "configs" / "digits.yaml").is_file()  # which the first page links
    assert (
        tmp_path / "commlib" / "gpu" / "kernels" / "files.html"
    ).is_file()  # of a folder that a page links
    assert "unpkg.com" not in (tmp_path / "index.html").read_text()  # nothing is loaded from elsewhere


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[dead](nowhere.md)", "nowhere.md"),
        ("[dead](training.md#nowhere)", "nowhere"),
        ("", "not included in the"),
    ],
    ids=["a page that is not there", "a heading that is not there", "a page outside of the navigation"],
)
def test_the_site_is_refused_with(text, said, tmp_path, caplog):
    pages = tmp_path / "pages"
    pages.mkdir()
    for name in ("training.md", "new.md"):
        (pages / name).write_text(text)
    with caplog.at_level(logging.WARNING), pytest.raises(Abort, match="strict"):
        build_site(pages, tmp_path / "site", nav=["training.md", *(["new.md"] if text else [])])
    assert said in caplog.text


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


def test_a_key_is_described_by_its_type_its_default_and_its_docstring():
    assert rows("`cache`")["shards"][:2] == ["a whole number from 1", "`1`"]
    assert rows("The configuration")["precision"] == [
        "`float32`, `float16`, `bfloat16`",
        "`float32`",
        "Precision of the model; weights and gradients are float32. float16 scales the loss.",
    ]
    assert rows("The configuration")["optimizer"][:2] == ["[keys](#optimizer)", "`sgd`"]
    assert rows("`phases.augmentation`")["area"][:2] == ["pair: number in (0, 1]", "`[0.08, 1.0]`"]
    assert rows("`optimizer`: `adam`")["epsilon"][:2] == ["a number above 0", "`1.0e-08`"]
