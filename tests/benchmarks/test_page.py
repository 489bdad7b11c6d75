"""benchmarks/README.md, the pages of docs/ with records, and their pictures show the newest records."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from benchmarks import claims
from benchmarks.draw_benchmarks import FOLDER, PAGES, ROWS, fingerprints, page, planned
from benchmarks.drawing.pages import Results, newest, with_block
from benchmarks.jobs import record_of
from tests.launching import ROOT
from training.bench.record import Record, Seconds, code_of

README = FOLDER / "README.md"
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"
FOUND = newest(FOLDER / "results")


# ------------------------------------------------------------- the records that are there


def test_the_page_shows_the_newest_records_and_stays_short():
    # To write it again: python -m benchmarks.draw_benchmarks
    text = README.read_text()
    assert text == page(text, FOUND)
    assert len(text.split()) <= 5000
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert table.count("\n") <= ROWS + 2


def test_the_readme_claims_what_the_newest_records_say():
    text = (ROOT / "README.md").read_text()
    assert with_block(text, "claims", claims.table(FOUND)) == text
    text = (ROOT / "docs" / "validation.md").read_text()
    assert with_block(text, "planned", planned(FOUND)) == text


def test_every_picture_shows_the_newest_records_and_is_shown():
    for name, digest in fingerprints(FOUND).items():
        (description,) = ElementTree.parse(FOLDER / name).iter(DESCRIPTION)
        assert description.text == digest, name
    shown = {path.name for path in FOLDER.glob("*.svg")}
    assert shown == set(fingerprints(FOUND)) == set(re.findall(r"\]\(([^/)]*\.svg)\)", README.read_text()))


@pytest.mark.parametrize("measured", PAGES, ids=lambda measured: measured.kind)
def test_pages_of_docs_show_the_newest_records(measured):
    text = (ROOT / measured.path).read_text()
    assert measured.with_measured(text, FOUND) == text


def test_records_of_code_that_has_changed_since_are_told_from_those_of_todays():
    record = Record("pto", {}, "slices", Seconds.of([1.0]))
    today = record_of(json.loads(record.line()))
    older = replace(today, more=today.more | {"code": code_of("cache")})
    for records, is_current in (([today], True), ([today, older], False), ([record], False)):
        assert Results("pto", FOLDER, records).is_current == is_current
