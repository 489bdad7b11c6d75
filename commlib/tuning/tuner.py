"""Choose the fastest reducer, by the cost model and by measured steps (:mod:`commlib.tuning.tuner`)."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, log
from statistics import geometric_mean, median
from types import MappingProxyType
from typing import Any

import numpy as np

from commlib.arrays import finish
from commlib.density import check_density, entries
from commlib.errors import InvalidArgument
from commlib.gpu.codecs import has_kernels
from commlib.prediction import bytes_of_nodes, predict_seconds
from commlib.reducers import REDUCERS, Reducer, make_reducer, reducer_class, reducer_options
from commlib.registry import REQUIRED, names
from commlib.topology import Topology
from commlib.transport.base import Communicator
from commlib.tuning.probe import SHORTEST_SECONDS, WIRES, Candidate, Gradients, Profile, Trial
from commlib.vectors import Float32
from commlib.work import Speeds

DENSE = Candidate("dense")
LEAST_GAIN = 0.1  # of dense's seconds, for which another reducer is worth it
HAVE_HIERARCHICAL = ("allgather", "oktopk")  # as hitopk and hioktopk
# Where no ranks share a node, these send the same entries as hitopk, oktopk and dense.
ALIKE_ALONE = ("allgather", "hioktopk", "torus2d")
FEW_ENTRIES = 100  # applied in a step: a sparse reducer may then cost accuracy
MOST_LONGER = 1.1
MOST_BUCKETS = 16
ALONE = "dense: one rank has no other to exchange with"


@dataclass(frozen=True)
class Choice:
    """A reducer for gradients of one size and density, and why.

    ``options``: for :func:`commlib.make_reducer`, besides density. ``seconds``: expected for one step;
    ``dense_seconds``: of ``dense``. ``local_steps``: to an exchange, where a budget of bytes asks for them.
    """

    reducer: str
    options: dict[str, Any]
    seconds: float
    dense_seconds: float
    reason: str
    local_steps: int | None = None


@dataclass(frozen=True)
class Case:
    """A gradient to reduce. ``nodes``: the world ranks of every node, as in ``Topology.nodes``.

    ``on_gpus``: it is an array in a GPU's memory, which not every reducer takes.
    """

    nodes: Sequence[Sequence[int]]
    size: int
    density: float
    on_gpus: bool = False

    def __str__(self) -> str:
        ranks, nodes = sum(map(len, self.nodes)), len(self.nodes)
        on = "1 node" if nodes == 1 else f"{nodes} nodes"
        return f"{self.size:,} entries at density {self.density:g}, {ranks} ranks on {on}"


def candidates(
    nodes: Sequence[Sequence[int]], wires: Sequence[str] = WIRES, *, on_gpus: bool = False
) -> list[Candidate]:
    """Return all reducers that declare their cost and require no option, once for each codec of ``wires``.

    The reducers of ``REDUCERS`` and of the installed packages' entry points, on several nodes of several
    ranks also in hierarchical variants that are no reducers of their own, as ``hitopk`` is. Where no ranks
    share a node those of ``ALIKE_ALONE`` are left out. With ``on_gpus`` only reducers that take a GPU's
    arrays, and codecs that have GPU kernels.
    """
    are_shared = max(map(len, nodes)) > 1
    are_between = are_shared and len(nodes) > 1
    if on_gpus:
        wires = [wire for wire in wires if has_kernels(wire)]
    found = []
    for name in names(REDUCERS, "reducer"):
        if _why_not(name) is not None or (name in ALIKE_ALONE and not are_shared):
            continue
        if on_gpus and getattr(reducer_class(name), "needs_entries", False):
            continue
        options = reducer_options(name)
        variants = ["{}"]
        if are_between and options.get("hierarchical") is False and name not in HAVE_HIERARCHICAL:
            variants.append('{"hierarchical": true}')
        wired = wires if "wire" in options else (None,)
        found += [Candidate(name, wire, variant) for variant in variants for wire in wired]
    return found


def left_out() -> str | None:
    """Return one line that names the reducers that are never candidates and why, or ``None``."""
    reasons = {name: why for name in names(REDUCERS, "reducer") if (why := _why_not(name)) is not None}
    return f"left out: {', '.join(f'{name} ({why})' for name, why in reasons.items())}" if reasons else None


def _why_not(name: str) -> str | None:
    """Return why a reducer is never a candidate, or ``None`` if it may be one."""
    try:
        options, cost = reducer_options(name), reducer_class(name).cost
    except InvalidArgument as error:  # of an installed package that is broken
        return str(error)
    if cost is None:
        return "it declares no cost"
    required = [option for option, default in options.items() if default is REQUIRED]
    return f"it needs {', '.join(required)}" if required else None


def choose(
    profile: Profile, nodes: Sequence[Sequence[int]], size: int, density: float, *, on_gpus: bool = False
) -> Choice:
    """Return the reducer, and its wire codec, that is expected to be the fastest.

    Reducers with ``approximates`` are not picked. The choice is ``dense`` where the fastest gains less than
    ``LEAST_GAIN`` of the time of ``dense``, or less than the spread of the measurements, and on one rank. On
    one node only reducers that send all entries are picked. ``on_gpus``: as for :func:`candidates`.
    """
    case = Case(nodes, size, check_density(density), on_gpus)
    seconds = _expect_pickable(profile, case)
    measured = [each for each in tried(profile, case) if each in seconds and each != DENSE]
    possible = [DENSE, *(measured or seconds)]
    if len(nodes) == 1:
        possible = [each for each in possible if not reducer_class(each.reducer).sparse]
    best = fastest = min(possible, key=lambda each: seconds[each])
    spread = spread_of(profile, case, {best, DENSE})
    if seconds[best] > (1 - max(LEAST_GAIN, spread)) * seconds[DENSE]:
        best = DENSE
    why = _reason(profile, case, best, seconds)
    if best != fastest:
        gain = 1 - seconds[fastest] / seconds[DENSE]
        least = f"the spread of {spread:.0%}" if spread > LEAST_GAIN else f"{LEAST_GAIN:.0%}"
        why += f"; {fastest} would gain {gain:.0%}, less than {least}"
    return Choice(best.reducer, best.given, seconds[best], seconds[DENSE], reason=why)


def choose_buckets(profile: Profile, case: Case, reducer: str, options: Mapping[str, Any]) -> int:
    """Return the number of buckets to cut a gradient into, a power of two up to ``MOST_BUCKETS``.

    Each bucket adds its latency, but with more buckets the first exchange starts earlier: the largest number
    predicted to take at most ``MOST_LONGER`` times as long as one. 1 for a reducer that declares no cost.
    """
    if reducer_class(reducer).cost is None:
        return 1
    speeds = speeds_with(profile.speeds, reducer, options)

    def seconds(buckets: int) -> float:
        size, network = max(1, case.size // buckets), profile.network
        own = predict_seconds(reducer, case.nodes, size, network=network, speeds=speeds, **options)
        return buckets * own

    buckets, most = 1, MOST_LONGER * seconds(1)
    while buckets < MOST_BUCKETS and seconds(2 * buckets) <= most:
        buckets *= 2
    return buckets


def speeds_with(speeds: Speeds, reducer: str, options: Mapping[str, Any]) -> Speeds | None:
    """Return the speeds; ``None``, for messages alone, where that of the reducer's codec was not measured."""
    wire = (reducer_options(reducer) | dict(options)).get("wire")
    return speeds if wire is None or wire in speeds.code else None


