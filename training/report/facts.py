"""What a run is and came to, as short texts."""

from collections import Counter
from collections.abc import Iterator
from statistics import fmean, median

from training.report.curves import goal_of
from training.report.reading import mapping, mappings, named, number, text, whole
from training.report.run import Phase, Run
from training.report.texts import METRICS, NOTHING, bytes_shown, duration, percent, plain, shown_by

HOSTS_SHOWN = 8
ENDED = FINISHED, REACHED = "finished", "target reached"


def state(run: Run) -> str:
    """Return whether a run has ended."""
    if run.folder.is_alive:
        return "being trained"
    if not run.folder.summary:
        return "unfinished"
    return REACHED if run.folder.summary.get("reached") is True else FINISHED


def tiles(run: Run) -> Iterator[tuple[str, str, str]]:
    """Yield the largest facts of a run: what it is, the value, and what belongs to it."""
    tested = next((epoch.metrics for epoch in reversed(run.epochs) if epoch.metrics), None)
    if tested is not None:
        aim = text(mapping(run.folder.config.get("target")).get("metric"))
        name = aim if aim in tested else next(iter(tested))
        label = METRICS[name].label if name in METRICS else name
        yield label, shown_by(name)(tested[name]), best(run, name)
    elif (loss := _last_loss(run)) is not None:
        yield "training loss", plain(loss), "not tested"
    epochs = f"{len(run.epochs)} epochs" if len(run.epochs) != 1 else "1 epoch"
    yield "training", duration(run.seconds), f"{run.end:,} steps, {epochs}"
    rates = [epoch.throughput for epoch in run.epochs if epoch.throughput is not None]
    if rates:
        yield "throughput", plain(median(rates)), f"{run.epochs[-1].unit} a second, median of epochs"
    sent, dense = (total(run, f"{key}_inter_bytes") for key in ("sent", "dense"))
    if dense:
        share = f"1/{dense / sent:,.0f}" if 0 < 10 * sent < dense else f"{sent / dense:.0%}"
        yield "sent between nodes", bytes_shown(sent), f"{share} of the {bytes_shown(dense)} of dense"
    elif total(run, "sent_intra_bytes"):
        yield "sent inside the node", bytes_shown(total(run, "sent_intra_bytes")), "all ranks"


def _last_loss(run: Run) -> float | None:
    told = [number(each.record, "loss") for each in (*run.steps, *run.epochs)]
    return next((each for each in reversed(told) if each is not None), None)


def best(run: Run, metric: str) -> str:
    """Return the best value of a metric, and when it was reached."""
    told = [(epoch.metrics[metric], epoch) for epoch in run.epochs if metric in epoch.metrics]
    known = METRICS.get(metric)
    is_lower = known is not None and known.better == "lower"
    value, epoch = (min if is_lower else max)(told, key=lambda each: each[0])
    word = "highest" if known is None else "best"
    return f"{word} {shown_by(metric)(value)} in epoch {epoch.number + 1}"


def total(run: Run, key: str) -> float:
    """Return the sum of a number over epochs."""
    return sum(number(epoch.record, key) or 0.0 for epoch in run.epochs)


# -------------------------------------------------------------------------------------- one column a run


def facts(run: Run) -> dict[str, str]:
    """Return what a run is and came to, by what that is called."""
    config, begun = run.folder.config, run.begun
    resumed = len(run.all_of("resume"))
    return {
        "state": _state_in_words(run),
        "configuration": text(config.get("name")) or NOTHING,
        "model": named(config.get("model")) or NOTHING,
        "data set": named(config.get("dataset")) or NOTHING,
        "optimizer": named(config.get("optimizer")) or NOTHING,
        "ranks": _ranks(run),
        "hardware": run.folder.hardware or NOTHING,
        "reducers": ", then ".join(_reducers(run)) or "none: one rank",
        "target": target(run) or NOTHING,
        "slowest rank": slowest(run) or NOTHING,
        "exchange hidden": _hidden(run) or NOTHING,
        "stalls between phases": _stalls(run) or "none",
        "steps skipped": _skipped(run) or "none",
        "checkpoints": checkpoints(run) or "none",
        "resumed": f"{resumed} times" if resumed > 1 else "once" if resumed else "never",
        "begun": text(next((each.record.get("started") for each in run.all_of("run")), None)) or NOTHING,
        "versions": ", ".join(f"{key} {text(each)}" for key, each in mapping(begun.get("versions")).items()),
        "command": text(begun.get("command")) or NOTHING,
        "folder": str(run.folder.path),
    }


