"""Show the newest records of benchmarks/results/: tables in benchmarks/README.md, and pictures beside it.

Of those of pto the tables stand in docs/pto.md, too. It needs no more than the records:
python scripts/draw_benchmarks.py
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from training.bench.record import Record, milliseconds, times

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
PTO_PAGE = FOLDER.parent / "docs" / "pto.md"
# Between these lines of it stands what was measured.
BEGIN = "<!-- measured: written by scripts/draw_benchmarks.py -->\n"
END = "<!-- end of what was measured -->\n"
NAMED = re.compile(r"\d{4}-\d{2}-\d{2}-(.+)\.jsonl")
CLUSTER = "cluster"  # so begin the names of what was measured on emulated clusters
NOTHING = "–"

# Of Okabe and Ito's palette; all-reduces, whose stages nobody sees, are grey.
STAGES = {"select": "#0072b2", "intra": "#56b4e9", "inter": "#d55e00", "combine": "#009e73"}
WAITING, WHOLE = "#dcdcdc", "#6e6e6e"
# Of pto: how norms are computed.
WAYS = {"local": WHOLE, "slices": "#0072b2", "layers": "#56b4e9", "auto": "#009e73"}
PARTITIONS = {"slices": WAYS["slices"], "layers": WAYS["layers"], "by layer": "#d55e00"}
NETWORKS = {"resnet50": "ResNet-50", "vgg19": "VGG-19", "transformer-base": "Transformer-base"}

# Text stays text, and elements have the same names in every run.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "cloudtrain", "font.size": 8, "axes.titlesize": 9}

HEAD = """# Benchmarks

What `cloudtrain bench` has measured last. `scripts/bench.sh` measures all of it anew and keeps the records
in [results](results), a JSON object a line; `python scripts/draw_benchmarks.py` makes this page of them. "×"
says how many times as fast as the peer named; subject and peer take turns in one run. Seconds are medians.
"""
SELECTION = """## Selection

Selecting on one core, beside what one would call instead, and beside a bare read of the vector.
"""
REDUCERS = """## Reducers on simulated ranks

By the virtual clock: messages take what the α-β model predicts. Sent is what the busiest rank sends in a
step; memory is what a rank holds beside its gradient, in vectors as long as that.
"""
TRANSCRIBED = """## Ok-Topk beside its transcription

Processor time of a rank; the peer is the paper's algorithm 1, written down in NumPy.
"""
CACHE = """## Batches from the cache

JPEGs of 500 × 375 pixels and about 110 KB in central storage, which is emulated; what a sample takes, in
whole batches of crops. `levels` is from the second epoch on, with two threads but for one core;
`first epoch` begins with empty folders.

![µs a sample](cache.svg)
"""
PTO = """## Norms in parts

Sums of squares of all weights and gradients of a network, on real ranks of one machine, whose cores they
share: every rank has all tensors. CPU is the processor's time of a rank, the mean over ranks, and ms is from
barrier to barrier, slowest rank. `local`: every rank computes everything, with the same kernel.
"""
NO_PTO = "Nothing has been measured yet: `scripts/bench.sh` does.\n"
MEASURED = """## {title}

