"""The plan of a run, by closed forms from its configuration, samples and weights, on a site.

Steps, memory, bytes and seconds of each phase, and what the whole run costs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from math import isfinite
from typing import Any

from commlib.errors import one_line
from commlib.exchange import bucket_bounds, pieces_of
from commlib.reducers import reducer_class
from commlib.rounds import Schedule, fragment_bounds
from commlib.tuning.tuner import ALONE, Choice, choose
from commlib.vectors import VALUE_BYTES
from datacache.capacity import readable
from training.config.config import Config
from training.config.records import Phase
from training.config.reducers import AUTO
from training.config.schedules import Span
from training.plan.exchange import (
    MOST_THAT_HIDE,
    Exchange,
    StepExchange,
    exchanges_per_step,
    lag_seconds,
    overlapped_seconds,
)
from training.plan.memory import GRADIENTS, Memory, Weights, kept_by, slots_of
from training.plan.samples import Listing
from training.plan.site import Capacity, Site, measured_for, per_second
from training.run.autotune import UNPREDICTABLE, bucket_mib, check_budget, choices_within
from training.run.dry_run import resolved_rate

MOST_VALUES = 10_000  # of a curve, that are looked at for its largest one


@dataclass(frozen=True)
class Curve:
    """The values of a curve over the steps of a phase.

    >>> [str(Curve.of(values)) for values in ([0.0, 0.4, 0.01], [0.25, 0.001], [0.1])]
    ['0 → 0.4 → 0.01', '0.25 → 0.001', '0.1']
    """

    start: float
    peak: float
    end: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Curve":
        return cls(values[0], max(values), values[-1])

    def __str__(self) -> str:
        return " → ".join(f"{value:.4g}" for value, _ in groupby((self.start, self.peak, self.end)))


@dataclass(frozen=True)
class PhasePlan:
    """One phase, numbered from 1. Values of a step: at the phase's last density, or of the mean local step.

    ``slow_bytes``, ``dense_bytes``: of the busiest node in a step over the slow link, by the phase's reducer
    and by ``dense``; ``peak_bytes``: in one exchange, with local steps of the largest fragment. ``exchange``:
    seconds of that exchange; ``room``: seconds of the delay's steps, which can hide it. Seconds of a step:
    ``messages``, ``computing`` on one rank, and ``step``, which may hide messages behind the backward pass.
    ``traffic_bytes``: of all nodes in the phase. ``auto``: what ``auto`` picks, and why. ``None``: not known.
    """

    number: int
    steps: int
    epochs: float
    global_batch: int
    unit: str
    batch: str
    input: str
    rate: Curve
    density: Curve | None
    local_steps: int | None
    fragments: int
    delay: int
    reducer: str
    options: Mapping[str, Any]
    buckets: int
    memory: Memory
    slow_bytes: int | None
    dense_bytes: int
    peak_bytes: int | None
    exchange: float | None
    room: float | None
    traffic_bytes: int | None
    messages: float | None
    computing: float | None
    step: float | None
    seconds: float | None
    auto: str | None

    @property
    def per_second(self) -> float | None:
        """Return how much of its unit all ranks train on in a second."""
        return self.global_batch / self.step if self.step else None

    @property
    def efficiency(self) -> float | None:
        """Return the throughput over that of as many ranks which exchange nothing."""
        return self.computing / self.step if self.step and self.computing is not None else None


@dataclass(frozen=True)
class Plan:
    """A run on a site. ``weights``: entries of the gradient. ``disk``, ``memory``: bytes of a node's cache.

    ``seconds``: of all phases, without tests and checkpoints. ``missing``: a line for each unknown fact.
    """

    name: str
    site: Site
    weights: int
    phases: Sequence[PhasePlan]
    disk: int | None
    memory: int
    room: Capacity
    price: float | None
    missing: Sequence[str]

    @property
    def seconds(self) -> float | None:
        return total([phase.seconds for phase in self.phases])

    @property
    def traffic_bytes(self) -> int | None:
        """Return what all nodes send over the slow link."""
        sent = total([phase.traffic_bytes for phase in self.phases])
        return None if sent is None else int(sent)

    @property
    def cost(self) -> float | None:
        return None if self.seconds is None or self.price is None else self.seconds / 3600 * self.price


def total(values: Sequence[float | None], counts: Sequence[int] | None = None) -> float | None:
    """Return the sum of values, each so many times; ``None`` where one is not known."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return sum(value * count for value, count in zip(known, counts or [1] * len(known), strict=True))


