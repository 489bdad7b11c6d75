"""Replicas with quadratic losses that exchange their weights, as a whole or as fragments in turns.

By :mod:`commlib.rounds` with every reducer, and by the formulas.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from commlib import Topology
from commlib.exchange import BucketExchange
from commlib.reducers import REDUCERS
from commlib.rounds import OuterSgd, Pace, Rounds
from commlib.transport import simulated

SIZE, RATE = 60, 0.1
START = np.random.default_rng(3).standard_normal(SIZE).astype(np.float32)
DILOCO = {"rate": 0.7, "momentum": 0.9, "nesterov": True}

OPTIONS = {name: {} if name in ("dense", "torus2d") else {"density": 0.1} for name in REDUCERS}
OPTIONS["arctopk"]["row"] = 16
DECAYED = {name: {**options, "decay": 0.95} for name, options in OPTIONS.items() if options}
CHUNKS = {"name": "bucketed", "bucket": 16}
OTHERS = {
    "sparseloco": ("hitopk", {"density": 1 / 4, "selector": CHUNKS, "wire": "gap+lloyd2", "decay": 0.95}),
    "dense, four bits": ("dense", {"values": "hadamard4"}),
    "torus2d, four bits": ("torus2d", {"values": "qsgd4"}),
    "oktopk, half precision": ("oktopk", {"density": 0.1, "wire": "gap+fp16"}),
}
CASES = (
    {name: (name, options) for name, options in OPTIONS.items()}
    | {f"{name}, decay": (name, options) for name, options in DECAYED.items()}
    | OTHERS
)


def loss_of(rank):
    """Return curvatures ``a`` and minima ``c`` of the loss ``Σ a/2·(w − c)²`` of a rank."""
    random = np.random.default_rng((7, rank))
    return random.uniform(0.2, 2.0, SIZE), random.standard_normal(SIZE)


class Vector:
    """The weights of a replica."""

    def __init__(self, values):
        self.values = np.array(values)

    def read(self, fragment=slice(None)):
        return self.values[fragment].copy()

    def write(self, vector, fragment=slice(None)):
        self.values[fragment] = vector


@dataclass
class Course:
    """What replicas do: the bounds of fragments, the buckets in them, and how long steps take.

    ``seconds`` and ``samples``: of each step of each rank. ``limit``: the seconds of a round.
    """

    schedule: object
    steps: int
    outer: object
    bounds: tuple = (0, SIZE)
    buckets: list | None = None  # one a fragment without them
    seconds: object = None
    samples: object = None
    limit: float | None = None

    @property
    def fragments(self):
        return [slice(*each) for each in pairwise(self.bounds)]


@dataclass
class Seen:
    """What a rank sees: weights, report and whether it took a step, of each; differences as they weigh."""

    weights: list = field(default_factory=list)
    reports: list = field(default_factory=list)
    taken: list = field(default_factory=list)
    differences: list = field(default_factory=list)
    residual: object = None
    threads: bool = False


def trained(comm, course, case=("dense", {}), *, overlap=False, failed=None):
    """Take steps of gradient descent, after the last of which all fragments are exchanged.

    ``failed``: a rank, and the step of which it has a gradient that is not finite.
    """
    curvatures, minima = (each.astype(np.float32) for each in loss_of(comm.rank))
    schedule, outer, (name, options) = course.schedule, course.outer, case
    buckets = course.buckets or np.diff(course.bounds).tolist()
    exchange = BucketExchange(Topology(comm), buckets, {"name": name, **options}, overlap=overlap)
    pace = Pace(exchange.slices, course.limit)
    weights, seen, under_way = Vector(START), Seen(threads=exchange.overlaps), []

    def submit(fragment, difference):
        own = np.zeros(SIZE, np.float32)
        own[fragment] = difference
        seen.differences.append(own)
        under_way.append(difference)
        exchange.submit_part(fragment, difference, pace.leaves(fragment))

    def wait(fragment):
        mean, report = exchange.wait()
        difference = under_way.pop()
        if course.limit is not None:  # the exchange has scaled it
            seen.differences[-1][fragment] = difference
        return mean[fragment], report

    update = OuterSgd(outer.rate, outer.momentum, nesterov=outer.nesterov)
    rounds = Rounds(update, submit, wait, mixing=outer.own_share, eager=outer.update == "eager")
    for step in range(1, course.steps + 1):
        if rounds.common is None:
            rounds.begin(weights.read())
        rounds.failed |= failed == (comm.rank, step)
        seen.taken.append(not pace.is_over)
        if seen.taken[-1]:
            if not rounds.failed:
                weights.values -= np.float32(RATE) * curvatures * (weights.values - minima)
            if course.limit is not None:
                pace.took(course.seconds[comm.rank, step - 1], int(course.samples[comm.rank, step - 1]))
        leaving, ends = schedule.leaving(step), step == course.steps
        fragment = slice(0, SIZE) if ends else None if leaving is None else course.fragments[leaving]
        report = rounds.end_step(weights, fragment, arrives=schedule.arrives(step) or ends)
        seen.weights.append(weights.read())
        seen.reports.append(report)
    seen.residual = exchange.residual
    exchange.close()
    return seen


def on_ranks(ranks, *arguments, **others):
    layout = [2] * (ranks // 2) + [1] * (ranks % 2)
    return simulated.run(lambda comm: trained(comm, *arguments, **others), ranks, layout)


def assert_nothing_is_lost(seen, atol=2e-4):
    """At rate 1 the common weights move by the means: with the residuals they are all differences."""
    moved = START.astype(np.float64) - seen[0].weights[-1]
    given = np.sum([rank.differences for rank in seen], axis=(0, 1), dtype=np.float64)
    held_back = np.sum([rank.residual for rank in seen], axis=0, dtype=np.float64)
    # float32 rounding of sums of some tens of differences, each below 10
    np.testing.assert_allclose(len(seen) * moved + held_back, given, atol=atol)


def transcribed(ranks, course):
    """Return the weights of each replica after each step, and who took it, in float64.

    By algorithm 2 of Streaming DiLoCo; means are weighted by the samples of the steps behind a difference.
    """
    schedule, steps, outer, parts = course.schedule, course.steps, course.outer, course.fragments
    H, F, tau = schedule.steps, schedule.fragments, schedule.delay
    seconds = np.zeros((ranks, steps)) if course.seconds is None else course.seconds
    samples = np.ones((ranks, steps)) if course.samples is None else course.samples
    losses = [loss_of(rank) for rank in range(ranks)]
    theta, velocity = START.astype(np.float64), np.zeros(SIZE)
    w = [theta.copy() for _ in range(ranks)]
    spent, n = np.zeros(ranks), np.zeros((ranks, F))
    sent, guess, seen, taken = {}, {}, [], []

    def outer_step(p, mean, v):
        v = outer.momentum * v + mean
        return theta[p] - outer.rate * (mean + outer.momentum * v if outer.nesterov else v), v

    def leave(number):
        p = parts[number]
        sent[number] = [theta[p] - w[r][p] for r in range(ranks)], n[:, number].copy()
        n[:, number] = 0
        for r in range(ranks):
            if outer.update == "eager":
                guess[r], _ = outer_step(p, theta[p] - w[r][p], velocity[p])
                w[r][p] = guess[r]

    def arrive(number, mixes):
        p, (differences, own) = parts[number], sent.pop(number)
        mean = sum(share * each for share, each in zip(own, differences, strict=True)) / own.sum()
        theta[p], velocity[p] = outer_step(p, mean, velocity[p])
        for r in range(ranks):
            if mixes and outer.update == "eager":
                w[r][p] += theta[p] - guess[r]
            else:
                alpha = outer.own_share if mixes else 0.0
                w[r][p] = alpha * w[r][p] + (1 - alpha) * theta[p]

    for t in range(1, steps + 1):
        taken.append(spent < (np.inf if course.limit is None else course.limit))
        for r in np.flatnonzero(taken[-1]):
            w[r] -= RATE * losses[r][0] * (w[r] - losses[r][1])
            spent[r] += seconds[r, t - 1]
            n[r] += samples[r, t - 1]
        for number in list(sent):
            if t == steps or (t - tau - number * H // F) % H == 0:
                arrive(number, mixes=True)
        for number in range(F):
            if t == steps or (t >= H // F and (t - number * H // F) % H == 0):
                leave(number)
                spent[:] = 0
                if t == steps or not tau:
                    arrive(number, mixes=t < steps)
        seen.append(np.array(w))
    return np.array(seen), np.array(taken)
