"""What value codecs lose of selected values: the table of docs/reducers.md.

    python -m benchmarks.value_codecs --run [NAME ...]   # train, measure, and record
    python -m benchmarks.value_codecs                    # the table, from the records

Vectors are drawn from four distributions, or are what two simulated ranks select in training a model.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drawing.pages import with_block
from commlib import SparseVector, select
from commlib.reducers import AllGather
from commlib.vectors import Float32
from commlib.wire import VALUE_CODECS, make_codec

ROOT = Path(__file__).resolve().parent.parent
PAGE, RECORDS = ROOT / "docs" / "reducers.md", ROOT / "docs" / "reducers" / "value_codecs.json"
DENSITY = 1 / 64
DRAWN = 1_000_000  # entries of a vector
STEPS = (0, 20, 60, 119)  # of training, whose selected values are measured
FOUR_BINS = "four bins"  # of SparseLoCo's published code
CODECS = ("fp16", "qsgd8", "qsgd4", "lloyd4", "lloyd3", "qsgd2", FOUR_BINS, "lloyd2", "lloyd1")
HEADS = {
    "normal": "normal",
    "laplace": "Laplace",
    "heavy": "normal·exp(0.6·normal)",
    "student": "Student's t, 3",
    "resnet20": "ResNet-20",
    "lstm": "LSTM",
    "gpt": "GPT",
}
DATA = Path(os.environ.get("XDG_DATA_HOME", "~/.local/share")).expanduser() / "cloudtrain"
BROWN = {"name": "text", "path": str(DATA / "brown")}  # which scripts/get_data.sh leaves there
TRAINED: dict[str, dict[str, Any]] = {
    "resnet20": {
        "dataset": "mnist5k",
        "model": "resnet20",
        "optimizer": {"name": "sgd", "momentum": 0.9, "weight_decay": 0.0001},
        "phases": [{"input_size": 14, "batch_size": 64, "learning_rate": 0.05}],
    },
    "lstm": {
        "task": {"name": "language_model", "streams": True},
        "dataset": BROWN | {"vocabulary": {"size": 4000, "type": "word"}},
        "model": {"name": "lstm_lm_small", "units": 128},
        "optimizer": {"name": "sgd", "momentum": 0.0},
        "clip_norm": 0.25,
        "phases": [{"sequence_length": 20, "batch_size": 16, "learning_rate": 20.0}],
    },
    "gpt": {
        "task": "language_model",
        "dataset": BROWN | {"vocabulary": {"size": 2000}},
        "model": {"name": "gpt_small", "layers": 2, "width": 128, "heads": 4, "hidden": 512},
        "optimizer": "adamw",
        "clip_norm": 1.0,
        "phases": [{"sequence_length": 32, "batch_size": 8, "learning_rate": 0.0005}],
    },
}


def drawn(name: str) -> Float32:
    """Return the values that are selected of a vector of one of the four distributions."""
    generator = np.random.default_rng(0)
    draw: dict[str, Callable[[], Any]] = {
        "normal": lambda: generator.standard_normal(DRAWN),
        "laplace": lambda: generator.laplace(size=DRAWN),
        "heavy": lambda: generator.standard_normal(DRAWN) * np.exp(0.6 * generator.standard_normal(DRAWN)),
        "student": lambda: generator.standard_t(3, DRAWN),
    }
    return select("exact", draw[name]().astype(np.float32), round(DENSITY * DRAWN)).values


def four_bins(values: Float32) -> Any:
    """Return what SparseLoCo's published code makes of values: bins of 1.5 deviations, the mean of each."""
    mean = values.mean(dtype=np.float64)
    centred = values - mean
    bins = np.clip(np.rint(centred / (6 * centred.std(ddof=1) / 4)) + 2, 0, 3).astype(int)
    sums, counts = np.bincount(bins, centred, minlength=4), np.bincount(bins, minlength=4)
    return (sums / np.maximum(counts, 1))[bins] + mean