def tried(profile: Profile, case: Case) -> list[Candidate]:
    """Return the candidates that took steps in exactly this case, in turns if any did."""
    trials = _trials(profile, case)
    in_turns = [trial for trial in trials if trial.spread is not None]
    return list(dict.fromkeys(trial.candidate for trial in in_turns or trials))


def spread_of(profile: Profile, case: Case, chosen: Collection[Candidate]) -> float:
    """Return the largest spread of these candidates' measurements in exactly this case; 0 without any."""
    trials = [trial for trial in _trials(profile, case) if trial.candidate in chosen]
    return max((trial.spread or 0.0 for trial in trials), default=0.0)


def _trials(profile: Profile, case: Case) -> list[Trial]:
    return [trial for trial in profile.trials if _case_of(trial, case) == case]


def expect(profile: Profile, case: Case) -> dict[Candidate, float]:
    """Return the seconds that a step is expected to take with each candidate.

    A candidate with trials in exactly this case gets their mean. Others get the cost model's prediction times
    the ratio of measured to predicted seconds in the candidate's trials nearest to this case in size and
    density (if it has none, in those of other candidates). Trials are first steps, and beside them so are
    predictions: thresholds have not settled.
    """
    known = candidates(case.nodes, on_gpus=case.on_gpus)
    ratios = {
        trial: trial.seconds / predicted(profile, _case_of(trial, case), trial.candidate, settled=False)
        for trial in profile.trials
        if trial.candidate in known
    }
    expected = {}
    for candidate in known:
        own = [trial for trial in ratios if trial.candidate == candidate]
        near = _nearest(own or list(ratios), case)
        ratio = geometric_mean(ratios[trial] for trial in near) if near else 1.0
        expected[candidate] = ratio * predicted(profile, case, candidate, settled=not near)
    here = _trials(profile, case)
    for candidate in dict.fromkeys(trial.candidate for trial in here):
        expected[candidate] = geometric_mean(trial.seconds for trial in here if trial.candidate == candidate)
    return expected


