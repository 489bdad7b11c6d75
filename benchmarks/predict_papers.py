"""Predict the papers' measurements on their own clusters, by the closed forms of commlib.cost.

HiTopKComm: 16 nodes of 8 GPUs at 25 Gbit/s (figures 7 and 8, table 3); Ok-Topk: 256 nodes of one GPU (figure
12). The papers' numbers are in ``papers.yaml``, their clusters in ``clusters/``.

    python -m benchmarks.predict_papers [--json] [--simulate] [--write]

``--json``: one object a row in place of tables. ``--simulate``: also run the reducers on the virtual clock,
which takes some minutes. ``--write``: also refresh the tables of docs/validation.md.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drawing.pages import Table, milliseconds, with_block
from benchmarks.papers import (
    ALGORITHMS,
    FULL,
    HALF,
    HITOPKCOMM,
    OKTOPK,
    STATEMENTS,
    Cluster,
    Comparison,
    cells_table,
    communication,
    figure_7_table,
    figure_8_table,
    figure_12_table,
    fill_in,
    fits,
    gains,
    rates_table,
    statements_table,
    table_3,
    table_3_slowed,
)
from commlib import REDUCERS, Communicator, Network, Topology, make_reducer
from commlib.transport import simulated

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
    """Refresh the tables of the page."""
    page = PAGE.read_text()
    for table in given:
        page = with_block(page, table.name, table.markdown())
    PAGE.write_text(page)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object a row")
    parser.add_argument("--simulate", action="store_true", help="also run the reducers on the virtual clock")
    parser.add_argument("--write", action="store_true", help="also refresh the page")
    options = parser.parse_args(arguments)
    given = tables() + ([simulated_table()] if options.simulate else [])
    for table in given:
        lines = [json.dumps(record) for record in table.records()] if options.json else []
        print("\n".join(lines) if options.json else f"{table.name}\n\n{table.markdown()}")
    if options.write:
        write(given)


if __name__ == "__main__":
    main()