Real ranks under `horovodrun` on `scripts/cluster.py`, on the cores of one machine, from barrier to barrier,
slowest rank. `mpi` and `horovod` are the dense all-reduces of Open MPI and Horovod, by the algorithm that is
named; "× peer" is beside the faster of them. `bare` is the exchange of `hitopk`'s bytes through MPI alone,
without the work. Stages are ms, means over ranks; the rest of a step is waiting for the slowest.
"""


@dataclass(frozen=True)
class Results:
    """The records of one file; ``kind`` is its name without the day."""

    kind: str
    path: Path
    records: Sequence[Record]

    @classmethod
    def of(cls, path: Path) -> "Results":
        """Read a file of JSON lines."""
        named = NAMED.fullmatch(path.name)
        if named is None:
            raise ValueError(f"{path}: expected a name as 2026-11-21-reducers.jsonl")
        records = [Record.of(json.loads(line)) for line in path.read_text().splitlines()]
        return cls(named[1], path, records)

    @property
    def fingerprint(self) -> str:
        """Return a digest of the records, which their picture has among its metadata."""
        return fingerprint(self.records)

    @property
    def source(self) -> str:
        """Return where the records are from, as Markdown."""
        machine, file = self.records[0].more["machine"], self.path.name
        commands = dict.fromkeys(record.more["command"] for record in self.records)
        where = f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB"
        return f"`{'`, `'.join(commands)}` on {where} ([{file}](results/{file})).\n"


@dataclass(frozen=True)
class Cell:
    """What was measured on a cluster at one rate and size, and the picture of it."""

    kind: str
    rate: str
    size: int
    nodes: Sequence[int]
    records: Sequence[Record]

    @property
    def measured(self) -> list[Record]:
        """Return the records but for the probing of MPI's algorithms."""
        return [record for record in self.records if record.bench != "probe"]

    @property
    def densities(self) -> list[float]:
        """Return the densities, in the order in which they were measured."""
        found = (record.case["density"] for record in self.measured)
        return list(dict.fromkeys(density for density in found if density is not None)) or [1.0]

    def at(self, density: float) -> list[Record]:
        """Return the records of a density, with those that have none; all-reduces come last."""
        own = [record for record in self.measured if record.case["density"] in (None, density)]
        return sorted(own, key=is_allreduce)

    @property
    def title(self) -> str:
        """Return what tells it from others."""
        return f"{self.rate}, {self.size:,} entries, {world(self.nodes)}"

    @property
    def picture(self) -> str:
        """Return the name of the picture."""
        return f"{self.kind}-{self.rate}-{self.size}.svg"

    @property
    def fingerprint(self) -> str:
        """Return a digest of the records, which the picture has among its metadata."""
        return fingerprint(self.measured)


def fingerprint(records: Iterable[Record]) -> str:
    """Return a digest of records."""
    lines = [repr((each.subject, each.case, each.seconds, each.bytes, each.more)) for each in records]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def newest(folder: Path) -> dict[str, Results]:
    """Return the newest file of each kind that is not empty."""
    found = (Results.of(path) for path in sorted(folder.glob("*.jsonl")) if path.stat().st_size)
    return {results.kind: results for results in found}


def cells(results: Results) -> list[Cell]:
    """Return the records of clusters, by ranks, rate and size."""

    def place(record: Record) -> tuple[str, int, list[int]]:
        return record.case["rate"], record.case["size"], record.case["ranks_of_nodes"]

    return [Cell(results.kind, *key, list(own)) for key, own in groupby(results.records, key=place)]


def all_cells(newest_results: Iterable[Results]) -> list[Cell]:
    """Return what there is to draw."""
    return [cell for each in newest_results if each.kind.startswith(CLUSTER) for cell in cells(each)]


def is_allreduce(record: Record) -> bool:
    """Return whether it is beside what the others were measured."""
    return "beside" not in record.more


def label(record: Record) -> str:
    """Return the name, and the codec if it is not the reducer's own."""
    return " ".join(filter(None, (record.subject, record.case.get("wire"))))


def world(nodes: Sequence[int]) -> str:
    """Return how many ranks are where.

    >>> world([2, 2, 2, 2]), world([3, 1])
    ('4 nodes × 2 ranks', '2 nodes of 3 and 1 ranks')
    """
    if len(set(nodes)) == 1:
        return f"{len(nodes)} nodes × {nodes[0]} rank{'s' if nodes[0] > 1 else ''}"
    return f"{len(nodes)} nodes of {' and '.join(map(str, nodes))} ranks"


# ------------------------------------------------------------- tables


