"""The facts of a run in a report: short texts, and tables of its phases, epochs, cache reads and events."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from statistics import fmean, median
from typing import NamedTuple

from markupsafe import Markup

from training.config.reading import mapping, mappings
from training.report.curves import goal_of
from training.report.run import Epoch, Phase, Record, Run, named, number, text, whole
from training.report.style import STAGES
from training.report.texts import METRICS, NOTHING, bytes_shown, duration, percent, plain, shown_by
from training.results import Ranks

ENDED = FINISHED, REACHED = "finished", "target reached"
LEVELS = {
    "memory": "memory of the node (level 2)",
    "disk": "disk of the node (level 1)",
    "remote": "other nodes",
    "storage": "central storage",
}
EXCHANGE = "exchange a step"
BAR = Markup('<div class="bar"><div class="part" style="width: {}"></div></div>')
EXCHANGE_NOTE = (
    "Exchange: time of a step in the reducer, median of epochs; waiting for later ranks is a part of it."
)
PREDICTED_NOTE = " Predicted: what auto expected when it chose the reducer, without such waiting."


class PageTable(NamedTuple):
    """A table of a page. ``kind``: its class in page.css; ``note``: a line below it."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    kind: str = ""
    note: str = ""


def state(run: Run) -> str:
    """Return the state of a run: being trained, unfinished, finished or target reached."""
    if run.is_alive:
        return "being trained"
    if not run.summary:
        return "unfinished"
    return REACHED if run.summary.get("reached") is True else FINISHED


def tiles(run: Run) -> Iterator[tuple[str, str, str]]:
    """Yield the largest facts of a run: what it is, the value, and what belongs to it."""
    tested = next((epoch.metrics for epoch in reversed(run.epochs) if epoch.metrics), None)
    losses = [number(each.record, "loss") for each in (*run.steps, *run.epochs)]
    loss = next((each for each in reversed(losses) if each is not None), None)
    if tested is not None:
        wanted = text(mapping(run.config.get("target")).get("metric"))
        name = wanted if wanted in tested else next(iter(tested))
        label = METRICS[name].label if name in METRICS else name
        yield label, shown_by(name)(tested[name]), _best(run, name)
    elif loss is not None:
        yield "training loss", plain(loss), "not tested"
    epochs = f"{len(run.epochs)} epochs" if len(run.epochs) != 1 else "1 epoch"
    yield "training", duration(run.seconds), f"{run.end:,} steps, {epochs}"
    rates = [epoch.throughput for epoch in run.epochs if epoch.throughput is not None]
    if rates:
        yield "throughput", plain(median(rates)), f"{run.epochs[-1].unit} a second, median of epochs"
    sent, dense, inside = (
        _total(run.epochs, f"{key}_bytes") for key in ("sent_inter", "dense_inter", "sent_intra")
    )
    if dense:
        share = f"1/{dense / sent:,.0f}" if 0 < 10 * sent < dense else f"{sent / dense:.0%}"
        yield "sent between nodes", bytes_shown(sent), f"{share} of the {bytes_shown(dense)} of dense"
    elif inside:
        yield "sent inside the node", bytes_shown(inside), "all ranks"


def _best(run: Run, metric: str) -> str:
    tested = [(epoch.metrics[metric], epoch) for epoch in run.epochs if metric in epoch.metrics]
    known = METRICS.get(metric)
    is_lower = known is not None and known.better == "lower"
    value, epoch = (min if is_lower else max)(tested, key=lambda each: each[0])
    word = "highest" if known is None else "best"
    return f"{word} {shown_by(metric)(value)} in epoch {epoch.number + 1}"


def _total(epochs: Sequence[Epoch], key: str) -> float:
    return sum(number(epoch.record, key) or 0.0 for epoch in epochs)


# -------------------------------------------------------------------------------------- one column a run


def facts_of(runs: Sequence[Run]) -> PageTable:
    """Return the table of facts, without the lines that are empty for all runs."""
    columns = [facts(run) for run in runs]
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    header = ["", *(run.name if len(runs) > 1 else "" for run in runs)]
    return PageTable(header, [row for row in rows if set(row[1:]) != {NOTHING}], "facts")


