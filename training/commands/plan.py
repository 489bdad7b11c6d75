"""``cloudtrain plan``: print what a run will take, without training; refuse one that cannot be."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from commlib.errors import one_line
from datacache.capacity import readable
from training.commands.printing import NOTHING, Table, milliseconds, times
from training.plan.memory import weights_of
from training.plan.planner import PhasePlan, Plan, check_room, make_plan
from training.plan.samples import listing_of, load_countable
from training.plan.simulation import Simulation, simulations
from training.plan.site import site_of
from training.process.job import log_error, usage_error
from training.report.texts import duration
from training.run.parts import import_parts


def plan(
    path: str,
    overrides: Sequence[str],
    *,
    cluster: str | None,
    ranks: int | None,
    simulate: int | None,
    as_json: bool,
) -> None:
    """Print the plan of a configuration; exit with status 2, after one line, for a run that cannot be."""
    try:
        loaded, counted = load_countable(path, overrides)
        config = import_parts(loaded.config)
        site = site_of(config, cluster, ranks)
        listing = listing_of(config, site.nodes, is_counted=counted is not None)
        made = make_plan(config, site, listing, weights_of(config, listing.dataset))
        check_room(made)
        found = [] if simulate is None else list(simulations(made, simulate))
    except ValueError as error:
        usage_error(str(error))
    except ArithmeticError as error:
        expected = "expected numbers that steps can be computed with"
        usage_error(one_line(f"{cluster or path}: {expected} ({error})"))
    for line in loaded.warnings:
        if cluster is not None or not line.startswith("profile="):  # which has the links and the computing
            log_error(f"warning: {line}")
    notes = [*([counted] if counted else []), *made.missing]
    if found and site.network is None:
        notes.append("simulated over the default links, of commlib.Network(), as none are known")
    notes += [
        f"{each.reducer} on {simulate:,} ranks would send too many messages: simulated on {each.ranks:,}"
        for each in found
        if each.ranks != simulate
    ]
    notes += [
        f"phase {number}: a replica passes over the steps to the next exchange that are left after "
        f"{phase.round_seconds:g} s; the plan has none passed over"
        for number, phase in enumerate(config.phases, 1)
        if phase.round_seconds is not None
    ]
    if as_json:
        print(json.dumps(_record(made, notes, found)))
        return
    for table in _tables(made, found):
        table.print()
    for line in [*_totals(made), *_auto(made), *notes]:
        print(line)


def _record(plan: Plan, notes: Sequence[str], found: Sequence[Simulation]) -> dict[str, Any]:
    """Return the plan as one JSON object: bytes, seconds, and ``null`` for what is not known."""
    site = plan.site
    phases = [
        {**asdict(each), "memory": {**asdict(each.memory), "total": each.memory.total}}
        | {"per_second": each.per_second, "efficiency": each.efficiency}
        for each in plan.phases
    ]
    return {
        "name": plan.name,
        "source": site.source,
        "ranks": site.ranks,
        "ranks_of_nodes": [len(node) for node in site.nodes],
        "weights": plan.weights,
        "phases": phases,
        "cache": {"disk": plan.disk, "memory": plan.memory},
        "room": asdict(plan.room),
        "total": {"seconds": plan.seconds, "traffic_bytes": plan.traffic_bytes, "cost": plan.cost},
        "notes": list(notes),
        "simulated": [asdict(each) for each in found],
    }


def _tables(plan: Plan, found: Sequence[Simulation]) -> Iterator[Table]:
    site, nodes = plan.site, len(plan.site.nodes)
    ranks = f"{site.ranks} rank{'s' * (site.ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"
    title = f"{plan.name}: {plan.weights:,} weights, {ranks} ({site.source})"
    header = ["phase", "steps", "epochs", "batch", "input", "learning rate", "reducer", "density"]
    rows = [_schedule(each) for each in plan.phases]
    if any(each.local_steps for each in plan.phases):
        header.append("local\nsteps")
        for row, each in zip(rows, plan.phases, strict=True):
            row.append(_rounds(each))
    yield Table(title, header, rows, list(_fragments(plan)))
    yield _memory(plan)
    yield _step(plan)
    if found:
        yield _simulated(found)


def _schedule(phase: PhasePlan) -> list[str]:
    return [
        str(phase.number),
        f"{phase.steps:,}",
        f"{phase.epochs:.4g}",
        f"{phase.global_batch:,} {phase.unit}",
        phase.input,
        str(phase.rate),
        phase.reducer,
        NOTHING if phase.density is None else str(phase.density),
    ]


def _rounds(phase: PhasePlan) -> str:
    """Return the local steps of a phase, with its fragments and their delay as ``30/3+4``."""
    if phase.local_steps is None:
        return NOTHING
    fragments = f"/{phase.fragments}" if phase.fragments > 1 else ""
    return f"{phase.local_steps}{fragments}{f'+{phase.delay}' if phase.delay else ''}"


def _fragments(plan: Plan) -> Iterator[str]:
    """Yield what the local steps of phases with fragments or a delay are."""
    for phase in plan.phases:
        if (rounds := _rounds(phase)) not in (NOTHING, str(phase.local_steps)):
            parts = f"each of {phase.fragments} fragments" if phase.fragments > 1 else "the difference"
            delay = f" and arrives {phase.delay} later" if phase.delay else ""
            yield f"local steps {rounds}: {parts} leaves every {phase.local_steps} steps{delay}"


def _exchanges(plan: Plan) -> Iterator[str]:
    """Yield what an exchange of each phase with local steps takes at once."""
    for phase in plan.phases:
        if phase.local_steps is None or phase.peak_bytes is None:
            continue
        what = "the largest fragment" if phase.fragments > 1 else "all weights"
        line = f"phase {phase.number}: an exchange of {what} is {_shown(phase.peak_bytes, 1e-6)} MB at once"
        if phase.exchange is not None:
            line += f", in {milliseconds(phase.exchange)} ms"
            if phase.delay and phase.room is not None:
                fits = "which hides it" if phase.exchange <= phase.room else "which is too short"
                steps = f"{phase.delay} step{'s' * (phase.delay > 1)}"
                line += f", beside {steps} of {milliseconds(phase.room)} ms together, {fits}"
        yield line


def _memory(plan: Plan) -> Table:
    """Return the table of memory; below it what a node's cache takes."""
    header = ["phase", "weights", "optimizer", "gradient", "residual", "reducer", "of a rank", "of a node"]
    rows = []
    for phase in plan.phases:
        own = phase.memory
        parts = (own.weights, own.optimizer, own.gradient, own.residual, own.reducer, own.total)
        rows.append([str(phase.number), *map(readable, parts), readable(own.total * plan.site.ranks_of_node)])
    room = plan.room
    there = {"memory": room.memory, "a rank's GPU": room.gpu}
    there |= {"cache.memory": room.shm, "cache.disk": room.disk}
    has = ", ".join(f"{name} {readable(size)}" for name, size in there.items() if size is not None)
    disk = "not known without the files" if plan.disk is None else readable(plan.disk)
    notes = [
        f"cache of a node: cache.disk {disk}, cache.memory {readable(plan.memory)}",
        f"a node has: {has or 'not known'}",
    ]
    return Table("memory, without activations", header, rows, notes)