def _state_in_words(run: Run) -> str:
    parts = [state(run)]
    planned = sum(whole(phase.config, "epochs") or 0 for phase in run.phases)
    if not run.folder.summary and planned:
        parts.append(f"{len(run.epochs)} of {planned} epochs")
    if run.folder.damaged:
        lines = "1 damaged line" if run.folder.damaged == 1 else f"{run.folder.damaged} damaged lines"
        parts.append(f"{lines} of metrics.jsonl left out")
    return "; ".join(parts)


def _ranks(run: Run) -> str:
    source = run.begun if whole(run.begun, "ranks") else run.folder.summary
    count, nodes, hosts = whole(source, "ranks"), source.get("nodes"), source.get("hosts")
    if count is None:
        return NOTHING
    on = f" on {len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}" if isinstance(nodes, list) else ""
    names = [text(each) for each in hosts] if isinstance(hosts, list) else []
    more = f" and {len(names) - HOSTS_SHOWN} more" if len(names) > HOSTS_SHOWN else ""
    at = f" ({', '.join(names[:HOSTS_SHOWN])}{more})" if names else ""
    transport = text(run.begun.get("transport"))
    by = f", by {transport}" if transport not in ("", "none") else ""
    return f"{count} rank{'s' * (count > 1)}{on}{at}{by}"


def _reducers(run: Run) -> list[str]:
    """Return the reducers of phases, equal ones that follow each other once."""
    told = [reducer(phase) for phase in run.phases if phase.reducer]
    return [each for place, each in enumerate(told) if not place or told[place - 1] != each]


def reducer(phase: Phase) -> str:
    """Return the reducer of a phase with what matters most of its options."""
    options = mapping(phase.config.get("reducer"))
    density = number(options, "density")
    sparse = [f"{100 * density:.3g} %"] if density is not None else []
    wire = text(options.get("wire"))
    more = [*sparse, *([wire] if wire not in ("", "fp32") else [])]
    return f"{phase.reducer} ({', '.join(more)})" if more else phase.reducer


def target(run: Run) -> str:
    """Return the target of a run, and when it was reached."""
    name = text(mapping(run.folder.config.get("target")).get("metric"))
    goal = goal_of(run, name)
    if goal is None:
        return ""
    is_at_most = number(mapping(run.folder.config.get("target")), "at_most") is not None
    write = shown_by(name)
    wanted = f"{name} of {'at most' if is_at_most else 'at least'} {write(goal)}"
    for epoch in run.epochs:
        value = epoch.metrics.get(name)
        if value is not None and (value <= goal if is_at_most else value >= goal):
            hours = f"{epoch.seconds / 3600:.4g} h"
            return f"{wanted}: reached in epoch {epoch.number + 1}, after {duration(epoch.seconds)} ({hours})"
    return f"{wanted}: not reached"


def slowest(run: Run) -> str:
    """Return which rank kept the others waiting in most epochs."""
    told = [mapping(epoch.record.get("slowest")) for epoch in run.epochs]
    excesses = [(whole(each, "rank"), number(each, "excess") or 0.0) for each in told]
    ranks = [(rank, excess) for rank, excess in excesses if rank is not None]
    if not ranks:
        return ""
    (rank, count), *_ = Counter(rank for rank, _ in ranks).most_common(1)
    excess = fmean(excess for each, excess in ranks if each == rank)
    return f"rank {rank} in {count} of {len(ranks)} epochs, by {excess:.1%} on average"


def _hidden(run: Run) -> str:
    shares = [number(epoch.record, "hidden_share") for epoch in run.epochs]
    told = [share for share in shares if share is not None]
    return f"{percent(fmean(told))} on average of epochs" if told else ""


def _stalls(run: Run) -> str:
    told = {whole(each.record, "phase"): number(each.record, "stall_seconds") for each in run.all_of("stall")}
    stalls = [f"{duration(each)} before phase {phase + 1}" for phase, each in told.items() if phase and each]
    return ", ".join(stalls)


def _skipped(run: Run) -> str:
    results = mappings(run.folder.summary.get("phases"))
    count = sum(whole(each, "skipped_steps") or 0 for each in results)
    if not results:
        count = sum(step.record.get("finite") is False for step in run.steps)
    return f"{count} of {run.end:,}, for a NaN or an infinity" if count else ""


def checkpoints(run: Run) -> str:
    """Return how many checkpoints were written, and what they cost the loop."""
    told = [each.record for each in run.all_of("checkpoint")]
    costs = [
        copied + (number(record, "wait_seconds") or 0.0)  # in which the loop stood still
        for record in told
        if (copied := number(record, "copy_seconds")) is not None
    ]
    if not told or not costs:
        return f"{len(told)}" if told else ""
    share = f", {sum(costs) / run.seconds:.1%} of the time" if run.seconds else ""
    return f"{len(told)}, {duration(median(costs))} each (median), {duration(sum(costs))} together{share}"