def decoded(codec: str, values: Float32) -> Any:
    """Return what a codec makes of values."""
    if codec == FOUR_BINS:
        return four_bins(values)
    made = VALUE_CODECS[codec]()
    return made.decode(made.encode(values), len(values))


def lost(values: Float32) -> dict[str, float]:
    """Return the share of the sum of squares that each codec loses."""
    exact = values.astype(np.float64)
    return {name: float(((exact - decoded(name, values)) ** 2).sum() / (exact**2).sum()) for name in CODECS}


class Recording(AllGather):
    """Keeps the values that rank 0 selected in some steps."""

    taken: list[Float32] = []  # noqa: RUF012 - where the script finds them

    def _combine(self, selected: SparseVector) -> SparseVector:
        if self.comm.rank == 0 and self.steps in STEPS:
            self.taken.append(selected.values.copy())
        return super()._combine(selected)


def trained(name: str) -> list[Float32]:
    """Return the values that rank 0 of two selected in training a model."""
    from training.process.tf_logging import import_tensorflow

    import_tensorflow()
    from benchmarks import simulated_ranks
    from training.config.config import Config

    Recording.taken.clear()
    reducer = {"name": "benchmarks.value_codecs:Recording", "density": DENSITY}
    with tempfile.TemporaryDirectory() as folder:
        phases = [TRAINED[name]["phases"][0] | {"steps": STEPS[-1] + 1, "reducer": reducer}]
        own = {"name": "values", "seed": 1, "output": folder, "phases": phases}
        simulated_ranks.train(Config.model_validate(TRAINED[name] | own).resolved(), (1, 1), look_every=10**9)
    return list(Recording.taken)


def measured(name: str) -> dict[str, float]:
    """Return the share that each codec loses of a vector; of a model's, the mean over steps."""
    shares = [lost(values) for values in (trained(name) if name in TRAINED else [drawn(name)])]
    return {codec: float(np.mean([each[codec] for each in shares])) for codec in CODECS}


def recorded() -> dict[str, dict[str, float]]:
    """Return what has been measured, by vector and codec."""
    found: dict[str, dict[str, float]] = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    return found


def bits(codec: str) -> tuple[float, float]:
    """Return the bits a value takes, and with its index in ``gap`` at density 1 %, spread at random."""
    if codec == FOUR_BINS:
        return 2.0, 14.0  # as published, with indices of 12 bits
    count, size = 25_600, 2_560_000
    of_value = 8 * VALUE_CODECS[codec]().message_bytes(count) / count
    indices = np.sort(np.random.default_rng(0).choice(size, count, replace=False)).astype(np.int32)
    vector = SparseVector(size, indices, np.ones(count, np.float32))
    return of_value, 8 * len(make_codec(f"gap+{codec}").encode(vector)) / count


def table(shares: Mapping[str, Mapping[str, float]]) -> str:
    """Return the table of the page."""
    lines = ["| codec | bits a value | with `gap` | " + " | ".join(HEADS.values()) + " |"]
    lines.append("|---|" + "---:|" * (2 + len(HEADS)))
    for codec in CODECS:
        of_value, with_index = bits(codec)
        cells = [f"{100 * shares[name][codec]:.2f} %" for name in HEADS]
        shown = codec if codec == FOUR_BINS else f"`{codec}`"
        lines.append(f"| {shown} | {of_value:.2f} | {with_index:.2f} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and record with ``--run``; write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", nargs="*", metavar="NAME", choices=HEADS, help="train, measure and record")
    names = parser.parse_args().run
    if names is not None:
        found = recorded() | {name: measured(name) for name in names or HEADS}
        RECORDS.write_text(
            json.dumps({name: found[name] for name in HEADS if name in found}, indent=1) + "\n"
        )
    PAGE.write_text(with_block(PAGE.read_text(), "value codecs", table(recorded())))


if __name__ == "__main__":
    from benchmarks import value_codecs  # the module whose Recording the reducer is

    value_codecs.main()
