"""Predict the papers' measurements on their own clusters, by the closed forms of commlib.cost.

HiTopKComm: 16 nodes of 8 GPUs at 25 Gbit/s (figures 7 and 8, table 3); Ok-Topk: 256 nodes of one GPU (figure
12). The papers' numbers are in ``papers.yaml``, their clusters in ``clusters/``.

    python -m benchmarks.predict_papers [--json] [--simulate] [--write]

``--json``: one object a row in place of tables. ``--simulate``: also run the reducers on the virtual clock,
which takes some minutes. ``--write``: also refresh the tables of docs/validation.md and its pictures.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from benchmarks.drawing.pages import Table, milliseconds, with_block
from benchmarks.drawing.style import PALETTE, docs_picture
from benchmarks.papers import (
    ALGORITHMS,
    FASTEST,
    FULL,
    HALF,
    HITOPKCOMM,
    OKTOPK,
    OTHERS,
    STATEMENTS,
    Cluster,
    Comparison,
    cells_table,
    communication,
    figure_7,
    figure_7_table,
    figure_8_table,
    figure_12_table,
    fill_in,
    fits,
    gains,
    messages,
    rates_table,
    statements_table,
    table_3,
    table_3_slowed,
)
from commlib import REDUCERS, Communicator, Network, Topology, make_reducer
from commlib.transport import simulated


def draw_hitopkcomm(path: Path) -> None:
    """Draw the seconds over the size as in figure 7, and the efficiencies of table 3, paper and predicted."""
    with docs_picture(path, 9.5, 4) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.5))
        sizes = [1_000_000 << exponent for exponent in range(8)]
        by_size = [figure_7(size) for size in sizes]
        for name, color in zip(by_size[0], PALETTE, strict=False):
            label = f"{name} ({HITOPKCOMM.reducers[name]})" if name in HITOPKCOMM.reducers else name
            seconds = [each[name] * 1e3 for each in by_size]
            left.plot(sizes, seconds, color=color, marker="o", markersize=3, label=label)
        left.set(xscale="log", yscale="log", xlabel="entries, 16 bits", ylabel="ms a step, predicted")
        left.legend(frameon=False, fontsize=8)
        left.set_title("16 nodes × 8 GPUs, 25 Gbit/s", fontsize=9)
        draw_efficiencies(right)


def draw_efficiencies(axes: Axes) -> None:
    """Draw a pair of bars for every cell of table 3, with their numbers."""
    width, cells = 0.4, table_3()
    for place, each in enumerate(cells):
        color = PALETTE[list(HITOPKCOMM.reducers).index(each.reducer)]
        for side, value in enumerate((each.efficiency.paper, each.efficiency.predicted)):
            at = place + place // 3 * 0.7 + (side - 0.5) * width
            axes.bar(at, value, width, color=color, alpha=(1, 0.45)[side])
            axes.text(at, value + 0.01, f"{100 * value:.0f}", ha="center", fontsize=6.5)
    centers = [3 * group + 1 + 0.7 * group for group in range(len(HITOPKCOMM.trainings))]
    axes.set_xticks(centers, [each.name for each in HITOPKCOMM.trainings])
    axes.tick_params(axis="x", length=0, labelsize=8)
    axes.set(ylabel="scaling efficiency", ylim=(0, 1.05))
    axes.set_title("Dense-, 2DTAR-, MSTopK-SGD in %; dark: paper, light: predicted", fontsize=9)


def draw_oktopk(path: Path) -> None:
    """Draw the seconds of the messages over the ranks, and the speed-ups on 256 with the paper's range."""
    with docs_picture(path, 9.5, 4) as figure:
        left, right = figure.subplots(1, 2)
        given, ranks = fits()[1], [16, 32, 64, 128, 256]
        for name, color in zip(ALGORITHMS, PALETTE, strict=True):
            seconds = [messages(name, each, given.link) for each in ranks]
            left.plot(ranks, seconds, color=color, marker="o", markersize=3, label=name)
        left.set(xscale="log", yscale="log", xlabel="nodes of one GPU", ylabel="s of messages, predicted")
        left.set_xticks(ranks, [str(each) for each in ranks])
        left.minorticks_off()
        left.set_ylim(0.002, 4)
        left.legend(frameon=False, fontsize=7, ncols=2, loc="lower left")
        left.set_title(f"BERT, 1 %, at {1 / given.link.beta / 1e9:.2f} GB/s", fontsize=9)
        draw_speedups(right)


def draw_speedups(axes: Axes) -> None:
    """Draw Ok-Topk's speed-ups over each other algorithm on 256 ranks, for both fitted rates."""
    axes.axvspan(*OKTOPK.over_all, color="#eeeeee", zorder=0)
    axes.text(FASTEST + 0.1, -0.65, "all others, by the paper", fontsize=7.5)
    for side, given in enumerate(fits()[1:]):
        for place, value in enumerate(given.speedups()):
            at = place + (side - 0.5) * 0.4
            label = given.name if place == 0 else None
            axes.barh(at, value, 0.38, color=PALETTE[side], label=label)
            axes.text(value + 0.1, at, f"{value:.2f}", va="center", fontsize=7)
    axes.set_yticks(range(len(OTHERS)), [name.replace(", ", ",\n") for name in OTHERS])
    axes.set(xlabel="Ok-Topk's speed-up of a step on 256 GPUs", xlim=(0, 14), ylim=(len(OTHERS) - 0.4, -1))
    axes.legend(frameon=False, fontsize=7.5, loc="center right")