def page(found: dict[str, Results]) -> str:
    """Return the text of benchmarks/README.md."""
    parts = [HEAD]
    sections: dict[str, tuple[str, Callable[[Results], Iterator[str]]]] = {
        "selection": (SELECTION, selection_tables),
        "reducers": (REDUCERS, reducer_tables),
        "oktopk-numpy": (TRANSCRIBED, transcription_tables),
        "cache": (CACHE, cache_tables),
        "pto": (PTO, pto_tables),
    }
    for kind, (text, tables) in sections.items():
        if kind in found:
            parts += [text, found[kind].source, *tables(found[kind])]
    for kind, results in found.items():
        if kind.startswith(CLUSTER):
            title = kind.replace(CLUSTER, "Reducers on an emulated cluster", 1).replace("-", ": ", 1)
            parts += [MEASURED.format(title=title), results.source, *cluster_tables(results)]
    return "\n".join(parts)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, numbers to the right.

    >>> print(table(["name", "ms"], [["a", "1"]]), end="")
    | name | ms |
    |---|---:|
    | a | 1 |
    """
    rule = ["---", *["---:"] * (len(header) - 1)]
    lines = [f"| {' | '.join(header)} |", f"|{'|'.join(rule)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def selection_tables(results: Results) -> Iterator[str]:
    """Yield a table for each law that the vectors were drawn from."""
    peers = list(dict.fromkeys(record.peer for record in results.records))
    for law, of_law in groupby(results.records, key=lambda record: record.case["input"]):
        rows = []
        for (size, density, subject), own in groupby(
            of_law, key=lambda record: (record.case["size"], record.case["density"], record.subject)
        ):
            beside = {record.peer: record for record in own}
            seconds = next(iter(beside.values())).seconds
            ratios = [times(beside[peer].ratio) if peer in beside else NOTHING for peer in peers]
            rows.append(
                [f"`{subject}`", f"{size:,}", percent(density), milliseconds(seconds.median), *ratios]
            )
        header = ["selector", "entries", "density", "ms", *(f"× {peer}" for peer in peers)]
        yield f"Entries: {law}.\n"
        yield table(header, rows)


def reducer_tables(results: Results) -> Iterator[str]:
    """Yield the table of simulated ranks, after a line about them."""
    first = results.records[0]
    yield f"{world(first.case['ranks_of_nodes'])}, {first.case['size']:,} entries, {links(first)}.\n"
    header = ["reducer", "density", "ms", "× dense", "intra ms", "inter ms", "predicted ms", "sent intra kB"]
    header += ["sent inter kB", "selected", "applied", "memory"]
    rows = []
    for record in results.records:
        more, sent = record.more, record.bytes
        rows.append(
            [
                *(f"`{label(record)}`", percent(record.case["density"])),
                *(milliseconds(record.seconds.median), times(record.ratio)),
                *(milliseconds(more["stages"][link]["max"]) for link in ("intra", "inter")),
                milliseconds(more["prediction"]["seconds"]) if more["prediction"] else NOTHING,
                *(kilobytes(sent.intra), kilobytes(sent.inter)),
                *(f"{more['entries'][name]:,}" for name in ("selected", "applied")),
                f"{more['memory']['dense_vectors']:.2f}",
            ]
        )
    yield table(header, rows)


def transcription_tables(results: Results) -> Iterator[str]:
    """Yield the table of processor time."""
    first = results.records[0]
    yield f"{world(first.case['ranks_of_nodes'])} (simulated), {first.case['size']:,} entries.\n"
    header = ["reducer", "density", "ms", "× peer", "selected", "applied"]
    rows = [
        [
            *(f"`{label(record)}`", percent(record.case["density"])),
            *(milliseconds(record.seconds.median), times(record.ratio)),
            *(f"{record.more['entries'][name]:,}" for name in ("selected", "applied")),
        ]
        for record in results.records
    ]
    yield table(header, rows)


def cache_tables(results: Results) -> Iterator[str]:
    """Yield the table of what a sample takes, after what it was read from."""
    case, more = results.records[0].case, results.records[0].more
    storage = f"{case['rate']}, {case['latency_seconds'] * 1e3:g} ms a request"
    sizes = f"kept with a shorter side of {case['kept_side']}, cropped to {case['input_size']} pixels"
    yield f"{case['samples']:,} samples, batches of {case['batch']}, {sizes}; storage: {storage}.\n"
    yield f"Level 2 takes {more['memory_ratio']:.3f} times its samples' bytes, once a node.\n"
    rows = [
        [
            *(each.subject, microseconds(each.seconds.median), each.peer or NOTHING),
            microseconds(each.peer_seconds.median) if each.peer_seconds else NOTHING,
            times(each.ratio),
        ]
        for each in results.records
    ]
    yield table(["", "µs", "beside", "µs", "× as fast"], rows)


def pto_tables(results: Results, folder: str = "") -> Iterator[str]:
    """Yield picture and tables of norms in parts and of steps of LARS; ``folder``: where the picture is."""
    norms, lars = (of_operation(results.records, name) for name in ("norms", "lars"))
    yield f"![CPU time a rank, time a call, and balance]({folder}pto.svg)\n"
    header = ["network", "ranks", "norms", "CPU ms", "local's", "× less", "ms", "local's", "× as fast"]
    yield table(header, ([*pto_place(each), f"`{each.subject}`", *pto_numbers(each)] for each in norms))
    chosen = [each for each in norms if each.subject == "auto"]
    yield "What `auto` chose:\n"
    yield "".join(
        f"- {', '.join(pto_place(each))} ranks: {each.more['choice']['reason']}\n" for each in chosen
    )
    yield "The largest load of a rank over the mean; `by layer` is HiTopKComm's partition:\n"
    header = ["network", "ranks", *(f"`{name}`" for name in PARTITIONS), "× better balanced"]
    yield table(header, ([*pto_place(each), *balances(each)] for each in chosen))
    if lars:
        yield "A whole step of LARS; `in graph`: TensorFlow computes its norms, in float32, on every rank.\n"
        header = ["network", "ranks", "norms", "beside", "CPU ms", "its", "× less", "ms", "its", "× as fast"]
        rows = (
            [*pto_place(each), f"`{each.subject}`", f"`{each.peer}`", *pto_numbers(each)] for each in lars
        )
        yield table(header, rows)


def of_operation(records: Iterable[Record], operation: str) -> list[Record]:
    """Return the records of one operation, by network and number of ranks."""
    own = [record for record in records if record.case["operation"] == operation]
    networks = list(dict.fromkeys(record.case["network"] for record in own))
    return sorted(own, key=lambda each: (networks.index(each.case["network"]), each.case["ranks"]))


def pto_place(record: Record) -> list[str]:
    """Return network and ranks."""
    return [network_of(record), str(record.case["ranks"])]


def network_of(record: Record) -> str:
    """Return the network's name as its authors write it."""
    name: str = record.case["network"]
    return NETWORKS.get(name, name)


