"""benchmarks/README.md and its pictures show the newest records."""

import json
import re
from xml.etree import ElementTree

import pytest
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from benchmarks.draw_benchmarks import PICTURES, page, write
from benchmarks.drawing import race, style
from benchmarks.drawing.cluster import all_cells, bars, cells, draw
from benchmarks.drawing.results import Results, newest
from tests.launching import ROOT
from training.bench.record import Record

FOLDER = ROOT / "benchmarks"
SVG, DESCRIPTION = "{http://www.w3.org/2000/svg}", "{http://purl.org/dc/elements/1.1/}description"


def texts(picture):
    """Return the texts of an SVG."""
    return [element.text for element in ElementTree.parse(picture).iter(f"{SVG}text")]


def seconds(median: float) -> dict:
    return {"median": median, "min": median / 2, "max": median * 2, "runs": 20}


def line(subject: str, median: float, density: float | None = None, **keys) -> dict:
    """Return a record of a cluster; its stages take an eighth of its time each."""
    stage = {"min": 0.0, "mean": median / 8, "max": median}
    case = {"size": 1000, "density": density, "wire": None, "ranks_of_nodes": [2, 2], "rate": "1gbit"}
    case |= {"quick": False}
    return {
        "bench": "reducers",
        "case": case | {"mpi_algorithm": "ring"} | keys.pop("case", {}),
        "subject": subject,
        "peer": "mpi",
        "seconds": seconds(median),
        "peer_seconds": seconds(0.8),
        "ratio": 0.8 / median,
        "bytes": {"intra": 5000, "inter": 2_500_000},
        "entries": {"selected": 10, "applied": 20},
        "baselines": {"mpi": seconds(0.8), "horovod": seconds(0.9), "bare": seconds(0.1)},
        "stages": dict.fromkeys(("select", "intra", "inter", "combine"), stage),
        "machine": {"cpu": "abacus", "cores": 2, "memory_gib": 4.0},
        "command": "cloudtrain bench reducers --cluster --json",
        **keys,
    }


def allreduce(subject: str, median: float, density: float | None = None) -> dict:
    alone = line(subject, median, density, peer=None, peer_seconds=None, ratio=None, bytes=None, entries=None)
    del alone["baselines"]
    return alone | ({} if density else {"stages": None})


SWEEP = [
    line("dense", 0.7, bench="probe", case={"mpi_algorithm": "default"}, peer_seconds=seconds(1.75)),
    line("dense", 0.7, bench="probe"),
    line("dense", 0.75),
    line("hitopk", 0.2, 0.01),
    allreduce("mpi", 0.8),
    allreduce("bare", 0.1, 0.01),
    line("hitopk", 0.16, 0.001, case={"wire": "gap+fp16"}),
    allreduce("bare", 0.05, 0.001),
]


@pytest.fixture
def folder(tmp_path):
    """A folder of benchmarks with two days of records of a cluster."""
    (tmp_path / "results").mkdir()
    keep(tmp_path, "2026-01-02-cluster", SWEEP)
    keep(tmp_path, "2026-01-01-cluster", [line("dense", 9.0)])
    return tmp_path


def keep(folder, name: str, records: list[dict]) -> None:
    path = folder / "results" / f"{name}.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


# ------------------------------------------------------------- what is kept with the project


def test_the_page_is_of_the_newest_results():
    # To write it again: python -m benchmarks.draw_benchmarks
    assert (FOLDER / "README.md").read_text() == page(newest(FOLDER / "results"))


def test_the_pictures_are_of_the_newest_results():
    found = newest(FOLDER / "results")
    expected = {cell.picture: cell.fingerprint for cell in all_cells(found.values())}
    expected |= {each.picture: each.fingerprint for each in race.all_pictures(found.values())}
    expected |= {f"{kind}.svg": found[kind].fingerprint for kind in PICTURES if kind in found}
    assert {path.name: fingerprint(path) for path in FOLDER.glob("*.svg")} == expected