def make_plan(config: Config, site: Site, listing: Listing, weights: Weights) -> Plan:
    """Return the plan of a configuration whose parts are imported; ``ValueError`` where it cannot be run."""
    choices = _choices(config, site, weights.size)
    if missing := [number for number in config.automatic if number not in choices]:
        expected = "a name, --cluster or a profile, from which auto picks"
        raise ValueError(f"phases[{missing[0]}].reducer: expected {expected}; got {AUTO}")
    chosen = config.with_choices({number: choices[number] for number in config.automatic})
    if site.profile is not None and site.ranks > 1 and config.automatic and config.bucket_mib is None:
        most = bucket_mib(chosen, site.nodes, site.profile, weights.size)
        chosen = chosen.model_copy(update={"bucket_mib": most})
    planner = _Planner(chosen, site, listing, weights, choices)
    phases = [planner.phase(number, phase) for number, phase in enumerate(chosen.phases)]
    plan = Plan(
        name=config.name,
        site=site,
        weights=weights.size,
        phases=phases,
        disk=listing.disk,
        memory=listing.memory,
        room=site.room(listing.dirs),
        price=_price(config, site),
        missing=list(_missing(config, site, phases)),
    )
    if not isfinite(plan.seconds or 0):
        raise ValueError(f"{site.source}: expected numbers that give a finite time, got {plan.seconds}")
    return plan


def check_room(plan: Plan) -> None:
    """Raise a ``ValueError`` of one line for a plan that does not fit a node."""
    room, ranks = plan.room, plan.site.ranks_of_node
    needs = [("cache.disk", plan.disk, room.disk), ("cache.memory", plan.memory, room.shm)]
    for phase in plan.phases:
        memory, rank = f"phases[{phase.number - 1}]: memory of", phase.memory.total
        on_node = plan.memory + (ranks * rank if room.gpu is None else 0)
        needs.append((f"{memory} a rank on its GPU", rank, room.gpu))
        needs.append((f"{memory} {ranks} ranks on a node, and its cache.memory", on_node, room.memory))
    for what, needed, there in needs:
        if needed is not None and there is not None and needed > there:
            where = plan.site.source if plan.site.file is not None else "this machine"
            expected = f"expected at most the {readable(there)} that {where} has"
            raise ValueError(f"{what}: {expected}, got {readable(needed)}")


def _choices(config: Config, site: Site, size: int) -> dict[int, Choice]:
    """Return what ``auto`` would pick for each phase, by number; nothing where the links are not known."""
    numbers = range(len(config.phases))
    if site.ranks == 1:
        return dict.fromkeys(numbers, Choice("dense", {}, 0.0, 0.0, ALONE))
    on_gpus = site.has_gradients_on_gpus(config)
    within = choices_within(config, site.nodes, size, on_gpus=on_gpus)
    if (profile := site.profile) is None:
        return within
    densities = map(config.density_of, config.phases)
    try:
        picks = [choose(profile, site.nodes, size, each, on_gpus=on_gpus) for each in densities]
        return dict(zip(numbers, picks, strict=True)) | within
    except UNPREDICTABLE as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(one_line(f"{site.source}: expected speeds to predict steps from ({why})")) from error


def _price(config: Config, site: Site) -> float | None:
    """Return the price of an hour of all nodes: by the cluster file, else by the configuration."""
    if site.file is not None and site.file.price_per_node_hour is not None:
        return len(site.nodes) * site.file.price_per_node_hour
    return config.dawnbench.cost_per_hour


def _missing(config: Config, site: Site, phases: Sequence[PhasePlan]) -> Iterator[str]:
    """Yield a line for each thing that would have to be known for more."""
    in_file = "in a file for --cluster"
    if site.profile is None and site.ranks > 1:
        yield "no seconds: expected --cluster, or a profile of these ranks (cloudtrain tune)"
    elif numbers := [phase.number for phase in phases if phase.computing is None]:
        expected = f"expected a throughput of them {in_file}, or cloudtrain tune with this configuration"
        yield f"no computing in phases {numbers}: {expected}"
    if config.profile is not None and site.file is not None:
        yield f"profile={config.profile} is not read: {site.source} has the links"
    for phase in phases:
        if phase.slow_bytes is None:
            yield f"phase {phase.number}: {phase.reducer} declares no cost: no bytes and no seconds"
    if _price(config, site) is None:
        yield f"no cost: expected price_per_node_hour {in_file}, or dawnbench.cost_per_hour"