def facts(run: Run) -> dict[str, str]:
    """Return the facts of a run by their names."""
    config, begun = run.config, run.begun
    resumed = len(run.all_of("resume"))
    reducers = [name for name, _ in groupby(_reducer(phase) for phase in run.phases if phase.reducer)]
    found = {
        "state": _state_in_words(run),
        "configuration": text(config.get("name")),
        "model": named(config.get("model")),
        "data set": named(config.get("dataset")),
        "optimizer": named(config.get("optimizer")),
        "ranks": _ranks(run),
        "hardware": run.hardware,
        "reducers": ", then ".join(reducers) or "none: one rank",
        "target": _target(run),
        "slowest rank": _slowest(run),
        "exchange hidden": _hidden(run),
        "stalls between phases": _stalls(run) or "none",
        "steps skipped": _skipped(run) or "none",
        "steps passed over": _passed_over(run),
        "checkpoints": _checkpoints(run) or "none",
        "resumed": f"{resumed} times" if resumed > 1 else "once" if resumed else "never",
        "begun": text(next((each.record.get("started") for each in run.all_of("run")), None)),
        "versions": ", ".join(f"{key} {text(each)}" for key, each in mapping(begun.get("versions")).items()),
        "command": text(begun.get("command")),
        "folder": str(run.path),
    }
    return {name: value or NOTHING for name, value in found.items()}


def _state_in_words(run: Run) -> str:
    parts = [state(run)]
    planned = [whole(phase.config, "epochs") or 0 for phase in run.phases]
    if not run.summary and planned and all(planned):  # others have steps
        parts.append(f"{len(run.epochs)} of {sum(planned)} epochs")
    if run.damaged:
        lines = "1 damaged line" if run.damaged == 1 else f"{run.damaged} damaged lines"
        parts.append(f"{lines} of metrics.jsonl left out")
    return "; ".join(parts)


def _ranks(run: Run) -> str:
    source = run.begun if whole(run.begun, "ranks") else run.summary
    count, nodes, hosts = whole(source, "ranks"), source.get("nodes"), source.get("hosts")
    if not (count and nodes and hosts and isinstance(nodes, list) and isinstance(hosts, list)):
        return ""
    transport = text(run.begun.get("transport"))
    by = f", by {transport}" if transport not in ("", "none") else ""
    return f"{Ranks(count, nodes, [text(each) for each in hosts])}{by}"


def _reducer(phase: Phase) -> str:
    """Return the reducer of a phase with its density, and its codec unless that is ``fp32``."""
    options = mapping(phase.config.get("reducer"))
    density, wire = number(options, "density"), text(options.get("wire"))
    more = [] if density is None else [f"{100 * density:.3g} %"]
    more += [wire] if wire not in ("", "fp32") else []
    return f"{phase.reducer} ({', '.join(more)})" if more else phase.reducer


def _target(run: Run) -> str:
    target = mapping(run.config.get("target"))
    name = text(target.get("metric"))
    if (goal := goal_of(run, name)) is None:
        return ""
    is_at_most = number(target, "at_most") is not None
    wanted = f"{name} of {'at most' if is_at_most else 'at least'} {shown_by(name)(goal)}"
    for epoch in run.epochs:
        value = epoch.metrics.get(name)
        if value is not None and (value <= goal if is_at_most else value >= goal):
            hours = f"{epoch.seconds / 3600:.4g} h"
            return f"{wanted}: reached in epoch {epoch.number + 1}, after {duration(epoch.seconds)} ({hours})"
    return f"{wanted}: not reached"


def _slowest(run: Run) -> str:
    """Return which rank kept the others waiting in most epochs."""
    records = [mapping(epoch.record.get("slowest")) for epoch in run.epochs]
    excesses = [(whole(each, "rank"), number(each, "excess") or 0.0) for each in records]
    ranks = [(rank, excess) for rank, excess in excesses if rank is not None]
    if not ranks:
        return ""
    (rank, count), *_ = Counter(rank for rank, _ in ranks).most_common(1)
    excess = fmean(excess for each, excess in ranks if each == rank)
    return f"rank {rank} in {count} of {len(ranks)} epochs, by {excess:.1%} on average"