def test_every_legend_lies_within_its_picture():
    legends = 0
    for path in [*FOLDER.glob("*.svg"), *(ROOT / "docs").rglob("*.svg")]:
        picture = ElementTree.parse(path).getroot()
        width = float(picture.get("viewBox").split()[2])
        for text in picture.iterfind(f".//{SVG}g[@id='legend_1']//{SVG}text"):
            font = FontProperties(
                family="DejaVu Sans", size=float(re.search(r"font-size: ([\d.]+)px", text.get("style"))[1])
            )
            long, _, _ = text_to_path.get_text_width_height_descent(text.text, font, ismath=False)
            assert "text-anchor: start" in text.get("style")
            assert 0 <= float(text.get("x")) < float(text.get("x")) + long <= width, (path.name, text.text)
            legends += 1
    assert legends > 100


def fingerprint(picture) -> str:
    (description,) = ElementTree.parse(picture).iter(DESCRIPTION)
    return description.text


# ------------------------------------------------------------- the page


def test_only_the_newest_file_of_a_kind_counts_and_empty_ones_do_not(folder):
    keep(folder, "2026-01-03-cluster", [])
    keep(folder, "2026-01-01-cluster-4x1", SWEEP)
    assert {kind: results.path.name for kind, results in newest(folder / "results").items()} == {
        "cluster": "2026-01-02-cluster.jsonl",
        "cluster-4x1": "2026-01-01-cluster-4x1.jsonl",
    }


def test_a_file_whose_name_says_no_day_is_refused(folder):
    keep(folder, "mine", SWEEP)
    with pytest.raises(ValueError, match=r"mine\.jsonl: expected a name as 2026-11-21-reducers\.jsonl"):
        newest(folder / "results")


def test_a_cluster_s_table_has_a_row_a_contender_and_density(folder):
    text = page(newest(folder / "results")).split("### Between machines")[0]
    rows = [row.split(" | ") for row in text.splitlines() if row.startswith("| `")]
    assert [(row[0], row[1]) for row in rows] == [
        ("| `dense`", "–"),
        ("| `hitopk`", "1%"),
        ("| `hitopk gap+fp16`", "0.1%"),
        ("| `mpi`", "–"),
        ("| `bare`", "1%"),
        ("| `bare`", "0.1%"),
    ]
    stages = "25.000 | 25.000 | 25.000 | 25.000"
    hitopk = f"| `hitopk` | 1% | 200.0 | 100.0 | 400.0 | mpi | 4 | 0.5 | {stages} | 5 | 2,500 | 10 | 20 |"
    assert hitopk in text
    assert "| `mpi` | – | 800.0 | 400.0 | 1,600.0 | – | – | – | – | – | – | – | – | – | – | – |" in text


def test_a_cluster_s_section_says_how_it_was_measured_and_what_mpi_can_do(folder):
    text = page(newest(folder / "results"))
    assert "### 1gbit, 1,000 entries, 4 ranks" not in text
    assert "### 1gbit, 1,000 entries, 2 nodes × 2 ranks" in text
    assert "`cloudtrain bench reducers --cluster --json` on 2 cores of abacus, 4.0 GiB (" in text
    expected = "default 1,750.0 ms (0.4 × `dense`), ring 800.0 ms (0.875 × `dense`); used: ring. 20 steps."
    assert expected in text


def test_what_was_measured_again_is_shown_with_its_range_and_the_machines(folder):
    keep(folder, "2026-01-01-cluster", [])
    assert "Between machines" not in page(newest(folder / "results"))
    slower = [line("hitopk", 0.25, 0.01, baselines={"bare": seconds(0.2)}), allreduce("mpi", 0.8)]
    elsewhere = {"machine": {"cpu": "slide rule", "cores": 1, "memory_gib": 1.0}}
    keep(folder, "2026-01-01-cluster", [each | elsewhere for each in slower])
    text = page(newest(folder / "results"))
    file = "[2026-01-01-cluster.jsonl](results/2026-01-01-cluster.jsonl)"
    assert (
        f"records of 1 cores of slide rule, 1.0 GiB ({file}), 2 cores of abacus, 4.0 GiB ([2026-01-02" in text
    )
    place = "| `hitopk` | 1,000 | 1% | 1gbit, 2 nodes × 2 ranks |"
    assert f"{place} 3.2 to 4 | 0.5 to 0.8 | 100.0 to 200.0 |" in text