def pto_numbers(record: Record) -> list[str]:
    """Return the processor's time and the wall time, beside the peer's."""
    more = record.more
    return [
        milliseconds(more["cpu_seconds"]["median"]),
        milliseconds(more["peer_cpu_seconds"]["median"]),
        times(more["cpu_ratio"]),
        milliseconds(record.seconds.median),
        milliseconds(record.peer_seconds.median),
        times(record.ratio),
    ]


def balances(record: Record) -> list[str]:
    """Return how even each partition is, and what slices gain over the paper's."""
    balance = record.more["balance"]
    gain = balance["by layer"] / balance["slices"]
    return [*(f"{balance[name]:.3f}" for name in PARTITIONS), times(gain)]


def with_measured(text: str, found: dict[str, Results]) -> str:
    """Return the text of docs/pto.md with the newest records between its marks."""
    if not 0 <= text.find(BEGIN) < text.find(END):
        raise ValueError(f"docs/pto.md: expected the lines {BEGIN!r} and {END!r}, in this order")
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    measured = NO_PTO
    if "pto" in found:
        link = found["pto"].source.replace("](results/", "](../benchmarks/results/")
        measured = "\n".join([link, *pto_tables(found["pto"], "../benchmarks/")])
    return f"{before}{BEGIN}\n{measured}\n{after}"


def microseconds(seconds: float) -> str:
    """Return seconds in µs, without the unit.

    >>> microseconds(0.0123456)
    '12,346'
    """
    return f"{seconds * 1e6:,.0f}"


def cluster_tables(results: Results) -> Iterator[str]:
    """Yield a heading, a picture and a table for each cell, and what MPI's algorithms took there."""
    header = ["reducer", "density", "ms", "min", "max", "× peer", "× bare", *STAGES, "sent inter kB"]
    for cell in cells(results):
        yield f"### {cell.title}\n"
        yield f"{probed(cell)}\n"
        yield f"![Time by stage and bytes between nodes: {cell.title}]({cell.picture})\n"
        first = cell.densities[0]
        rows = [
            cluster_row(record)
            for density in cell.densities
            for record in cell.at(density)
            if density == first or record.case["density"] is not None
        ]
        yield table(header, rows)


