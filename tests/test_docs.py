"""What docs/ says and draws is what is there."""

import ast
import doctest
import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import draw_reducers
from benchmarks.draw_reducers import Line, Step, draw, lane, lines, simulate
from commlib import CODECS, REDUCERS, SELECTORS, LinkBytes
from commlib.reducers import reducer_options
from commlib.transport.simulated import Transfer
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


def transfer(source, destination, message_bytes, is_inter, sent, left, arrived):
    """Return a message; its times are in µs."""
    return Transfer(source, destination, message_bytes, is_inter, sent / 1e6, left / 1e6, arrived / 1e6)


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


def test_a_step_holds_the_meetings_that_no_record_holds():
    step = simulate("oktopk")
    # all 8 ranks wait until their settings are compared, and later for the counts of all regions
    assert len(step.meetings) == 2 * 8
    assert sorted(rank for rank, _, _ in step.meetings) == [rank for rank in range(8) for _ in range(2)]
    assert all(step.begun <= begun < ended <= step.ended for _, begun, ended in step.meetings)
    assert {ended for _, _, ended in step.meetings[:8]} == {step.meetings[0][2]}


def test_a_message_is_a_line_from_its_turn_at_the_port_to_its_arrival():
    record = [
        transfer(1, 0, 8_000, INTRA, sent=500, left=510, arrived=512),
        transfer(1, 2, 8_000, INTRA, sent=500, left=520, arrived=523),  # waits for the one before
        transfer(1, 5, 8_000, INTER, sent=500, left=533, arrived=540),  # over a link of its own
        transfer(2, 1, 8_000, INTRA, sent=500, left=510, arrived=511),  # from another rank
        transfer(1, 3, 8_000, INTRA, sent=600, left=610, arrived=611),  # long after
    ]
    drawn = {(line.begin[1], line.end[1]): line for line in lines(record, begun=400e-6)}
    assert len(drawn) == 5
    times = {ends: (line.begin[0], line.end[0]) for ends, line in drawn.items()}
    assert times[lane(1), lane(0)] == pytest.approx((100, 112))
    assert times[lane(1), lane(2)] == pytest.approx((110, 123))
    assert times[lane(1), lane(5)] == pytest.approx((100, 140))
    assert times[lane(2), lane(1)] == pytest.approx((100, 111))
    assert times[lane(1), lane(3)] == pytest.approx((200, 211))
    assert [line.is_inter for line in drawn.values()].count(INTER) == 1
    assert drawn[lane(1), lane(5)].is_inter


def test_the_turns_follow_the_messages_whatever_their_order_in_the_record():
    first = transfer(0, 1, 8, INTRA, sent=0, left=10, arrived=10)
    second = transfer(0, 1, 8, INTRA, sent=0, left=20, arrived=20)
    expected = [
        Line(begin=(0, 0), end=(10, -1), width=0.4, is_inter=INTRA),
        Line(begin=(10, 0), end=(20, -1), width=0.4, is_inter=INTRA),
    ]
    for record in ([first, second], [second, first]):
        for line, right in zip(lines(record, begun=0.0), expected, strict=True):
            assert line.begin == pytest.approx(right.begin)
            assert line.end == pytest.approx(right.end)


def test_a_line_is_the_wider_the_more_bytes_and_wide_ones_are_drawn_first():
    sizes = [8, 100_000, 10_000, 40_000]
    record = [transfer(rank, 0, size, INTRA, sent=0, left=9, arrived=9) for rank, size in enumerate(sizes, 1)]
    drawn = lines(record, begun=0.0)
    assert [line.begin[1] for line in drawn] == [lane(2), lane(4), lane(3), lane(1)]
    assert [line.width for line in drawn] == [2.9, 2.0, 1.2, 0.4]  # 0.4 + 0.8·√(bytes/10,000)


def test_one_step_makes_one_file_byte_for_byte(tmp_path):
    record = [transfer(0, 1, 8, INTRA, 5, 6, 7), transfer(3, 4, 80_000, INTER, 5, 40, 50)]
    step = Step("mine", record, [(0, 7e-6, 50e-6)], begun=5e-6, ended=50e-6, sent=LinkBytes(8, 80_000))
    for name in ("first.svg", "second.svg"):
        draw(step, tmp_path / name)
    drawn = (tmp_path / "first.svg").read_text()
    assert drawn == (tmp_path / "second.svg").read_text()
    assert draw_reducers.INSIDE in drawn
    assert draw_reducers.BETWEEN in drawn
    assert "date" not in drawn
    assert "mine: 8 bytes inside nodes, 80,000 bytes between nodes, 45 µs" in texts(tmp_path / "first.svg")
    assert {f"rank {rank}" for rank in range(8)} | {"node 0", "node 1"} < set(texts(tmp_path / "first.svg"))


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
