"""The picture of selections on a GPU, of records that are made up."""

import json

import pytest

from benchmarks.drawing.gpu import READ, SUBJECT, SWEEP, curves, of_entry, tables
from benchmarks.drawing.results import newest

PEERS = {"copy": 2.0, "torch.topk": 20.0, "mstopk, 30 passes": 30.0}  # times what a read takes
PERIOD = 1e-9


def seconds(median: float) -> dict:
    return {"median": median, "min": median, "max": median, "runs": 31}


def line(subject: str, peer: str, size: int, entry: str = "float32") -> dict:
    read = size * PERIOD / (1 if entry == "float32" else 2)
    return {
        "bench": "selection",
        "case": {"size": size, "density": 0.001, "k": size // 1000, "entry": entry},
        "subject": subject,
        "peer": peer,
        "seconds": seconds(1.5 * read if subject == SUBJECT else 4 * read),
        "peer_seconds": seconds(PEERS[peer] * read) if peer in PEERS else None,
        "ratio": None,
        "bytes": None,
        "floor_seconds": read if subject == SUBJECT else 3 * read,
        "gpu": {"name": "abacus"},
        "machine": {"cpu": "abacus", "cores": 2, "memory_gib": 4.0},
        "command": "gpu.py --json",
    }


@pytest.fixture
def folder(tmp_path):
    lines = [
        line(subject, peer, size, entry)
        for size in (1 << 18, 1 << 20, 1 << 29)
        for entry in ("float32", "float16")
        for subject in (SUBJECT, "dgc", SWEEP)
        for peer in (*PEERS, "jax.lax.approx_max_k")
    ]
    write(tmp_path / "2020-01-01-gpu-selection.jsonl", [line("exact", "copy", 7)])
    write(tmp_path / "2020-01-02-gpu-selection.jsonl", lines)
    write(tmp_path / "2020-01-03-selection.jsonl", [line("exact", "copy", 9)])
    write(tmp_path / "2020-01-04-gpu-selection.jsonl", [])
    return tmp_path


def write(path, lines):
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))


def test_each_contender_has_a_curve_of_its_own_medians(folder):
    drawn = {
        curve.name: curve for curve in curves(of_entry(newest(folder)["gpu-selection"].records, "float16"))
    }
    sizes = [1 << 18, 1 << 20]  # longer ones are not in the paper's figure
    assert {name: curve.sizes for name, curve in drawn.items()} == dict.fromkeys(drawn, sizes)
    reads = [size * PERIOD / 2 for size in sizes]
    expected = {SUBJECT: 1.5, READ: 1.0, "torch.topk": 20.0, "mstopk, 30 passes": 30.0}
    assert {name: curve.seconds for name, curve in drawn.items()} == {
        name: pytest.approx([factor * read for read in reads]) for name, factor in expected.items()
    }


def test_the_table_has_a_row_a_length_and_type_of_entries(folder):
    picture, table = tables(newest(folder)["gpu-selection"], "there/")
    assert "(there/gpu-selection.svg)" in picture
    header, _, *rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]
    assert header[-3:] == ["× mstopk, 30 passes", "× jax.lax.approx_max_k", "× torch.topk"]
    assert [row[:2] for row in rows] == [
        [entry, size] for entry in ("float32", "float16") for size in ("256 K", "1 M", "512 M")
    ]
    # 1 M float32: a read takes 1.049 ms, the selection half as much again, the sweep four times as much.
    assert rows[1] == ["float32", "1 M", "1.573", "1.50", "4.194", "1.33", "20", "–", "13.3"]