def _hidden(run: Run) -> str:
    shares = [number(epoch.record, "hidden_share") for epoch in run.epochs]
    known = [share for share in shares if share is not None]
    return f"{percent(fmean(known))} on average of epochs" if known else ""


def _stalls(run: Run) -> str:
    stalls = {
        whole(each.record, "phase"): number(each.record, "stall_seconds") for each in run.all_of("stall")
    }
    return ", ".join(f"{duration(each)} before phase {at + 1}" for at, each in stalls.items() if at and each)


def _skipped(run: Run) -> str:
    results = mappings(run.summary.get("phases"))
    if results:
        count, of = sum(whole(each, "skipped_steps") or 0 for each in results), f"{run.end:,}"
    else:  # the run has not ended
        logged = [step.record.get("finite") is False for step in run.steps]
        count, of = sum(logged), f"{len(logged):,} logged"
    return f"{count} of {of}, for a NaN or an infinity" if count else ""


def _passed_over(run: Run) -> str:
    count = sum(whole(epoch.record, "passed_over") or 0 for epoch in run.epochs)
    return f"{count:,} of all ranks, whose rounds had lasted round_seconds" if count else ""


def _checkpoints(run: Run) -> str:
    """Return how many checkpoints were written, and how long the loop stood still for them."""
    records = [each.record for each in run.all_of("checkpoint")]
    costs = [
        copied + (number(record, "wait_seconds") or 0.0)
        for record in records
        if (copied := number(record, "copy_seconds")) is not None
    ]
    if not costs:
        return f"{len(records)}" if records else ""
    share = f", {sum(costs) / run.seconds:.1%} of the time" if run.seconds else ""
    return f"{len(records)}, {duration(median(costs))} each (median), {duration(sum(costs))} together{share}"


# -------------------------------------------------------------------------------------- tables of a run


def table_of(rows: Sequence[dict[str, str]]) -> PageTable:
    """Return a table of rows by the names of columns, without the columns that are empty.

    >>> table_of([{"a": "1", "b": "–"}, {"a": "2", "c": "3"}])[:2]
    (['a', 'c'], [['1', '–'], ['2', '3']])
    """
    names = dict.fromkeys(name for row in rows for name in row)
    kept = [name for name in names if any(row.get(name, NOTHING) != NOTHING for row in rows)]
    return PageTable(kept, [[row.get(name, NOTHING) for name in kept] for row in rows])


def phases(run: Run) -> PageTable:
    """Return a line for each phase; predicted is what ``auto`` expected when it chose."""
    table = table_of([_phase(phase) for phase in run.phases])
    note = EXCHANGE_NOTE + (PREDICTED_NOTE if run.all_of("choice") else "")
    return table._replace(note=note) if EXCHANGE in table.header else table


def _phase(phase: Phase) -> dict[str, str]:
    planned = whole(phase.config, "epochs")
    of = f" of {planned}" if planned is not None and planned != len(phase.epochs) else ""
    sent, dense = (_total(phase.epochs, f"{key}_inter_bytes") for key in ("sent", "dense"))
    return {
        "phase": str(phase.number + 1),
        "reducer": _reducer(phase) or NOTHING,
        "input": _input(phase.epochs[0].record if phase.epochs else phase.result),
        "epochs": f"{len(phase.epochs)}{of}",
        "steps": f"{sum(epoch.steps for epoch in phase.epochs):,}",
        "learning rate": _rate(phase.config.get("learning_rate")),
        "between nodes": bytes_shown(sent) if dense else NOTHING,
        "were it dense": bytes_shown(dense) if dense else NOTHING,
        "stall before": _cell(duration, number(phase.result, "stall_seconds")),
        "steps skipped": _cell(str, whole(phase.result, "skipped_steps")),
        EXCHANGE: _cell(duration, _exchange_seconds(phase)),
        "predicted": _cell(duration, number(phase.choice, "predicted_seconds")),
        "predicted, dense": _cell(duration, number(phase.choice, "predicted_dense_seconds")),
    }


def _cell(shown: Callable[..., str], value: float | None) -> str:
    return NOTHING if value is None else shown(value)


def _input(record: Record) -> str:
    size = whole(record, "input_size")  # of older records
    return text(record.get("input")) or (f"{size} px" if size is not None else NOTHING)