# ------------------------------------------------------------- the pictures


def test_a_picture_has_a_panel_a_density_in_which_every_contender_stands(folder):
    write(folder)
    drawn = texts(folder / "cluster-1gbit-1000.svg")
    assert "1gbit, 1,000 entries, 2 nodes × 2 ranks" in drawn
    assert {"density 1%", "density 0.1%", *style.STAGES, "waiting", "dense all-reduce"} < set(drawn)
    counts = {name: drawn.count(name) for name in ("dense", "mpi", "bare", "hitopk", "hitopk gap+fp16")}
    assert list(counts.values()) == [2, 2, 2, 1, 1]
    assert drawn.count("4×") == 1  # 0.8 s beside 0.2
    assert drawn.count("5×") == 1


def test_a_bar_is_as_high_as_the_step_took():
    parts = list(bars(Record.of(line("hitopk", 0.2, 0.01))))
    assert [round(high - low, 9) for _, low, high in parts] == [25, 25, 25, 25, 100]
    assert [color for color, _, _ in parts] == [*style.STAGES.values(), style.WAITING]
    assert list(bars(Record.of(allreduce("mpi", 0.8)))) == [(style.WHOLE, 0, 800)]


def test_stages_that_add_up_to_more_than_the_step_are_cut_at_its_end():
    long = {"min": 0.1, "mean": 0.15, "max": 0.2}
    record = Record.of(line("hitopk", 0.2, stages=dict.fromkeys(style.STAGES, long)))
    assert [high for _, _, high in bars(record)] == [150, 200, 200, 200, 200]


def test_pictures_of_what_is_no_more_there_are_removed(folder):
    (folder / "cluster-9gbit-1000.svg").write_text("old")
    (folder / "other.svg").write_text("not ours")
    write(folder)
    assert sorted(path.name for path in folder.glob("*.svg")) == ["cluster-1gbit-1000.svg", "other.svg"]


def test_the_same_records_make_the_same_file_and_others_another_fingerprint(folder):
    (cell,) = cells(newest(folder / "results")["cluster"])
    for name in ("first.svg", "second.svg"):
        draw(cell, folder / name)
    first = (folder / "first.svg").read_text()
    assert first == (folder / "second.svg").read_text()
    assert "<dc:date>" not in first
    keep(folder, "2026-01-04-cluster", [*SWEEP[:-1], allreduce("bare", 0.06, 0.001)])
    (other,) = cells(Results.of(folder / "results" / "2026-01-04-cluster.jsonl"))
    assert other.fingerprint != cell.fingerprint == fingerprint(folder / "first.svg")


