"""docs/pto.md says what is there, and shows the newest records of ``cloudtrain bench pto``."""

import doctest
import re

import pytest

from benchmarks.draw_benchmarks import PAGES, page, write
from benchmarks.drawing.pages import BEGIN, END
from benchmarks.drawing.results import newest
from tests.launching import DIGITS, ROOT
from tests.test_benchmarks import fingerprint, keep, seconds, texts
from training.config.config import load

PATH = ROOT / "docs" / "pto.md"
PAGE = PATH.read_text()


def line(subject: str, peer: str = "local", ranks: int = 2, operation: str = "norms", **keys) -> dict:
    """Return a record: a call takes 2 ms beside 8, the processor 1 ms beside 3."""
    return {
        "bench": "pto",
        "case": {"operation": operation, "network": "vgg19", "ranks": ranks, "quick": False},
        "subject": subject,
        "peer": peer,
        "seconds": seconds(2e-3),
        "peer_seconds": seconds(8e-3),
        "ratio": 4.0,
        "bytes": {"intra": 160, "inter": 0},
        "cpu_seconds": seconds(1e-3),
        "cpu_seconds_of_busiest": seconds(1.5e-3),
        "peer_cpu_seconds": seconds(3e-3),
        "cpu_ratio": 3.0,
        "balance": {"slices": 1.0, "layers": 1.25, "by layer": 1.83},
        "choice": {"in_parts": True, "reason": "norms in parts by slices: it pays", "seconds": None},
        "machine": {"cpu": "abacus", "cores": 2, "memory_gib": 4.0},
        "command": "cloudtrain bench pto --json",
        **keys,
    }


@pytest.fixture
def folder(tmp_path):
    """A folder of benchmarks with records of pto at two numbers of ranks."""
    (tmp_path / "results").mkdir()
    norms = [line(way, ranks=ranks) for ranks in (2, 4) for way in ("slices", "layers", "auto")]
    lars = [line("slices", peer, operation="lars") for peer in ("local", "in graph")]
    keep(tmp_path, "2026-01-02-pto", [*norms, *lars])
    return tmp_path


@pytest.mark.slow
def test_the_examples_print_what_the_page_shows():
    examples = doctest.DocTestParser().get_doctest(PAGE, {}, "docs/pto.md", "docs/pto.md", 0)
    assert len(examples.examples) == PAGE.count("\n>>> ")
    result = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF).run(examples)
    assert result.failed == 0


def test_the_configuration_that_it_shows_is_one():
    (block,) = re.findall(r"```yaml\noptimizer:\n(.*?)```", PAGE, re.DOTALL)
    keys = [re.sub(r"\s*#.*", "", row).strip().replace(": ", "=") for row in block.splitlines()]
    optimizer = load(DIGITS, [f"optimizer.{key}" for key in keys]).optimizer
    assert (optimizer.name, optimizer.weight_decay, optimizer.norms) == ("lars", 5e-5, "auto")


(OF_PTO,) = (each for each in PAGES if each.kind == "pto")


@pytest.mark.parametrize("measured", PAGES, ids=lambda measured: measured.kind)
def test_the_page_shows_the_newest_results(measured):
    # To write it again: python -m benchmarks.draw_benchmarks
    text = (ROOT / measured.path).read_text()
    assert measured.with_measured(text, newest(ROOT / "benchmarks" / "results")) == text


def test_the_page_gets_the_tables_that_the_benchmarks_have(folder):
    found = newest(folder / "results")
    text = OF_PTO.with_measured(f"before\n{BEGIN}old\n{END}after\n", found)
    assert text.startswith(f"before\n{BEGIN}\n`cloudtrain bench pto --json` on 2 cores of abacus, 4.0 GiB (")
    assert text.endswith(f"\n\n{END}after\n")
    assert "old" not in text
    assert "(../benchmarks/results/2026-01-02-pto.jsonl)" in text
    assert "(../benchmarks/pto.svg)" in text
    for each in (text, page(found)):
        rows = [row for row in each.splitlines() if row.startswith("| `vgg19`")]
        numbers = "1.000 | 1.500"
        assert rows == [
            f"| `vgg19` | {way} | {numbers} | {peer} | 3 | 2.000 | 4 |"
            for way, peer in [(way, "local") for _ in (2, 4) for way in ("slices", "layers", "auto")]
            + [("slices", "local"), ("slices", "in graph")]
        ]
        assert each.count("- vgg19: norms in parts by slices: it pays\n") == 2
        assert (
            each.count("- vgg19: largest load over the mean: slices 1.000, layers 1.250, by layer 1.830\n")
            == 2
        )


def test_without_records_the_page_says_so_and_without_marks_it_is_refused():
    assert "Nothing has been measured yet" in OF_PTO.with_measured(f"{BEGIN}{END}", {})
    for text in ("", END + BEGIN, BEGIN):
        with pytest.raises(ValueError, match=r"docs/pto\.md: expected one line"):
            OF_PTO.with_measured(text, {})


def test_the_picture_has_a_column_a_number_of_ranks_and_says_how_many_times(folder):
    write(folder)
    picture = folder / "pto.svg"
    drawn = texts(picture)
    assert {"2 ranks", "4 ranks", "CPU ms a rank", "ms a call", "local", "slices", "by layer"} < set(drawn)
    assert drawn.count("VGG-19") == 6  # three rows of two columns
    assert drawn.count("3.00×") == drawn.count("4.00×") == 6  # of three ways, CPU and wall
    assert drawn.count("1.83") == 2
    assert fingerprint(picture) == newest(folder / "results")["pto"].fingerprint
    first = picture.read_text()
    write(folder)
    assert picture.read_text() == first
