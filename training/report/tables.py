"""The tables of a report: a line for each phase, epoch, level of the cache, and event of a run."""

from collections.abc import Iterator, Sequence
from statistics import median

from training.report.facts import reducer
from training.report.reading import Record, mapping, number, text, whole
from training.report.run import Epoch, Phase, Run
from training.report.style import STAGES
from training.report.texts import NOTHING, bytes_shown, duration, percent, plain, shown_by

LEVELS = {
    "memory": "memory of the node (level 2)",
    "disk": "disk of the node (level 1)",
    "remote": "other nodes",
    "storage": "central storage",
}
EXCHANGE = "exchange a step"
Table = tuple[list[str], list[list[str]]]  # its header and its rows


def table_of(rows: Sequence[dict[str, str]]) -> Table:
    """Return a table of rows by the names of columns; those without any value are left out.

    >>> table_of([{"a": "1", "b": "–"}, {"a": "2", "c": "3"}])
    (['a', 'c'], [['1', '–'], ['2', '3']])
    """
    names = dict.fromkeys(name for row in rows for name in row)
    kept = [name for name in names if any(row.get(name, NOTHING) != NOTHING for row in rows)]
    return kept, [[row.get(name, NOTHING) for name in kept] for row in rows]


def phases(run: Run) -> Table:
    """Return a line for each phase; predicted is what ``auto`` expected when it chose."""
    return table_of([_phase(phase) for phase in run.phases])


def _phase(phase: Phase) -> dict[str, str]:
    record = phase.epochs[0].record if phase.epochs else phase.result
    planned = whole(phase.config, "epochs")
    of = f" of {planned}" if planned is not None and planned != len(phase.epochs) else ""
    sent, dense = (_sum(phase.epochs, f"{key}_inter_bytes") for key in ("sent", "dense"))
    stall, skipped = number(phase.result, "stall_seconds"), whole(phase.result, "skipped_steps")
    return {
        "phase": str(phase.number + 1),
        "reducer": reducer(phase) or NOTHING,
        "input": _input(record),
        "epochs": f"{len(phase.epochs)}{of}",
        "steps": f"{sum(epoch.steps for epoch in phase.epochs):,}",
        "learning rate": _rate(phase.config.get("learning_rate")),
        "between nodes": bytes_shown(sent) if dense else NOTHING,
        "were it dense": bytes_shown(dense) if dense else NOTHING,
        "stall before": _seconds(stall),
        "steps skipped": NOTHING if skipped is None else str(skipped),
        EXCHANGE: _seconds(_measured(phase)),
        "predicted": _seconds(number(phase.choice, "predicted_seconds")),
        "predicted, dense": _seconds(number(phase.choice, "predicted_dense_seconds")),
    }


def _sum(epochs: Sequence[Epoch], key: str) -> float:
    return sum(number(epoch.record, key) or 0.0 for epoch in epochs)


def _seconds(value: float | None) -> str:
    return NOTHING if value is None else duration(value)


def _input(record: Record) -> str:
    size = whole(record, "input_size")  # of older records
    return text(record.get("input")) or (f"{size} px" if size is not None else NOTHING)


def _rate(schedule: object) -> str:
    """Return a learning rate's schedule in short."""
    given = mapping(schedule)
    start, end = number(given, "start"), number(given, "end")
    if start is None:
        return text(schedule) or NOTHING
    return (
        f"{start:g}" if end is None or start == end else f"{start:g} → {end:g}, {text(given.get('schedule'))}"
    )


def _measured(phase: Phase) -> float | None:
    """Return the seconds of a step in the reducer, of all stages together: the median of its epochs.

    The first epoch of a process can be far longer, as where kernels are compiled in it.
    """
    told = [sum(epoch.stage(name) for name in STAGES) for epoch in phase.epochs]
    return median(told) if any(told) else None


def epochs(run: Run) -> Table:
    """Return a line for each epoch."""
    return table_of([_epoch(epoch) for epoch in run.epochs])


def _epoch(epoch: Epoch) -> dict[str, str]:
    record = epoch.record
    loss, share, throughput = number(record, "loss"), number(record, "hidden_share"), epoch.throughput
    late = mapping(record.get("slowest"))
    inter, intra, dense = (
        number(record, f"{key}_bytes") for key in ("sent_inter", "sent_intra", "dense_inter")
    )
    return {
        "epoch": str(epoch.number + 1),
        "phase": str(epoch.phase + 1),
        "reducer": text(record.get("reducer")) or NOTHING,
        "input": _input(record),
        "steps": f"{epoch.steps:,}",
        "loss": NOTHING if loss is None else plain(loss),
        **{name: shown_by(name)(value) for name, value in epoch.metrics.items()},
        "training": _seconds(number(record, "train_seconds")),
        "since begin": duration(epoch.seconds),
        f"{epoch.unit or 'units'}/s": NOTHING if throughput is None else plain(throughput),
        "between nodes": bytes_shown(inter) if inter else NOTHING,
        "were it dense": bytes_shown(dense) if dense else NOTHING,
        "inside nodes": bytes_shown(intra) if intra else NOTHING,
        "hidden": NOTHING if share is None else percent(share),
        "slowest rank": f"{whole(late, 'rank')} (+{number(late, 'excess') or 0.0:.0%})" if late else NOTHING,
    }


def reads(run: Run) -> list[tuple[str, int, float]]:
    """Return how many samples were read from each level, and their share, of processes that have ended."""
    told = [each.record for each in run.all_of("cache")]
    counts = {name: sum(whole(each, key) or 0 for each in told) for key, name in LEVELS.items()}
    all_reads = sum(counts.values())
    return [(name, count, count / all_reads) for name, count in counts.items() if count]


def events(run: Run) -> Iterator[tuple[float, int, str]]:
    """Yield what happened at which second and step, besides epochs and checkpoints."""
    for event in run.events:
        if words := _in_words(event.record):
            yield event.seconds, event.end, words


def _in_words(record: Record) -> str:
    kind, reason = record["kind"], text(record.get("reason"))
    if kind == "choice":
        return f"phase {(whole(record, 'phase') or 0) + 1}: auto picks {reason}"
    if kind == "resume":
        changes = record.get("changes")
        more = [text(each) for each in changes] if isinstance(changes, list) else []
        return "; ".join([f"resumed from {text(record.get('checkpoint'))}", *more])
    if kind == "switch":
        norm = number(record, "residual_norm")
        kept = "" if norm is None else f"; a residual of norm {norm:.3g} goes into the next step"
        return f"switch from {text(record.get('before'))} to {text(record.get('after'))}{kept}"
    if kind == "stall":
        seconds = number(record, "stall_seconds") or 0.0
        return f"ranks stood still for {duration(seconds)} before phase {(whole(record, 'phase') or 0) + 1}"
    if kind == "cache":
        damaged = sum(whole(record, f"damaged_{level}") or 0 for level in ("in_memory", "on_disk"))
        return f"{damaged} damaged records of the cache were read again" if damaged else ""
    if kind == "stop":
        return f"{reason}: the run ended early"
    if kind == "prepare":
        return f"steps compiled in {duration(number(record, 'compile_seconds') or 0.0)}"
    return reason or text(record.get("why_not"))