def test_the_time_of_a_sample_is_a_table_and_a_picture(folder):
    case = {"samples": 500, "batch": 64, "kept_side": 128, "input_size": 96}
    case |= {"rate": "1gbit", "latency_seconds": 0.002}
    keys = {
        "bench": "cache",
        "case": case,
        "bytes": None,
        "stages": None,
        "memory_bytes": 210,
        "memory_ratio": 1.05,
    }
    records = [
        line("levels", 50e-6, peer="storage", peer_seconds=seconds(2e-3)) | keys,
        line("levels, one core", 80e-6, peer=None, peer_seconds=None) | keys,
    ]
    results = folder / "results"
    (results / "2026-11-23-cache.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    write(folder)
    text = (folder / "README.md").read_text()
    assert "| `levels` | 50.0 | storage | 2,000.0 | 40 |" in text
    assert "| `levels, one core` | 80.0 | – | – | – |" in text
    assert "- level 2 takes 210 bytes for all ranks of a node, 1.050 times its samples" in text
    assert {"levels", "levels, one core", "storage", "2,000"} <= set(texts(folder / "cache.svg"))


# ------------------------------------------------------------- races


def raced(subject: str, median: float, rate: str = "1gbit", **keys) -> dict:
    """Return a record of the steps of a subject in a race."""
    case = {
        "unit": "seconds a step",
        "model": "mlp",
        "weights": 10,
        "batch": 32,
        "rate": rate,
        "quick": False,
    }
    more = {"steps_a_second": 1 / median, "overlap": "off" not in subject, "hidden_share": 0.4}
    return {
        "bench": "race",
        "case": case | {"ranks_of_nodes": [1, 1], "density": None if subject == "dense" else 0.01},
        "subject": subject,
        "peer": None if subject == "dense" else "dense",
        "seconds": seconds(median),
        "peer_seconds": None if subject == "dense" else seconds(2.0),
        "bytes": {"intra": 0, "inter": 5000},
        "machine": {"cpu": "abacus", "cores": 2, "memory_gib": 4.0},
        "command": "cloudtrain bench train --cluster --json",
        "of_best": 0.5 / median,
        "card_bytes": 5500.0,
        **more,
        **keys,
    }


def run_of(subject: str, median: float, curve: list) -> dict:
    """Return a record of the runs of a subject, of one seed."""
    more = {"target": 0.9, "seeds": 1, "reached": 1, "final_accuracy": [0.91], "steps": [31]}
    alone = raced(subject, median, curves=[curve], **more)
    return alone | {"case": alone["case"] | {"unit": "seconds to the accuracy"}}


RACED = [
    raced("dense", 2.0),
    raced("hitopk", 0.5),
    raced("hitopk, overlap off", 0.75),
    run_of("dense", 2.0, [[1.0, 0.5], [2.0, 0.91]]),
    run_of("hitopk", 0.5, [[0.5, 0.91]]),
    raced("dense", 1.0, "10gbit"),
]


def test_a_race_has_a_table_of_steps_of_all_rates_and_one_of_runs(folder):
    keep(folder, "2026-01-02-race", RACED)
    told = page(newest(folder / "results"))
    assert "## Training, raced\n" in told
    assert "### mlp, 10 weights, 2 nodes × 1 rank" in told
    at_1gbit, at_10gbit = (f"mlp (10 weights), {rate}, 2 nodes × 1 rank\n" for rate in ("1gbit", "10gbit"))
    assert told.index(at_1gbit) < told.index(at_10gbit)
    hitopk = "| `hitopk` | 2 | 500.0 | 250.0 | 1,000.0 | dense | 4 | – | 1.00 | 1.5 | 40 % | 5 | 6 |"
    assert told.index(at_1gbit) < told.index(hitopk) < told.index(at_10gbit)
    off = "| `hitopk, overlap off` | 1.33 | 750.0 | 375.0 | 1,500.0 | dense | 2.67 | – | 0.67 |"
    assert f"{off} – | – |" in told
    assert told.index(at_10gbit) < told.index("| `dense` | 1 |")
    assert "Time to the accuracy: 1gbit, test accuracy 90.0%" in told
    assert "| `hitopk` | 1 of 1 | 0.5 | 0.2 | 1.0 | dense | 4 | 31 | 91.0% |" in told


def test_a_race_is_drawn_as_bars_of_steps_and_curves_of_accuracies(folder):
    keep(folder, "2026-01-02-race", RACED)
    (folder / "race-old-2x1.svg").write_text("old")
    write(folder)
    steps, curves = folder / "race-mlp-2x1.svg", folder / "race-mlp-2x1-1gbit-accuracy.svg"
    assert sorted(path.name for path in folder.glob("race*.svg")) == [curves.name, steps.name]
    drawn = texts(steps)
    assert {"1gbit", "10gbit", "steps a second", "hitopk, overlap off", "4×"} <= set(drawn)
    assert drawn.count("dense") == 2
    assert {"dense", "hitopk", "test accuracy", "s"} <= set(texts(curves))
    expected = {
        each.picture: each.fingerprint for each in race.all_pictures(newest(folder / "results").values())
    }
    assert {path.name: fingerprint(path) for path in (steps, curves)} == expected
