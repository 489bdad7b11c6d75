"""The tables of ``cloudtrain bench reducers``."""

from collections.abc import Sequence

from commlib.topology import LinkBytes
from training.bench.options import BASELINE
from training.bench.record import Record
from training.bench.steps import CLOCKS
from training.commands.printing import Table, milliseconds, times

STAGES = ("select", "intra", "inter", "combine")
NOTHING = "–"


def table_of(records: Sequence[Record]) -> Table:
    """Return the table of records of one size and the same ranks: a line a reducer."""
    if any("baselines" in record.more for record in records):
        return _against_allreduces(records)
    first = records[0]
    clock = CLOCKS[first.case["clock"]]
    peer = next((record.peer for record in records if record.peer), BASELINE)
    header = ["reducer", "density", "ms", f"× {peer}", "intra\nms", "inter\nms", "predicted\nms"]
    header += ["sent intra\nkB", "sent inter\nkB", "selected\nentries", "applied\nentries", "memory\nvectors"]
    notes = [
        f"ms: {clock.meaning}; median of {first.seconds.runs} steps. × {peer}: how many times as fast.",
        f"predicted: by the cost model, messages only. Links: {_links(first)}.",
        "sent: payload of the busiest rank. memory: allocations besides the gradient, in vectors of its size",
    ]
    title = f"{_title(first)}, clock: {clock.name}{_quick(first)}"
    return Table(title, header, [_row(record) for record in records], notes)


def _row(record: Record) -> list[str]:
    more = record.more
    stages, prediction = more["stages"] or {}, more["prediction"]
    return [
        *(label(record), percent(record.case["density"]), milliseconds(record.seconds.median)),
        times(record.ratio),
        *(milliseconds(stages[link]["max"]) if stages else NOTHING for link in ("intra", "inter")),
        milliseconds(prediction["seconds"]) if prediction else NOTHING,
        *_sent(record.bytes),
        *_entries(record),
        f"{more['memory']['dense_vectors']:.2f}",
    ]


def _links(record: Record) -> str:
    network = record.case["network"]
    texts = (
        f"{name} {network[link]['alpha'] * 1e6:g} µs and {8 / network[link]['beta'] / 1e9:g} Gbit/s"
        for link, name in (("intra", "inside nodes"), ("inter", "between them"))
    )
    return ", ".join(texts)


def _against_allreduces(records: Sequence[Record]) -> Table:
    records = sorted(records, key=lambda record: "baselines" not in record.more)  # the all-reduces at the end
    first = records[0]
    header = ["reducer", "density", "ms", "min\nms", "max\nms", "peer", "× peer", "× bare"]
    header += [f"{stage}\nms" for stage in STAGES]
    header += ["sent intra\nkB", "sent inter\nkB", "selected\nentries", "applied\nentries"]
    notes = [
        f"ms: {CLOCKS['wall'].meaning}; median of {first.seconds.runs} steps. Of stages: mean over ranks.",
        "peer: the fastest of MPI's and Horovod's all-reduces; × peer, × bare: how many times as fast.",
        "bare: the bytes of hitopk through MPI's own collectives. sent: payload of the busiest rank",
    ]
    return Table(
        _title(first) + _quick(first), header, [_row_against_allreduces(each) for each in records], notes
    )


def _row_against_allreduces(record: Record) -> list[str]:
    stages, bare = record.more["stages"] or {}, record.more.get("baselines", {}).get("bare")
    return [
        *(label(record), percent(record.case["density"])),
        *(milliseconds(getattr(record.seconds, which)) for which in ("median", "min", "max")),
        *(record.peer or NOTHING, times(record.ratio)),
        times(bare["median"] / record.seconds.median if bare else None),
        *(milliseconds(stages[stage]["mean"]) if stages else NOTHING for stage in STAGES),
        *_sent(record.bytes),
        *_entries(record),
    ]


def _title(record: Record) -> str:
    case = record.case
    nodes = case["ranks_of_nodes"]
    title = f"{case['size']:,} entries, {sum(nodes)} ranks on {len(nodes)} nodes"
    if "rate" in case:
        title += f", {case['rate']}, all-reduce of MPI: {case['mpi_algorithm']}"
    return title


def _quick(record: Record) -> str:
    return "  (quick)" if record.case["quick"] else ""


def label(record: Record) -> str:
    """Return the name, and the codec if it is not the reducer's own."""
    return " ".join(filter(None, (record.subject, record.case.get("wire"))))


def percent(density: float | None) -> str:
    """Return a density; dense reducers have none.

    >>> percent(0.01), percent(0.001), percent(None)
    ('1%', '0.1%', '–')
    """
    return NOTHING if density is None else f"{density * 100:g}%"


def _sent(sent: LinkBytes | None) -> list[str]:
    return [NOTHING, NOTHING] if sent is None else [f"{each / 1e3:,.0f}" for each in (sent.intra, sent.inter)]


def _entries(record: Record) -> list[str]:
    entries = record.more["entries"] or {}
    return [f"{entries[name]:,}" if entries else NOTHING for name in ("selected", "applied")]