@dataclass(frozen=True)
class _Planner:
    """What the phases of a run share. ``config``: with the reducers that are chosen."""

    config: Config
    site: Site
    listing: Listing
    weights: Weights
    choices: Mapping[int, Choice]

    @property
    def bucket_sizes(self) -> list[int]:
        """Return the entries of each bucket: on one rank or with gradients on GPUs, cut at fragments only."""
        bounds, cuts = [0, self.weights.size], self.config.cuts(self.weights.shapes)
        if self.site.ranks > 1 and not self.on_gpus:
            pieces = pieces_of(self.weights.shapes, cuts)
            bounds = bucket_bounds([piece.size for piece in pieces], self.config.bucket_bytes)
        return [high - low for low, high in pairwise(sorted({*bounds, *cuts}))]

    @property
    def on_gpus(self) -> bool:
        return self.site.has_gradients_on_gpus(self.config)

    @property
    def hides(self) -> bool:
        """Return whether exchanges are in the background."""
        return self.config.overlap and not self.on_gpus

    def _fragments(self, exchange: Exchange, fragments: int) -> list[Exchange]:
        """Return the exchange of each fragment, which has whole buckets."""
        bounds = fragment_bounds(self.weights.shapes, fragments)
        buckets = list(accumulate(exchange.sizes, initial=0))
        places = [buckets.index(bound) for bound in bounds]
        return [replace(exchange, sizes=exchange.sizes[low:high]) for low, high in pairwise(places)]

    @cached_property
    def dense_bytes(self) -> int:
        """Return what the busiest node sends in a step of ``dense``."""
        return max(Exchange(self.site, self.bucket_sizes, "dense").node_bytes())

    def phase(self, number: int, phase: Phase) -> PhasePlan:
        config, epoch, task = self.config, self.listing.epochs[number], self.config.task.make()
        span = phase.span_of(epoch.steps, epoch.global_batch)
        check_budget(number, self.choices.get(number), span.steps)
        options = config.reducer_config(phase)
        name, wrappers = options.pop("name"), options.pop("wrappers", [])
        selects = "density" in options
        rate = rate_of(phase, number, span)  # which checks the warm-up of the density, too
        densities = densities_of(config, phase, span)
        counts = [steps for _, steps in densities]
        exchange = Exchange(self.site, self.bucket_sizes, name, options)
        of_replica = self.site.ranks_of_node if phase.replica_is_node else 1
        inside = Exchange(self.site, [self.weights.size], "dense").among(of_replica)
        exchanges = [exchange.at(density) if selects else exchange for density, _ in densities]
        schedule = phase.schedule or Schedule(1)
        shares = exchanges_per_step(counts, schedule)
        each_step = [
            StepExchange(self._fragments(each, schedule.fragments), own, inside, schedule.delay)
            for each, own in zip(exchanges, shares, strict=True)
        ]
        each_step[-1] = replace(each_step[-1], unhidden=1 / counts[-1])
        facts = measured_for(config, number, task.describe(phase), epoch.unit)
        found = per_second(self.site.throughput, **facts)
        computing = None if found is None else epoch.global_batch / self.site.ranks / found  # on one rank
        seconds = [self._seconds(phase, each, computing) for each in each_step]
        sent = [each.node_bytes() for each in each_step]
        traffic = total([None if each is None else sum(each) for each in sent], counts)
        return PhasePlan(
            number=number + 1,
            steps=span.steps,
            epochs=span.steps / span.epoch_steps,
            global_batch=epoch.global_batch,
            unit=epoch.unit,
            batch=task.describe_batch(phase),
            input=task.describe(phase),
            rate=rate,
            density=Curve.of([density for density, _ in densities]) if selects else None,
            local_steps=phase.local_steps,
            fragments=schedule.fragments,
            delay=schedule.delay,
            reducer=name,
            options={**options, **({"wrappers": wrappers} if wrappers else {})},
            buckets=len(exchange.sizes),
            memory=self._memory(phase, exchanges[0], wrappers),
            slow_bytes=None if sent[-1] is None else round(max(sent[-1])),
            dense_bytes=self.dense_bytes,
            peak_bytes=each_step[-1].peak_bytes,
            exchange=None if seconds[-1][0] is None else max(each_step[-1].seconds_of_parts()),
            room=each_step[-1].room(computing) if self.hides and computing is not None else None,
            traffic_bytes=None if traffic is None else int(traffic),
            messages=seconds[-1][0],
            computing=computing,
            step=seconds[-1][1],
            seconds=total([step for _, step in seconds], counts),
            auto=self.choices[number].reason if number in self.choices else None,
        )

    def _seconds(
        self, phase: Phase, given: StepExchange, computing: float | None
    ) -> tuple[float | None, float | None]:
        """Return the seconds of the messages of a step, and of the step."""
        exchange = given.parts[0]
        if self.site.ranks == 1:
            return 0.0, computing
        if not exchange.is_known or self.site.network is None:
            return None, None
        if phase.local_steps is not None:
            sent, hidden = given.seconds(computing or 0.0)
            return sent, None if computing is None else computing + sent - hidden * self.hides
        messages = exchange.seconds()
        if computing is None:
            return sum(messages), None
        sharing = 1.0 if self.site.speeds is None else self.site.speeds.ranks_per_core
        lag = lag_seconds(computing, sharing)
        has_others = self.config.accumulate == 1 and len(messages) > 1
        if self.config.overlap and has_others and sharing <= MOST_THAT_HIDE:
            return sum(messages), lag + overlapped_seconds(computing, exchange.sizes, messages)
        return sum(messages), lag + computing + sum(messages)

    def _memory(self, phase: Phase, exchange: Exchange, wrappers: Sequence[Mapping[str, Any]]) -> Memory:
        """Return the memory of a rank in the exchange of the largest density.

        With local steps also the common weights, the gradient of the replica, the outer velocity, and what
        a skipped round restores.
        """
        config, size, site = self.config, self.weights.size, self.site
        options = {**exchange.options, "wrappers": wrappers}
        kept = kept_by(exchange.reducer, options, site.nodes, size, exchange.rank_bytes())
        is_sharded = config.optimizer.sharded and not reducer_class(exchange.reducer).sparse
        vector, is_local = VALUE_BYTES * size, phase.local_steps is not None
        slots = vector * slots_of(config)
        if is_local:
            slots += slots + vector * bool(phase.outer and phase.outer.momentum)
        return Memory(
            weights=vector * (1 + (config.average is not None) + is_local)
            + VALUE_BYTES * self.weights.others,
            optimizer=-(-slots // site.ranks) if is_sharded else slots,
            gradient=vector * (GRADIENTS + is_local),
            residual=kept.residual,
            reducer=kept.reducer,
        )


def rate_of(phase: Phase, number: int, span: Span) -> Curve:
    """Return the learning rate of a phase; ``ValueError`` that begins with the key where it does not fit.

    Of more than ``MOST_VALUES`` steps a sample is evaluated, with the last one and the end of the warm-up.
    """
    resolved = resolved_rate(number, phase, span)
    warmup = getattr(resolved, "warmup", None)
    peaks = [warmup.steps] if warmup is not None else []
    if (own := getattr(resolved, "warmup_steps", None)) is not None:
        peaks.append(own - 1)
    steps = range(span.steps)
    seen = {*steps[:: -(-span.steps // MOST_VALUES)], steps[-1], *(peak for peak in peaks if peak in steps)}
    return Curve.of([resolved.at(step, span.steps) for step in sorted(seen)])


def densities_of(config: Config, phase: Phase, span: Span) -> list[tuple[float, int]]:
    """Return the densities of a phase, each with its steps."""
    last, warmup = config.density_of(phase), phase.density_warmup
    found, left = [], span.steps
    for density in warmup.densities(last) if warmup is not None else ():
        found.append((density, min(left, span.epoch_steps)))
        left -= found[-1][1]
    return [*found, (last, left)] if left else found