def _step(plan: Plan) -> Table:
    """Return the table of a step, and of what all steps come to."""
    header = ["phase", "dense\nMB", "slow link\nMB", "times\nless", "messages\nms", "computing\nms"]
    header += ["step\nms", "a second", "efficiency", "time", "traffic\nGB", "cost"]
    rows = []
    for phase in plan.phases:
        cost = None if phase.seconds is None or plan.price is None else phase.seconds / 3600 * plan.price
        rows.append(
            [
                str(phase.number),
                _shown(phase.dense_bytes, 1e-6),
                _shown(phase.slow_bytes, 1e-6),
                times(phase.dense_bytes / phase.slow_bytes if phase.slow_bytes else None),
                *map(milliseconds, (phase.messages, phase.computing, phase.step)),
                NOTHING if phase.per_second is None else f"{phase.per_second:,.0f} {phase.unit}",
                NOTHING if phase.efficiency is None else f"{phase.efficiency:.1%}",
                NOTHING if phase.seconds is None else duration(phase.seconds),
                _shown(phase.traffic_bytes, 1e-9),
                NOTHING if cost is None else f"{cost:,.2f}",
            ]
        )
    rounds = ", the mean of a round with local steps" if any(p.local_steps for p in plan.phases) else ""
    title = f"a step{rounds}; bytes are those of the busiest node"
    return Table(title, header, rows, list(_exchanges(plan)))


def _shown(value: float | None, unit: float) -> str:
    """Return a number of bytes in a unit, with three digits or all before the point.

    >>> _shown(30_650_000, 1e-6), _shown(1_318_000_000_000, 1e-9), _shown(None, 1)
    ('30.6', '1,318', '–')
    """
    if value is None:
        return NOTHING
    return f"{value * unit:,.0f}" if value * unit >= 100 else f"{value * unit:.3g}"


def _totals(plan: Plan) -> Iterator[str]:
    parts = [] if plan.seconds is None else [f"{duration(plan.seconds)} without tests and checkpoints"]
    if plan.traffic_bytes:
        parts.append(f"{_shown(plan.traffic_bytes, 1e-9)} GB over the slow link from all nodes")
    if plan.cost is not None:
        parts.append(f"{plan.cost:,.2f} for {len(plan.site.nodes)} nodes")
    if parts:
        yield f"to the end: {', '.join(parts)}"


def _auto(plan: Plan) -> Iterator[str]:
    """Yield what ``auto`` would pick, the phases of equal picks together."""
    by_reason: dict[str, list[int]] = {}
    for phase in plan.phases:
        if phase.auto is not None:
            by_reason.setdefault(phase.auto, []).append(phase.number)
    how = " by messages alone" if plan.site.file is not None else ""
    for reason, numbers in by_reason.items():
        yield f"reducer=auto would pick{how}, phase {', '.join(map(str, numbers))}: {reason}"


def _simulated(found: Sequence[Simulation]) -> Table:
    header = ["phase", "reducer", "ranks", "nodes", "entries", "simulated\nms", "closed form\nms", "ratio"]
    header += ["simulated\nMB", "closed form\nMB"]
    rows = [
        [
            ", ".join(map(str, each.phases)),
            each.reducer,
            f"{each.ranks:,}",
            f"{each.nodes:,}",
            f"{each.size:,}",
            milliseconds(each.seconds),
            milliseconds(each.expected_seconds),
            times(each.seconds / each.expected_seconds if each.expected_seconds else None),
            _shown(each.sent, 1e-6),
            _shown(each.expected_sent, 1e-6),
        ]
        for each in found
    ]
    return Table("messages of a step, by the reducers' own code on simulated ranks", header, rows)