def is_pickable(candidate: Candidate) -> bool:
    """Return whether ``auto`` may pick a candidate: it sends all, or the entries of largest magnitude."""
    return not reducer_class(candidate.reducer).approximates


def _expect_pickable(profile: Profile, case: Case) -> dict[Candidate, float]:
    return {each: seconds for each, seconds in expect(profile, case).items() if is_pickable(each)}


def _case_of(trial: Trial, case: Case) -> Case:
    return replace(case, size=trial.size, density=trial.density)


def _nearest(trials: Sequence[Trial], case: Case) -> list[Trial]:
    """Return the trials that are nearest to ``case`` in size and density."""

    def distance(trial: Trial) -> float:
        return abs(log(trial.size / case.size)) + abs(log(trial.density / case.density))

    least = min(map(distance, trials), default=0.0)
    return [trial for trial in trials if distance(trial) == least]


def settings(case: Case, candidate: Candidate) -> dict[str, Any]:
    """Return the options that the candidate is made with."""
    density = {"density": case.density} if reducer_class(candidate.reducer).sparse else {}
    return density | candidate.given


def predicted(profile: Profile, case: Case, candidate: Candidate, *, settled: bool = True) -> float:
    """Return the cost model's seconds of a step, whatever was tried; ``settled``: as of ``Step``."""
    given = settings(case, candidate) | {"network": profile.network, "speeds": profile.speeds}
    return predict_seconds(candidate.reducer, case.nodes, case.size, settled=settled, **given)


def _reason(profile: Profile, case: Case, best: Candidate, seconds: Mapping[Candidate, float]) -> str:
    """Return one line: the best candidate, the best of the other kind, the case, and reducers left out."""
    if sum(map(len, case.nodes)) == 1:
        return ALONE
    is_sparse, measured = reducer_class(best.reducer).sparse, tried(profile, case)
    of_the_other_kind = [each for each in seconds if reducer_class(each.reducer).sparse != is_sparse]
    other = min(of_the_other_kind, key=lambda each: seconds[each])
    beta = profile.network.link(is_inter=len(case.nodes) > 1).beta
    rate = f"{8e-9 / beta:.3g} Gbit/s" if beta else "no limit of bytes"

    def described(candidate: Candidate) -> str:
        return f"{seconds[candidate] * 1e3:.3g} ms {'measured' if candidate in measured else 'expected'}"

    kind = "dense" if is_sparse else "sparse"
    ours, theirs = described(best), described(other)
    line = f"{best}: {ours} a step, the best {kind} one ({other}) {theirs}; {case}, {rate}"
    if len(case.nodes) == 1:
        line += ", where no sparse one is picked"
    applied = entries(case.density, case.size)
    risk = (
        f"with {applied} of {case.size} entries a step it may learn less: compare the accuracy with dense's"
    )
    return "; ".join(
        each for each in (line, is_sparse and applied < FEW_ENTRIES and risk, left_out()) if each
    )


