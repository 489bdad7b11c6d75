"""What docs/ says and draws is what is there."""

import ast
import doctest
import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.draw_reducers import simulate
from commlib import CODECS, REDUCERS, SELECTORS, LinkBytes
from commlib.reducers import reducer_options
from tests.launching import ROOT

PAGE = (ROOT / "docs" / "reducers.md").read_text()
SECTIONS = {
    title.strip("`"): body
    for title, body in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
}
INTRA, INTER = False, True


def texts(picture):
    """Return the texts of an SVG."""
    return [element.text for element in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]


def rows(section):
    """Return what the first column of the section's tables names."""
    return re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", SECTIONS[section], re.MULTILINE)))


# ------------------------------------------------------------- the page


def test_the_reducers_have_a_section_each_in_the_order_of_the_table():
    assert [title for title in SECTIONS if title in REDUCERS] == list(REDUCERS)
    table_of_contents = PAGE.split("\n## ")[0]
    assert re.findall(r"\[`(\w+)`\]\(#\1\)", table_of_contents) == list(REDUCERS)


@pytest.mark.parametrize("name", REDUCERS)
def test_a_section_shows_one_picture_which_is_there(name):
    (path,) = re.findall(r"^!\[.+\]\((.+)\)$", SECTIONS[name], re.MULTILINE)
    assert path == f"reducers/{name}.svg"
    assert (ROOT / "docs" / path).is_file()


@pytest.mark.parametrize("name", REDUCERS)
def test_a_section_names_the_options_of_the_code_and_their_defaults(name):
    (options,) = re.findall(r"^- \*\*Options:\*\* (.*?)\n(?=- |\n)", SECTIONS[name], re.MULTILINE | re.DOTALL)
    named = {option: ast.literal_eval(default) for option, default in re.findall(r"`(\w+)=(.+?)`", options)}
    assert named == reducer_options(name)


@pytest.mark.parametrize("name", REDUCERS)
def test_a_section_says_what_is_sent_and_kept_and_where_it_ends(name):
    items = re.findall(r"^- \*\*(.+?):?\*\*", SECTIONS[name], re.MULTILINE)
    assert items == ["One rank sends", "Residual", "Differs", "Options", "Limits"]


def test_the_selectors_and_the_codecs_are_those_of_the_code():
    assert rows("Selectors") == list(SELECTORS)
    assert rows("Codecs") == list(CODECS)


@pytest.mark.parametrize(("world_size", "share", "words"), [(8, 1 / 6, "a sixth"), (32, 1 / 2, "half of it")])
def test_what_the_papers_gtopk_loses_is_what_the_page_says(world_size, share, words):
    """gTop-k's algorithms 3 and 4 with vectors that are dense but for their zeros; P is a power of two."""
    generator = np.random.default_rng(5)
    common, size, k = generator.normal(size=50_000), 50_000, 500
    own = [common + generator.normal(size=size) for _ in range(world_size)]

    def top_k(vector):
        return np.where(np.abs(vector) >= np.partition(np.abs(vector), -k)[-k], vector, 0)

    selected = [top_k(gradient) for gradient in own]
    merged = selected
    while len(merged) > 1:
        merged = [top_k(left + right) for left, right in zip(merged[::2], merged[1::2], strict=True)]
    (result,) = merged
    taken_back = sum(np.where(result == 0, vector, 0) for vector in selected)  # algorithm 4, line 10
    lost = sum(selected) - result - taken_back
    # seeds 0 … 5 gave 15.0 … 17.2 % and 47.4 … 52.7 %
    assert np.abs(lost).sum() / np.abs(result).sum() == pytest.approx(share, abs=0.04)
    assert f"{words} " in " ".join(SECTIONS["gtopk"].split())


@pytest.mark.parametrize("name", ["docs/linear.md", "docs/reducers.md", "docs/training.md"])
def test_the_examples_print_what_the_page_shows(name):
    page = (ROOT / name).read_text()
    examples = doctest.DocTestParser().get_doctest(page, {}, name, name, 0)
    assert 0 < len(examples.examples) == page.count("\n>>> ")
    result = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF).run(examples)
    assert result.failed == 0


# ------------------------------------------------------------- the pictures


@pytest.mark.parametrize("name", REDUCERS)
def test_the_picture_is_of_the_code_as_it_is(name):
    # The caption holds the bytes and the time. To draw it again: python -m benchmarks.draw_reducers
    assert simulate(name).caption in texts(ROOT / "docs" / "reducers" / f"{name}.svg")


@pytest.mark.parametrize("name", REDUCERS)
def test_the_picture_is_small_and_stands_on_white(name):
    path = ROOT / "docs" / "reducers" / f"{name}.svg"
    assert path.stat().st_size < 60_000
    background = next(ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}path"))
    assert background.get("style") == "fill: #ffffff"
    assert {"message inside a node", "message between nodes", "µs since the step began"} < set(texts(path))


def test_the_bytes_of_the_caption_are_those_of_the_messages():
    step = simulate("torus2d")  # in which all is payload
    by_link = {INTRA: 0, INTER: 0}
    for message in step.transfers:
        by_link[message.is_inter] += message.message_bytes
    # 8 ranks: (d/8 and d/8) values between nodes, twice three quarters of d inside
    assert by_link == {INTRA: 8 * 2 * 75_000 * 4, INTER: 8 * 2 * 12_500 * 4}
    assert step.sent == LinkBytes(intra=by_link[INTRA], inter=by_link[INTER])
    assert f"{by_link[INTRA]:,} bytes inside nodes, {by_link[INTER]:,} bytes between nodes" in step.caption


def test_the_translations_and_bleu_of_the_page_are_those_of_the_recorded_run():
    def run(name):
        records = [json.loads(line) for line in (ROOT / "docs/training" / name).read_text().splitlines()]
        return records, {each["epoch"] + 1: each["bleu"] for each in records if each["kind"] == "epoch"}

    records, tested = run("ende_transformer.jsonl")
    _, dense = run("ende_transformer_dense.jsonl")
    page = (ROOT / "docs/training.md").read_text()
    shown = re.findall(r"(\d+\.\d) after epoch (\d+)", page)
    assert shown == [(f"{tested[epoch]:.1f}", str(epoch)) for epoch in (10, 20, 30)]
    assert f"`reducer=dense` ends at\n{dense[30]:.1f} (" in page
    (*_, last) = (each for each in records if each["kind"] == "examples")
    rows = [
        f"| {each['source']} | {each['translation']} | {each['reference']} |" for each in last["examples"]
    ]
    assert len(rows) == 3
    assert all(row in page for row in rows)