def cluster_row(record: Record) -> list[str]:
    """Return the row of one contender."""
    stages, bare = record.more["stages"] or {}, record.more.get("beside", {}).get("bare")
    seconds = record.seconds
    return [
        *(f"`{label(record)}`", percent(record.case["density"])),
        *(milliseconds(each) for each in (seconds.median, seconds.min, seconds.max)),
        times(record.ratio),
        times(bare["median"] / seconds.median if bare else None),
        *(milliseconds(stages[stage]["mean"]) if stages else NOTHING for stage in STAGES),
        kilobytes(record.bytes.inter) if record.bytes else NOTHING,
    ]


def probed(cell: Cell) -> str:
    """Return the line about MPI's algorithms."""
    beside = [
        f"{record.case['mpi_algorithm']} {milliseconds(record.peer_seconds.median)} ms"
        f" ({times(record.seconds.median / record.peer_seconds.median)} × `dense`)"
        for record in cell.records
        if record.bench == "probe"
    ]
    chosen = cell.measured[0].case["mpi_algorithm"]
    steps = cell.measured[0].seconds.runs
    if not beside:
        return f"All-reduce of Open MPI: {chosen}. {steps} steps."
    return f"All-reduce of Open MPI, by algorithm: {', '.join(beside)}; used: {chosen}. {steps} steps."


def percent(density: float | None) -> str:
    """Return a density; dense reducers have none.

    >>> percent(0.01), percent(0.001), percent(None)
    ('1%', '0.1%', '–')
    """
    return NOTHING if density is None else f"{density * 100:g}%"


def kilobytes(sent: int) -> str:
    """Return bytes in kB, without the unit."""
    return f"{sent / 1e3:,.0f}"


def links(record: Record) -> str:
    """Return what the virtual clock took for the links."""
    network = record.case["network"]
    told = (
        f"{name} {network[link]['alpha'] * 1e6:g} µs and {8 / network[link]['beta'] / 1e9:g} Gbit/s"
        for link, name in (("intra", "inside nodes"), ("inter", "between them"))
    )
    return ", ".join(told)


# ------------------------------------------------------------- pictures


def draw(cell: Cell, path: Path) -> None:
    """Write the picture of a cell: for each density time by stage, and below it the bytes between nodes."""
    densities = cell.densities
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(0.8 + 4.1 * len(densities), 5.6), facecolor="white", layout="constrained")
        rows = figure.subplots(
            2, len(densities), sharey="row", sharex="col", squeeze=False, height_ratios=(3, 2)
        )
        for density, time, sent in zip(densities, *rows, strict=True):
            records = cell.at(density)
            time.set_title(f"density {percent(density)}")
            draw_time(time, records)
            draw_bytes(sent, records)
            for axes in (time, sent):
                axes.spines[["top", "right"]].set_visible(False)
                axes.tick_params(axis="x", length=0)
            sent.set_xticks(range(len(records)), [label(each) for each in records], rotation=90)
        for axes, text in zip(rows[:, 0], ("ms a step", "MB between nodes,\nbusiest rank"), strict=True):
            axes.set_ylabel(text)
            axes.margins(y=0.1)  # for what is written above the bars
        patches = [Patch(color=color, label=stage) for stage, color in STAGES.items()]
        patches += [Patch(color=WAITING, label="waiting"), Patch(color=WHOLE, label="dense all-reduce")]
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
        figure.suptitle(cell.title)
        figure.savefig(path, metadata={"Date": None, "Creator": None, "Description": cell.fingerprint})


def draw_cache(results: Results, path: Path) -> None:
    """Write the picture of what a sample takes: a bar for each subject and peer."""
    seconds = {each.subject: each.seconds.median for each in results.records}
    subjects = set(seconds)
    seconds |= {each.peer: each.peer_seconds.median for each in results.records if each.peer_seconds}
    bars_of = sorted(seconds.items(), key=lambda each: each[1])
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 2.4), facecolor="white", layout="constrained")
        axes = figure.subplots()
        colors = [STAGES["select"] if name in subjects else WHOLE for name, _ in bars_of]
        axes.barh([name for name, _ in bars_of], [each * 1e6 for _, each in bars_of], color=colors)
        for place, (_, each) in enumerate(bars_of):
            text = microseconds(each)
            axes.annotate(text, (each * 1e6, place), (3, 0), textcoords="offset points", va="center")
        axes.set_xscale("log")
        axes.set_xlabel("µs a sample")
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None, "Creator": None, "Description": results.fingerprint})