PICTURES = MappingProxyType({"papers-hitopkcomm.svg": draw_hitopkcomm, "papers-oktopk.svg": draw_oktopk})


FOLDER = Path(__file__).resolve().parent.parent / "docs" / "validation"
PAGE = FOLDER.parent / "validation.md"
SIMULATED_SIZE = 1_000_000


def compared(name: str, first: str, found: Mapping[str, Comparison], form: str) -> Table:
    """Return the table of comparisons by name, the numbers in this format."""
    rows = [
        (key, format(each.paper, form), format(each.predicted, form), f"{each.ratio:.2f}")
        for key, each in found.items()
    ]
    return Table(name, (first, "paper", "predicted", "predicted/paper"), rows)


def comparisons() -> dict[str, list[Comparison]]:
    """Return the comparisons that the factors of the page bound, by their names, without fitted ones."""
    fast = [each for each in table_3() if not each.is_fitted]
    slow = [each for each in table_3_slowed() if not each.is_fitted]
    bounded = {
        "2DTAR-SGD and MSTopK-SGD": [each.throughput for each in fast if each.reducer != "dense"],
        "MSTopK-SGD over 2DTAR-SGD": list(gains().values()),
        "Dense-SGD, at the link's rate": [each.throughput for each in fast if each.reducer == "dense"],
        "Dense-SGD, slowed": [each.throughput for each in slow],
    }
    for given in fits()[1:]:
        found = [statement.under(given) for statement in STATEMENTS]
        bounded[f"Ok-Topk, {given.name}"] = [each for each in found if each is not None]
    return bounded | {"density of the sum": list(fill_in().values())}


def tables() -> list[Table]:
    """Return all tables that need no simulation."""
    return [
        figure_7_table(),
        figure_8_table(),
        cells_table("table 3", table_3()),
        cells_table("table 3, slowed", table_3_slowed()),
        compared("gains", "MSTopK-SGD over 2DTAR-SGD", gains(), ".2f"),
        rates_table(),
        figure_12_table(),
        statements_table(),
        compared("fill-in", "density of the sum", fill_in(), ".1%"),
    ]


def simulated_seconds(reducer: str, cluster: Cluster, density: float, values: str) -> float:
    """Return the seconds of the second step on the slowest rank: thresholds and regions are reused in it."""
    is_sparse = REDUCERS[reducer].sparse
    size = SIMULATED_SIZE if is_sparse or values == FULL else SIMULATED_SIZE // 2
    options: dict[str, Any] = {"density": density, "wire": values} if is_sparse else {}

    def body(comm: Communicator) -> float:
        made = make_reducer(reducer, Topology(comm), size, **options)
        begun = 0.0
        for step in range(2):
            normal = np.random.default_rng([comm.rank, step]).standard_normal(size, np.float32)
            # What is selected from is then distributed alike in all steps, as in a training that has settled.
            gradient = normal - made.residual
            comm.barrier()
            begun = comm.now()
            made.reduce(gradient)
        return comm.now() - begun

    return max(simulated.run(body, cluster.size, cluster.ranks_per_node, cluster.network))


def simulated_table() -> Table:
    """Return simulated and predicted seconds on both clusters, Ok-Topk's cut to 128 nodes."""
    one_gpu = Cluster(128, 1, Network(inter=fits()[1].link))
    of_oktopk = dict.fromkeys(each["reducer"] for each in ALGORITHMS.values())
    clusters = (
        ("16 × 8", HITOPKCOMM.cluster, HITOPKCOMM.density, HALF, [*HITOPKCOMM.reducers, "hioktopk"]),
        ("128 × 1", one_gpu, OKTOPK.density, FULL, list(of_oktopk)),
    )
    rows = []
    for name, cluster, density, values, reducers in clusters:
        for reducer in reducers:
            expected = communication(reducer, cluster, SIMULATED_SIZE, density, values).seconds
            found = simulated_seconds(reducer, cluster, density, values)
            ratio = f"{expected / found:.3f}"
            rows.append((name, f"`{reducer}`", milliseconds(found), milliseconds(expected), ratio))
    head = ("nodes × GPUs", "reducer", "simulated, ms", "closed form, ms", "closed form/simulated")
    return Table("simulated", head, rows)


def write(given: Sequence[Table]) -> None:
    """Refresh the tables of the page, and the pictures."""
    page = PAGE.read_text()
    for table in given:
        page = with_block(page, table.name, table.markdown())
    PAGE.write_text(page)
    for name, draw in PICTURES.items():
        draw(FOLDER / name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object a row")
    parser.add_argument("--simulate", action="store_true", help="also run the reducers on the virtual clock")
    parser.add_argument("--write", action="store_true", help="also refresh the page and its pictures")
    options = parser.parse_args(arguments)
    given = tables() + ([simulated_table()] if options.simulate else [])
    for table in given:
        lines = [json.dumps(record) for record in table.records()] if options.json else []
        print("\n".join(lines) if options.json else f"{table.name}\n\n{table.markdown()}")
    if options.write:
        write(given)


if __name__ == "__main__":
    main()
