"""benchmarks/README.md, the pages of docs/ with records, and their pictures show the newest records."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from benchmarks.draw_benchmarks import FOLDER, ROWS, drawn, texts
from benchmarks.drawing.pages import Results, fingerprint, newest, with_block
from benchmarks.jobs import record_of
from tests.launching import ROOT
from training.bench.record import Record, Seconds, code_of

README = FOLDER / "README.md"
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"
FOUND = newest(FOLDER / "results")
TEXTS = texts(FOUND)


# ------------------------------------------------------------- the records that are there


@pytest.mark.parametrize("page", TEXTS)
def test_a_page_shows_the_newest_records(page):
    # To write it again: python -m benchmarks.draw_benchmarks
    text = (ROOT / page).read_text()
    for name, block in TEXTS[page].items():
        assert with_block(text, name, block) == text, name


def test_the_page_of_benchmarks_stays_short():
    text = README.read_text()
    assert len(text.split()) <= 5000
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert table.count("\n") <= ROWS + 2


def test_every_picture_shows_the_newest_records_and_is_shown():
    digests = {section.picture: fingerprint(records) for section, records in drawn(FOUND)}
    for name, digest in digests.items():
        (description,) = ElementTree.parse(FOLDER / name).iter(DESCRIPTION)
        assert description.text == digest, name
    shown = {path.name for path in FOLDER.glob("*.svg")}
    assert shown == set(digests) == set(re.findall(r"\]\(([^/)]*\.svg)\)", README.read_text()))


def test_records_of_code_that_has_changed_since_are_told_from_those_of_todays():
    record = Record("pto", {}, "slices", Seconds.of([1.0]))
    today = record_of(json.loads(record.line()))
    older = replace(today, more=today.more | {"code": code_of("cache")})
    for records, is_current in (([today], True), ([today, older], False), ([record], False)):
        assert Results("pto", FOLDER, records).is_current == is_current
