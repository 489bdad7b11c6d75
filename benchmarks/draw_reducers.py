"""Draw the messages of a steady step of each reducer on simulated ranks, to docs/reducers/NAME.svg.

Without arguments all reducers, else those named: python -m benchmarks.draw_reducers [NAME …]
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

import commlib
from benchmarks.drawing.style import DOCS_STYLE, PALETTE, picture
from commlib.transport.simulated import Transfer
from commlib.vectors import Float32

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reducers"
NODES, RANKS_PER_NODE = 2, 4
SIZE, DENSITY = 100_000, 0.01
STEPS = 5  # the last one is drawn: by then thresholds and regions are reused

INSIDE, BETWEEN, AGREEING = PALETTE[0], PALETTE[1], "#c4c4c4"
STYLE = DOCS_STYLE | {"lines.solid_capstyle": "butt"}


@dataclass(frozen=True)
class Step:
    """A step by the virtual clock; ``meetings``: rank, begin and end of waits for exchanged integers."""

    name: str
    transfers: list[Transfer]
    meetings: list[tuple[int, float, float]]
    begun: float
    ended: float
    sent: commlib.LinkBytes

    @property
    def caption(self) -> str:
        bytes_by_link = f"{self.sent.intra:,} bytes inside nodes, {self.sent.inter:,} bytes between nodes"
        return f"{self.name}: {bytes_by_link}, {(self.ended - self.begun) * 1e6:.0f} µs"


def gradient(rank: int, step: int) -> Float32:
    """Return heavy-tailed entries, half of each common to all ranks, of eight layers, the larger in front."""
    layers = np.geomspace(3, 1, 8).repeat(SIZE // 8)
    common, own = (np.random.default_rng(seed).standard_t(3, SIZE) for seed in ([step], [step, rank]))
    return (layers * (common + own)).astype(np.float32)


def simulate(name: str) -> Step:
    """Run the reducer and return the last of its steps."""
    record: list[Transfer] = []
    meetings: list[tuple[int, float, float]] = []

    def body(comm: commlib.Communicator) -> tuple[float, float, commlib.LinkBytes]:
        topology = commlib.Topology(comm)
        options = {"density": DENSITY} if commlib.REDUCERS[name].sparse else {}
        reducer = commlib.make_reducer(name, topology, SIZE, **options)
        for step in range(STEPS - 1):
            reducer.reduce(gradient(comm.rank, step))
        comm.barrier()
        begun = comm.now()
        for each in (topology.world, topology.node, topology.stream):
            note_meetings(each, comm.rank, meetings)
        reducer.reduce(gradient(comm.rank, STEPS - 1))
        return begun, comm.now(), reducer.last.traffic.sent

    ranks = commlib.transport.simulated.run(body, NODES * RANKS_PER_NODE, RANKS_PER_NODE, record=record)
    begun, ended = ranks[0][0], max(ended for _, ended, _ in ranks)
    sent = sum((own for _, _, own in ranks), commlib.LinkBytes())
    transfers = [transfer for transfer in record if transfer.sent >= begun]
    return Step(name, transfers, meetings, begun, ended, sent)


def note_meetings(comm: commlib.Communicator, rank: int, meetings: list[tuple[int, float, float]]) -> None:
    """Add all waits for exchanges of integers of ``comm`` to ``meetings``: no record has these."""

    def noted(wait: Callable[[], Any]) -> Any:
        begun = comm.now()
        result = wait()
        if comm.now() > begun:
            meetings.append((rank, begun, comm.now()))
        return result

    start, swap = comm.start_allgather_ints, comm.alltoall_ints
    comm.start_allgather_ints = lambda values: partial(noted, start(values))  # type: ignore[method-assign]
    comm.alltoall_ints = lambda values: noted(partial(swap, values))  # type: ignore[method-assign]


def lane(rank: int) -> float:
    """Return the height of a rank's lane: rank 0 on top, a gap between nodes."""
    return -rank - 0.8 * (rank // RANKS_PER_NODE)


def lines(transfers: Sequence[Transfer], begun: float) -> dict[tuple[bool, float], list[tuple[float, float]]]:
    """Return the points of all messages, by whether they go between nodes and by width.

    A line leads from its sender's lane to its receiver's, in µs since the step began, and ends in a NaN. It
    begins when the sender's port, which sends one at a time over each link, has sent those before it.
    """
    free: dict[tuple[int, bool], float] = {}
    points: dict[tuple[bool, float], list[tuple[float, float]]] = {}
    for each in sorted(transfers, key=lambda each: each.left):
        start = max(each.sent, free.get((each.source, each.is_inter), begun))
        free[each.source, each.is_inter] = each.left
        width = round(0.4 + 0.8 * (each.message_bytes / 1e4) ** 0.5, 1)  # grows with the root of the bytes
        points.setdefault((each.is_inter, width), []).extend(
            [
                ((start - begun) * 1e6, lane(each.source)),
                ((each.arrived - begun) * 1e6, lane(each.destination)),
                (np.nan, np.nan),
            ]
        )
    return points


def draw(step: Step, path: Path) -> None:
    with picture(path, 8, 3.7, style=STYLE, layout=None) as figure:
        axes = figure.add_axes((0.085, 0.2, 0.88, 0.7))
        duration = (step.ended - step.begun) * 1e6
        draw_lanes(axes, duration)
        for rank, *span in step.meetings:
            begun, ended = ((at - step.begun) * 1e6 for at in span)
            axes.hlines(lane(rank), begun, ended - duration / 200, color=AGREEING, linewidth=4.5)
        points = lines(step.transfers, step.begun)
        for is_inter, width in sorted(
            points, key=lambda each: (each[0], -each[1])
        ):  # thin ones over wide ones
            dots = {"marker": "o", "markevery": (1, 3), "markersize": 2 + 1.4 * width, "markeredgewidth": 0}
            path_of = zip(*points[is_inter, width], strict=True)
            color = BETWEEN if is_inter else INSIDE
            axes.plot(*path_of, color=color, linewidth=width, clip_on=False, **dots)
        legend = [
            Line2D([], [], color=INSIDE, marker="o", markersize=4, label="message inside a node"),
            Line2D([], [], color=BETWEEN, marker="o", markersize=4, label="message between nodes"),
            Line2D([], [], color=AGREEING, linewidth=4.5, label="waiting for a few integers"),
        ]
        axes.legend(handles=legend, loc="lower center", bbox_to_anchor=(0.46, 0.98), ncols=3)
        figure.text(0.5, 0.02, step.caption, ha="center")


def draw_lanes(axes: Axes, duration: float) -> None:
    world = [range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE) for node in range(NODES)]
    for node, ranks in enumerate(world):
        top, bottom = lane(ranks[0]) + 0.5, lane(ranks[-1]) - 0.5
        axes.axhspan(bottom, top, color="#f3f3f3", zorder=0)
        axes.hlines([lane(rank) for rank in ranks], 0, duration, color="#c8c8c8", linewidth=0.6, zorder=1)
        axes.text(1.015 * duration, (top + bottom) / 2, f"node {node}", rotation=270, va="center")
    places = {f"rank {rank}": lane(rank) for ranks in world for rank in ranks}
    axes.set_yticks(list(places.values()), list(places))
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(-0.01 * duration, 1.01 * duration), ylim=(min(places.values()) - 0.6, 0.6))
    axes.set(xlabel="µs since the step began")
    axes.spines["left"].set_visible(False)


if __name__ == "__main__":
    for reducer_name in sys.argv[1:] or commlib.REDUCERS:
        draw(simulate(reducer_name), FOLDER / f"{reducer_name}.svg")
