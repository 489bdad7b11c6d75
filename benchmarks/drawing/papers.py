"""The pictures of docs/validation.md: the papers' measurements and the predictions of them."""

from pathlib import Path
from types import MappingProxyType

from matplotlib.axes import Axes

from benchmarks.drawing.style import PALETTE, docs_picture
from benchmarks.papers.hitopkcomm import HITOPKCOMM, figure_7, table_3
from benchmarks.papers.oktopk import ALGORITHMS, FASTEST, OKTOPK, OTHERS, fits, messages


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