PROMISING = 1.4  # times what the fastest is expected to take: candidates up to there are tried
CLOSE = 1.3  # times what the fastest took: such candidates are tried once more, in turns
MOST_CLOSE = 6  # candidates, at most
WARM_UP_STEPS, STEPS, MOST_STEPS = 2, 5, 200
LEAST_SECONDS = 0.3  # of a candidate's steps, up to the most: few short ones say little
LAST_SECONDS = 0.9  # the same, of those by which one is picked
GRADIENTS = 3  # that the steps of a trial cycle through
TRIAL_SECONDS = 2.0  # after which a slow candidate has been tried enough
WIDE = 0.25  # a spread of measurements that are made again
ATTEMPTS = 3


def try_out(
    topology: Topology,
    profile: Profile,
    size: int,
    densities: Iterable[float],
    own: Mapping[float, Collection[Candidate]] = MappingProxyType({}),
) -> Profile:
    """Measure some steps of promising candidates; return the profile with these trials.

    The fastest, ``dense`` and those of ``own``, by density, then take steps in turns, so that all see the
    same state of the machine; again where these measurements are spread widely.

    All ranks call it together with the same profile, and all get the same one. Gradients of ``size`` entries
    are those of :class:`commlib.tuning.probe.Gradients`.
    """
    if topology.world.size == 1:
        return profile
    generated, world = Gradients(size), topology.world
    gradients = [world.arrays.asarray(generated.of(world.rank, step)) for step in range(GRADIENTS)]
    del generated  # it is larger than a reducer
    for density in densities:
        case = Case(topology.nodes, size, check_density(density), world.arrays is not np)
        while (candidate := _most_promising(profile, case)) is not None:
            (taken,) = seconds_in_turns(topology, case, [candidate], gradients, least=LEAST_SECONDS)
            trial = Trial(candidate, size, density, _median(taken))
            profile = replace(profile, trials=(*profile.trials, trial))
        last = list(dict.fromkeys([DENSE, *own.get(density, ()), *_close_to_the_fastest(profile, case)]))
        attempts: list[list[Trial]] = []
        while len(attempts) < ATTEMPTS and min(map(_widest, attempts), default=inf) > WIDE:
            seconds = seconds_in_turns(topology, case, last, gradients, least=LAST_SECONDS)
            pairs = zip(last, seconds, strict=True)
            attempts.append([Trial(each, size, density, _median(own), spread(own)) for each, own in pairs])
        again = [trial for trial in _trials(profile, case) if trial.candidate in last]
        before = [trial for trial in profile.trials if trial not in again]
        profile = replace(profile, trials=(*before, *min(attempts, key=_widest)))
    return profile


def _most_promising(profile: Profile, case: Case) -> Candidate | None:
    """Return the candidate expected to be the fastest of those not tried here; ``None`` if all are slow."""
    seconds, so_far = _expect_pickable(profile, case), tried(profile, case)
    untried = [each for each in seconds if each not in so_far]
    best = min(untried, key=lambda each: seconds[each], default=None)
    return best if best and seconds[best] <= PROMISING * min(seconds.values()) else None


def _close_to_the_fastest(profile: Profile, case: Case) -> list[Candidate]:
    seconds = _expect_pickable(profile, case)
    so_far = [each for each in tried(profile, case) if each in seconds]
    so_far.sort(key=lambda each: seconds[each])
    return [each for each in so_far[:MOST_CLOSE] if seconds[each] <= CLOSE * seconds[so_far[0]]]


