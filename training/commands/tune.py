"""``cloudtrain tune``: measure links, kernels and reducers of a job, print what ``auto`` picks."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, get_args

import numpy as np

from commlib import Link, Topology
from commlib.reducers import reducer_options
from commlib.tuning import tuner
from commlib.tuning.probe import Candidate, Profile, implausible, measure
from commlib.tuning.tuner import ALONE, ATTEMPTS, WIDE, Choice, choose, expect, spread_of, tried, try_out
from training.bench.train import TimedSteps, close, endless
from training.commands.printing import Table, milliseconds, times
from training.commands.train import make_trainer
from training.config.config import Config, load
from training.config.records import Phase, Transport
from training.config.reducers import AUTO
from training.plan.site import measured_for
from training.process.devices import see_own_gpu, with_gpus
from training.process.job import LocalRank, all_or_exit, as_rank, on_rank0
from training.run.autotune import profile_path
from training.run.parts import import_parts

SIZES = (1_000_000, 14_700_000, 25_600_000)  # examples without a configuration
DENSITIES = (0.01, 0.001)
TURNS, WARM_UP_STEPS, COUNTED_STEPS = 2, 2, 4  # of the steps without an exchange
# Of a configuration and of its phases, whose steps are taken without an exchange.
NO_RUN: dict[str, Any] = {"callbacks": [], "metrics_port": None, "trace": None}
NO_EXCHANGE = dict.fromkeys(("local_steps", "local", "round_seconds", "outer", "budget", "density_warmup"))


@dataclass(frozen=True)
class Request:
    """A request to measure: the ranks as nodes of ``layout``, or as in a configuration.

    ``layout``: ranks on each node, or of each, joined by commas. ``profile``: where the result goes.
    ``transport``: as of a configuration, ``auto`` without one.
    """

    path: str | None
    overrides: Sequence[str]
    layout: str | None
    profile: str | None
    transport: str | None = None

    def arguments(self) -> list[str]:
        """Return the command-line arguments of this request on one rank of a job."""
        options = {"--ranks-per-node": self.layout, "--profile": self.profile, "--transport": self.transport}
        given = [word for name, value in options.items() if value is not None for word in (name, value)]
        return ["tune", *given, *([self.path, *self.overrides] if self.path else [])]

    def resolve(self) -> "Resolved":
        """Return the request with its configuration; ``ValueError`` names an invalid option."""
        if self.path is None:
            return Resolved(None, _counts(self.layout), self.profile, _known(self.transport))
        config = load(self.path, self.overrides)
        for key, value in (("ranks_per_node", self.layout), ("transport", self.transport)):
            if value is not None:
                expected = f"expected none beside {self.path} (there it is {key}=…)"
                raise ValueError(f"--{key.replace('_', '-')}: {expected}, got {value}")
        return Resolved(config, config.ranks_per_node, self.profile or config.profile, config.transport)


@dataclass(frozen=True)
class Resolved:
    """A request whose configuration is loaded."""

    config: Config | None
    ranks_per_node: int | list[int] | None
    profile: str | None
    transport: str


@dataclass(frozen=True)
class Case:
    """A gradient for which a reducer is picked. ``label``: the prefix of its lines.

    ``own``: the reducer that the configuration names, unless that is ``auto``.
    """

    label: str
    size: int
    density: float
    own: Candidate | None = None


def _known(transport: str | None) -> str:
    known = get_args(Transport)
    if transport is not None and transport not in known:
        raise ValueError(f"--transport: expected one of {', '.join(known)}, got {transport!r}")
    return transport or "auto"


def _counts(layout: str | None) -> int | list[int] | None:
    if layout is None:
        return None
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", layout):
        expected = "a number of ranks, or one for each node joined by commas"
        raise ValueError(f"--ranks-per-node: expected {expected}, got {layout!r}")
    counts = [int(count) for count in layout.split(",")]
    return counts if len(counts) > 1 else counts[0]


def tune(request: Request) -> None:
    """Measure on all ranks of this job; rank 0 writes the profile and prints."""
    with as_rank() as comm:
        asked = all_or_exit(comm, lambda: on_rank0(comm, request.resolve))
        config = all_or_exit(comm, lambda: asked.config and import_parts(asked.config))
        topology = all_or_exit(comm, lambda: Topology(comm, ranks_per_node=asked.ranks_per_node))
        topology = all_or_exit(comm, lambda: _on_gpus(topology, asked))
        path = all_or_exit(comm, lambda: profile_path(asked.profile, topology))
        trainer = None if config is None else _without_exchange(config, topology)
        cases = _cases(topology, config, 0 if trainer is None else trainer.parts.exchange.gradients.size)
        profile = _measure(topology, cases)
        if trainer is not None:
            profile = replace(profile, throughput=tuple(_throughput(trainer)))
            close(trainer)
        all_or_exit(comm, lambda: _save(profile, path) if comm.rank == 0 else None)
        if comm.rank == 0:
            _report(profile, path, topology, cases)


def _on_gpus(topology: Topology, asked: Resolved) -> Topology:
    """Return the topology that training will have, over the GPUs if there are any."""
    see_own_gpu(LocalRank.of(topology.world))
    topology, why_not = with_gpus(topology, asked.transport)
    if why_not is not None and topology.world.rank == 0:
        print(why_not, flush=True)
    return topology


def _measure(topology: Topology, cases: Sequence[Case]) -> Profile:
    """Measure links and kernels, then try reducers in every case; rank 0 prints the progress."""
    is_reporting = topology.world.rank == 0
    if is_reporting:
        print("measuring links and kernels …", flush=True)
    profile = measure(topology)
    for _ in range(ATTEMPTS - 1):
        if (why := implausible(profile)) is None:
            break
        if is_reporting:
            print(f"measured {why}: measuring again …", flush=True)
        profile = measure(topology)
    for size in dict.fromkeys(case.size for case in cases):
        own: dict[float, list[Candidate]] = {case.density: [] for case in cases if case.size == size}
        for case in cases:
            if case.size == size and case.own is not None:
                own[case.density].append(case.own)
        if is_reporting:
            shares = " and ".join(f"{density:g}" for density in own)
            print(f"trying reducers on {size:,} entries at density {shares} …", flush=True)
        profile = try_out(topology, profile, size, own, own)
    return profile


def _without_exchange(config: Config, topology: Topology) -> Any:
    """Return a trainer of the configuration whose ranks exchange nothing; collective."""

    def alone(config: Config, topology: Topology, data: Any) -> Any:
        from training.run.build import build

        return build(config, Topology(topology.world.split(topology.world.rank)), data)

    phases = [phase.model_copy(update=NO_EXCHANGE) for phase in config.phases]
    return make_trainer(config.model_copy(update=NO_RUN | {"phases": phases}), topology, build=alone)


def _throughput(trainer: Any) -> Iterator[dict[str, Any]]:
    """Yield each phase's throughput of the slowest rank, per second, in the form of cluster files.

    All ranks train at the same time: they share cores and memory in a run as well. Waits for samples, which
    most epochs of a run find in the cache, do not count. Collective.
    """
    config, world, stopwatch = trainer.config, trainer.topology.world, trainer.parts.step.stopwatch
    if world.rank == 0:
        print("training steps of each phase without an exchange …", flush=True)
    for phase in trainer.phases:
        phase.backward.prepare()
        steps, taken = TimedSteps(trainer, phase.number, endless(phase.data.training_batches)), []
        for _ in range(1 + TURNS):
            stopwatch.restart()
            steps.turn(WARM_UP_STEPS, COUNTED_STEPS)
            seconds = stopwatch.seconds
            # The exchange of a rank alone copies the gradient; on a GPU the gradient is awaited in it.
            copying = seconds.exchange_wait if world.arrays is np else 0.0
            taken.append((sum(vars(seconds).values()) - copying) / (WARM_UP_STEPS + COUNTED_STEPS))
        slowest = max(world.allgather_objects(median(taken[1:])))
        order = trainer.task.inputs(phase.phase, trainer.data.samples).training.order
        facts = measured_for(config, phase.number, trainer.task.describe(phase.phase), order.unit)
        yield facts | {"per_second": order.global_batch / world.size / slowest}


def _save(profile: Profile, path: Path) -> None:
    try:
        profile.save(path)
    except OSError as error:
        raise ValueError(f"{path}: expected a file that can be written: {error}") from error


def _report(profile: Profile, path: Path, topology: Topology, cases: Sequence[Case]) -> None:
    print(f"profile of {profile.job}: {path}")
    for each in profile.throughput:
        rate = f"{each['per_second']:,.4g} {each['unit']} of {each['input']}"
        print(f"phase {each['phase']}: {rate} a second on each rank, without an exchange")
    if topology.world.size == 1:
        print(f"reducer=auto picks {ALONE}")
        return
    if max(map(len, topology.nodes)) > 1:
        print(f"inside a node:  {_speed(profile.network.intra)}")
    if len(topology.nodes) > 1:
        print(f"between nodes:  {_speed(profile.network.inter)}")
    if (why := implausible(profile)) is not None:
        print(f"warning: measured {why} {ATTEMPTS} times: is the machine busy?")
    print(flush=True)
    on_gpus = topology.world.arrays is not np
    nodes = topology.nodes
    picks = [choose(profile, nodes, each.size, each.density, on_gpus=on_gpus) for each in cases]
    header = ["gradient", "density", "reducer", "wire", "expected\nms", "× dense"]
    Table("reducer=auto picks", header, list(map(_row, cases, picks))).print()
    for case, choice in zip(cases, picks, strict=True):
        print(f"{case.label}{choice.reason}", flush=True)
        measured = tuner.Case(nodes, case.size, case.density, on_gpus)
        if case.own is not None:
            milli = milliseconds(expect(profile, measured)[case.own])
            print(f"{case.label}the configuration's own reducer, {case.own}: {milli} ms measured", flush=True)
        if (spread := spread_of(profile, measured, tried(profile, measured))) > WIDE:
            often = f"by {spread:.0%} of their median in {ATTEMPTS} attempts"
            warning = f"warning: the measured steps differ {often}: is the machine busy?"
            print(f"{case.label}{warning}", flush=True)


def _speed(link: Link) -> str:
    rate = f"{8e-9 / link.beta:.3g} Gbit/s" if link.beta else "no measurable time a byte"
    crowded = f", {link.incast:.3g} times as long where several nodes send to one" if link.incast > 1 else ""
    return f"{link.alpha * 1e6:.3g} µs and {rate}{crowded}"


def _cases(topology: Topology, config: Config | None, size: int) -> list[Case]:
    """Return the phases of the configuration, or examples without one; none where a rank is alone.

    ``size``: the entries of the configuration's gradient.
    """
    if topology.world.size == 1:
        return []
    if config is None:
        return [Case("", size, density) for size in SIZES for density in DENSITIES]
    return [
        Case(f"phase {i}: ", size, config.density_of(phase), _own(config, phase))
        for i, phase in enumerate(config.phases, 1)
    ]


def _own(config: Config, phase: Phase) -> Candidate | None:
    """Return the reducer that a phase names as a candidate; wrappers cost no message, and are left out."""
    if config.reducer_name(phase) == AUTO:
        return None
    options = config.reducer_config(phase)
    name, wire = options.pop("name"), options.pop("wire", None)
    implied = reducer_options(name) | {"density": config.density_of(phase) if wire else None}
    named = {key: value for key, value in options.items() if key != "wrappers" and value != implied[key]}
    return Candidate(name, wire, json.dumps(named))


def _row(case: Case, choice: Choice) -> list[str]:
    return [
        f"{case.label}{case.size:,} entries",
        f"{case.density:g}",
        choice.reducer,
        choice.options.get("wire", "–"),
        milliseconds(choice.seconds),
        times(choice.dense_seconds / choice.seconds if choice.seconds else None),
    ]
