"""Times of norms in parts, and how even the parts are."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from matplotlib.axes import Axes

from benchmarks import pto as bench
from benchmarks.drawing.results import Results, fingerprint
from benchmarks.drawing.style import WHOLE, legend, name_rows, note, open_up, picture
from training.bench.record import Record

# How norms are computed, and how tensors are assigned to ranks.
WAYS = {"local": WHOLE, "slices": "#0072b2", "layers": "#56b4e9", "auto": "#009e73"}
PARTITIONS = {"slices": WAYS["slices"], "layers": WAYS["layers"], "by layer": "#d55e00"}
NETWORKS = {"resnet50": "ResNet-50", "vgg19": "VGG-19", "transformer-base": "Transformer-base"}


def tables(results: Results, folder: str = "") -> Iterator[str]:
    """Yield picture and tables of norms in parts and of steps of LARS; ``folder``: where the picture is."""
    yield f"![CPU time a rank, time a call, and balance]({folder}pto.svg)\n"
    yield from (table.markdown() for table in bench.tables(results.records))


def of_operation(records: Iterable[Record], operation: str) -> list[Record]:
    """Return the records of one operation, by network and number of ranks."""
    own = [record for record in records if record.case["operation"] == operation]
    networks = list(dict.fromkeys(record.case["network"] for record in own))
    return sorted(own, key=lambda each: (networks.index(each.case["network"]), each.case["ranks"]))


def network_of(record: Record) -> str:
    """Return the network's name as its authors write it."""
    name: str = record.case["network"]
    return NETWORKS.get(name, name)


def draw(records: Sequence[Record], path: Path) -> None:
    """Write the picture of norms in parts: for each number of ranks CPU time, time of a call, and balance."""
    norms = of_operation(records, "norms")
    ranks = sorted({each.case["ranks"] for each in norms})
    with picture(path, 0.8 + 4.1 * len(ranks), 7.2, fingerprint(records)) as figure:
        rows = figure.subplots(3, len(ranks), sharey="row", squeeze=False)
        for number, cpu, wall, balance in zip(ranks, *rows, strict=True):
            own = [each for each in norms if each.case["ranks"] == number]
            groups = [list(group) for _, group in groupby(own, key=network_of)]
            cpu.set_title(f"{number} ranks")
            draw_groups(cpu, map(processor_bars, groups), WAYS)
            draw_groups(wall, map(wall_bars, groups), WAYS)
            draw_groups(balance, map(balance_bars, groups), PARTITIONS)
            for axes in (cpu, wall, balance):
                open_up(axes)
                axes.set_xticks(range(len(groups)), [network_of(group[0]) for group in groups])
        name_rows(rows, ("CPU ms a rank", "ms a call", "largest load\nover the mean"))
        legend(figure, WAYS | PARTITIONS)
        figure.suptitle("Norms of all weights and gradients")


Bars = dict[str, tuple[float, str]]  # height, and the text above


def processor_bars(own: Sequence[Record]) -> Bars:
    """Return the processor's ms of a rank by way; above them how many times less than local."""
    local = own[0].more["peer_cpu_seconds"]["median"] * 1e3
    return {"local": (local, "")} | {
        each.subject: (each.more["cpu_seconds"]["median"] * 1e3, f"{each.more['cpu_ratio']:.2f}×")
        for each in own
    }


def wall_bars(own: Sequence[Record]) -> Bars:
    """Return the ms of a call by way; above them how many times as fast as local."""
    return {"local": (own[0].peer_seconds.median * 1e3, "")} | {
        each.subject: (each.seconds.median * 1e3, f"{each.ratio:.2f}×") for each in own
    }


def balance_bars(own: Sequence[Record]) -> Bars:
    """Return the largest load over the mean by partition."""
    balance = own[0].more["balance"]
    return {name: (balance[name], f"{balance[name]:.2f}") for name in PARTITIONS}


def draw_groups(axes: Axes, groups: Iterable[Bars], colors: dict[str, str]) -> None:
    """Draw the groups of bars at 0, 1 and so on."""
    width = 0.8 / len(colors)
    for place, group in enumerate(groups):
        for number, (name, (height, text)) in enumerate(group.items()):
            left = place + (number - (len(group) - 1) / 2) * width
            axes.bar(left, height, color=colors[name], width=0.9 * width)
            note(axes, left, height, text)