def seconds_in_turns(
    topology: Topology,
    case: Case,
    chosen: Sequence[Candidate],
    gradients: Sequence[Float32],
    *,
    least: float,
    most: float = TRIAL_SECONDS,
) -> list[list[float]]:
    """Return the seconds of each candidate's steps, which take turns, in another order each time.

    A step is slower after one that waited long for the network: caches are cold, and processors asleep.
    Each candidate takes ``STEPS`` steps; more, up to ``MOST_STEPS``, until it took ``least`` seconds; fewer,
    at least one, once these took ``most`` seconds, and the others go on without it. The warm-up is two steps,
    which may be much slower than all later ones, or, of many, a third, in which residuals grow and thresholds
    are found again and again; ``least`` includes it.
    """

    def is_enough(own: Sequence[float]) -> bool:
        counted = own[WARM_UP_STEPS:]
        return len(counted) > 0 and (sum(own) > least if len(counted) >= STEPS else sum(counted) > most)

    reducers = [make_reducer(each.reducer, topology, case.size, **settings(case, each)) for each in chosen]
    taken: list[list[float]] = [[] for _ in chosen]
    generator = np.random.default_rng(0)  # the same order on all ranks
    for step in range(WARM_UP_STEPS + MOST_STEPS):
        gradient = gradients[step % len(gradients)]
        for turn in generator.permutation(len(chosen)):
            if not is_enough(taken[turn]):
                taken[turn].append(step_seconds(topology.world, reducers[turn], gradient))
    for reducer in reducers:
        reducer.close()
    return [own[max(WARM_UP_STEPS, len(own) // 3) :] for own in taken]


def step_seconds(world: Communicator, reducer: Reducer, gradient: Float32) -> float:
    """Return the seconds of a step that all ranks begin together, on the slowest rank."""
    world.barrier()
    start = world.now()
    reducer.reduce(gradient)
    finish(world.arrays)
    return float(max(world.allgather_objects(world.now() - start)))


def _median(taken: Sequence[float]) -> float:
    return max(median(taken), SHORTEST_SECONDS)


def spread(taken: Sequence[float]) -> float:
    """Return the interquartile range over the median."""
    low, high = np.quantile(taken, [0.25, 0.75])
    return float(high - low) / _median(taken)


def _widest(trials: Sequence[Trial]) -> float:
    return max(trial.spread or 0.0 for trial in trials)


SHORT_WIRES = ("gap+fp16", "gap+lloyd2")  # the codecs to choose from within a budget of bytes


def choose_within(
    bytes_per_step: float, nodes: Sequence[Sequence[int]], size: int, density: float, *, on_gpus: bool = False
) -> Choice:
    """Return the reducer and codec that need the fewest local steps to an exchange, and how many these are.

    ``bytes_per_step``: what a rank may send in an average step, between nodes if there are several, else
    inside the node. Among candidates that need equally few steps, the one that sends the most is chosen.
    Closed forms decide: nothing is measured, and all ranks choose alike. ``on_gpus``: as for :func:`choose`.

    >>> nodes = [range(8 * node, 8 * node + 8) for node in range(16)]
    >>> choice = choose_within(1000, nodes, size=1_000_000, density=0.01)
    >>> choice.reducer, choice.options, choice.local_steps
    ('spardl', {'wire': 'gap+lloyd2', 'hierarchical': True}, 12)
    """
    case = Case(nodes, size, check_density(density), on_gpus)
    known = candidates(nodes, SHORT_WIRES, on_gpus=case.on_gpus)
    sent = {each: _bytes_of_rank(case, each) for each in known if is_pickable(each)}
    steps = {each: max(1, ceil(of_rank / bytes_per_step)) for each, of_rank in sent.items()}
    best = min(sent, key=lambda each: (steps[each], -sent[each]))
    exchange = f"{sent[best] / 1e3:.3g} kB a rank and exchange, one every {steps[best]} steps"
    why = f"{best}: {exchange}; {case}, at most {bytes_per_step / 1e3:.3g} kB a step"
    return Choice(best.reducer, best.given, 0.0, 0.0, reason=why, local_steps=steps[best])


def _bytes_of_rank(case: Case, candidate: Candidate) -> float:
    """Return the bytes that a rank of the busiest node sends in an exchange, over the slowest link."""
    sent = bytes_of_nodes(candidate.reducer, case.nodes, case.size, **settings(case, candidate))
    several = len(case.nodes) > 1
    return max(
        (each.inter if several else each.intra) / len(node)
        for each, node in zip(sent, case.nodes, strict=True)
    )