def _rate(schedule: object) -> str:
    given = mapping(schedule)
    start, end = number(given, "start"), number(given, "end")
    if start is None:
        return text(schedule) or NOTHING
    is_constant = end is None or start == end
    return f"{start:g}" if is_constant else f"{start:g} → {end:g}, {text(given.get('schedule'))}"


def _exchange_seconds(phase: Phase) -> float | None:
    """Return the seconds of a step in the reducer: the median of epochs, as a first one can be far longer."""
    seconds = [sum(epoch.stage(name) for name in STAGES) for epoch in phase.epochs]
    return median(seconds) if any(seconds) else None


def epochs(run: Run) -> PageTable:
    """Return a line for each epoch."""
    return table_of([_epoch(epoch) for epoch in run.epochs])


def _epoch(epoch: Epoch) -> dict[str, str]:
    record, late = epoch.record, mapping(epoch.record.get("slowest"))
    inter, intra, dense = (
        number(record, f"{key}_bytes") or None for key in ("sent_inter", "sent_intra", "dense_inter")
    )
    return {
        "epoch": str(epoch.number + 1),
        "phase": str(epoch.phase + 1),
        "reducer": text(record.get("reducer")) or NOTHING,
        "input": _input(record),
        "steps": f"{epoch.steps:,}",
        "loss": _cell(plain, number(record, "loss")),
        **{name: shown_by(name)(value) for name, value in epoch.metrics.items()},
        "training": _cell(duration, number(record, "train_seconds")),
        "since begin": duration(epoch.seconds),
        f"{epoch.unit or 'units'}/s": _cell(plain, epoch.throughput),
        "between nodes": _cell(bytes_shown, inter),
        "were it dense": _cell(bytes_shown, dense),
        "inside nodes": _cell(bytes_shown, intra),
        "hidden": _cell(percent, number(record, "hidden_share")),
        "slowest rank": f"{whole(late, 'rank')} (+{number(late, 'excess') or 0.0:.0%})" if late else NOTHING,
    }


def reads(run: Run) -> PageTable:
    """Return how many samples were read from each level, by all processes that have ended."""
    records = [each.record for each in run.all_of("cache")]
    counts = {name: sum(whole(each, key) or 0 for each in records) for key, name in LEVELS.items()}
    shares = {name: count / sum(counts.values()) for name, count in counts.items() if count}
    rows = [
        [name, f"{counts[name]:,}", f"{each:.1%}", BAR.format(f"{each:.1%}")] for name, each in shares.items()
    ]
    return PageTable(["level", "samples", "share", ""], rows)


def events(run: Run) -> PageTable:
    """Return what happened at which second and step, besides epochs and checkpoints."""
    found = [(each, _in_words(each.record)) for each in run.events]
    rows = [[duration(each.seconds), f"{each.end:,}", words] for each, words in found if words]
    return PageTable(["after", "step", ""], rows, "events")


def _in_words(record: Record) -> str:
    reason, phase = text(record.get("reason")), (whole(record, "phase") or 0) + 1
    match record["kind"]:
        case "choice":
            return f"phase {phase}: auto picks {reason}"
        case "resume":
            changes = record.get("changes")
            more = [text(each) for each in changes] if isinstance(changes, list) else []
            return "; ".join([f"resumed from {text(record.get('checkpoint'))}", *more])
        case "switch":
            norm = number(record, "residual_norm")
            kept = "" if norm is None else f"; a residual of norm {norm:.3g} goes into the next step"
            return f"switch from {text(record.get('before'))} to {text(record.get('after'))}{kept}"
        case "stall":
            seconds = duration(number(record, "stall_seconds") or 0.0)
            return f"ranks stood still for {seconds} before phase {phase}"
        case "cache":
            damaged = sum(whole(record, f"damaged_{level}") or 0 for level in ("in_memory", "on_disk"))
            return f"{damaged} damaged records of the cache were read again" if damaged else ""
        case "stop":
            return f"{reason}: the run ended early"
        case "prepare":
            return f"steps compiled in {duration(number(record, 'compile_seconds') or 0.0)}"
    return reason or text(record.get("why_not"))