def draw_pto(results: Results, path: Path) -> None:
    """Write the picture of norms in parts: for each number of ranks CPU time, time of a call, and balance."""
    norms = of_operation(results.records, "norms")
    ranks = sorted({each.case["ranks"] for each in norms})
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(0.8 + 4.1 * len(ranks), 7.2), facecolor="white", layout="constrained")
        rows = figure.subplots(3, len(ranks), sharey="row", squeeze=False)
        for number, cpu, wall, balance in zip(ranks, *rows, strict=True):
            own = [each for each in norms if each.case["ranks"] == number]
            groups = [list(group) for _, group in groupby(own, key=network_of)]
            cpu.set_title(f"{number} ranks")
            draw_groups(cpu, map(processor_bars, groups), WAYS)
            draw_groups(wall, map(wall_bars, groups), WAYS)
            draw_groups(balance, map(balance_bars, groups), PARTITIONS)
            for axes in (cpu, wall, balance):
                axes.spines[["top", "right"]].set_visible(False)
                axes.tick_params(axis="x", length=0)
                axes.set_xticks(range(len(groups)), [network_of(group[0]) for group in groups])
        labels = ("CPU ms a rank", "ms a call", "largest load\nover the mean")
        for axes, text in zip(rows[:, 0], labels, strict=True):
            axes.set_ylabel(text)
            axes.margins(y=0.1)  # for what is written above the bars
        colors = WAYS | PARTITIONS
        patches = [Patch(color=color, label=name) for name, color in colors.items()]
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
        figure.suptitle("Norms of all weights and gradients")
        figure.savefig(path, metadata={"Date": None, "Creator": None, "Description": results.fingerprint})


Bars = dict[str, tuple[float, str]]  # how high, and what is written above


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


def draw_time(axes: Axes, records: Sequence[Record]) -> None:
    """Draw a bar for each contender; above it how many times as fast it is as its peer."""
    for place, record in enumerate(records):
        for color, low, high in bars(record):
            axes.bar(place, high - low, bottom=low, color=color, width=0.75)
        if record.ratio is not None:
            note(axes, place, record.seconds.median * 1e3, f"{record.ratio:.3g}×")


def bars(record: Record) -> Iterator[tuple[str, float, float]]:
    """Yield color, begin and end in ms of the parts of a bar, which is as high as the step took."""
    total = record.seconds.median * 1e3
    stages = record.more["stages"]
    if stages is None:
        yield WHOLE, 0.0, total
        return
    low = 0.0
    for stage, color in STAGES.items():
        high = min(total, low + stages[stage]["mean"] * 1e3)  # medians of parts may add up to more
        yield color, low, high
        low = high
    yield WAITING, low, total


def draw_bytes(axes: Axes, records: Sequence[Record]) -> None:
    """Draw what the busiest rank sends between nodes; of MPI's own exchanges nobody knows."""
    megabytes = [record.bytes.inter / 1e6 if record.bytes else None for record in records]
    for place, sent in enumerate(megabytes):
        if sent is not None:
            axes.bar(place, sent, color=STAGES["inter"], width=0.75)
        note(axes, place, sent or 0.0, NOTHING if sent is None else f"{sent:.3g}")


def note(axes: Axes, place: float, height: float, text: str) -> None:
    """Write above a bar."""
    axes.annotate(text, (place, height), (0, 2), textcoords="offset points", ha="center", fontsize=6)


def write(folder: Path) -> None:
    """Write page and pictures of the newest results; pictures of none are removed."""
    found = newest(folder / "results")
    (folder / "README.md").write_text(page(found))
    drawn = {cell.picture: cell for cell in all_cells(found.values())}
    for old in folder.glob(f"{CLUSTER}*.svg"):
        if old.name not in drawn:
            old.unlink()
    for name, cell in drawn.items():
        draw(cell, folder / name)
    for kind, drawing in (("cache", draw_cache), ("pto", draw_pto)):
        if kind in found:
            drawing(found[kind], folder / f"{kind}.svg")


if __name__ == "__main__":
    write(FOLDER)
    PTO_PAGE.write_text(with_measured(PTO_PAGE.read_text(), newest(FOLDER / "results")))
