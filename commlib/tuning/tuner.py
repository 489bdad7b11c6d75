"""Choose the fastest reducer, by the cost model and by measured steps (:mod:`commlib.tuning.trials`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import geometric_mean
from typing import Any

from commlib.cost import Prediction, predict
from commlib.density import check_density
from commlib.reducers import REDUCERS, reducer_options
from commlib.tuning.profile import WIRES, Candidate, Profile, Trial

DENSE = Candidate("dense")
ALONE = "dense: one rank has nobody to exchange with"
BUCKET_OVERHEAD = 0.1  # what a gradient may take longer in buckets than whole


@dataclass(frozen=True)
class Choice:
    """A reducer for gradients of one size and density, and why.

    ``options``: what :func:`commlib.make_reducer` takes beside density. ``bucket``: the fewest entries that a
    bucket of the gradient should have. ``seconds``: expected for one step; ``dense_seconds``: of ``dense``.
    """

    reducer: str
    options: dict[str, str]
    bucket: int
    seconds: float
    dense_seconds: float
    reason: str


@dataclass(frozen=True)
class Case:
    """A gradient to reduce. ``nodes``: the world ranks of every node, as in ``Topology.nodes``."""

    nodes: Sequence[Sequence[int]]
    size: int
    density: float

    def __str__(self) -> str:
        ranks, nodes = sum(map(len, self.nodes)), len(self.nodes)
        on = "1 node" if nodes == 1 else f"{nodes} nodes"
        return f"{self.size:,} entries at density {self.density:g}, {ranks} ranks on {on}"


def candidates() -> list[Candidate]:
    """Return all reducers, the sparse ones with each of the ``WIRES``."""
    return [
        Candidate(name, wire)
        for name in REDUCERS
        for wire in (WIRES if "wire" in reducer_options(name) else (None,))
    ]


def choose(profile: Profile, nodes: Sequence[Sequence[int]], size: int, density: float) -> Choice:
    """Return the reducer, and its wire codec, that is expected to be the fastest.

    With one rank it is ``dense``: there is nobody to exchange with.
    """
    case = Case(nodes, size, check_density(density))
    seconds = expect(profile, case)
    best = min(tried(profile, case) or seconds, key=lambda each: seconds[each])
    return Choice(
        reducer=best.reducer,
        options={"wire": best.wire} if best.wire else {},
        bucket=_bucket(profile, case, best),
        seconds=seconds[best],
        dense_seconds=seconds[DENSE],
        reason=_reason(profile, case, best, seconds),
    )


def tried(profile: Profile, case: Case) -> list[Candidate]:
    """Return what took steps in just this case, in that order."""
    trials = [trial for trial in profile.trials if _case_of(trial, case) == case]
    return list(dict.fromkeys(trial.candidate for trial in trials))


def expect(profile: Profile, case: Case) -> dict[Candidate, float]:
    """Return the seconds that a step is expected to take with each candidate.

    What the cost model predicts, times how wrong it was where the candidate was tried: in the case that is
    nearest to this one in size and density. For one that was never tried the others speak.
    """
    wrong = {
        trial: trial.seconds / _predict(profile, _case_of(trial, case), trial.candidate).seconds
        for trial in profile.trials
    }
    expected = {}
    for candidate in candidates():
        own = [trial for trial in wrong if trial.candidate == candidate]
        near = _nearest(own or list(wrong), case)
        ratio = geometric_mean(wrong[trial] for trial in near) if near else 1.0
        expected[candidate] = ratio * _predict(profile, case, candidate).seconds
    return expected


def _case_of(trial: Trial, case: Case) -> Case:
    return replace(case, size=trial.size, density=trial.density)


def _nearest(trials: Sequence[Trial], case: Case) -> list[Trial]:
    """Return the trials on gradients as much like that of ``case`` as there are."""

    def distance(trial: Trial) -> float:
        return abs(log(trial.size / case.size)) + abs(log(trial.density / case.density))

    least = min(map(distance, trials), default=0.0)
    return [trial for trial in trials if distance(trial) == least]


def settings(case: Case, candidate: Candidate) -> dict[str, Any]:
    """Return what the candidate is made with, beside its name."""
    return {"density": case.density, "wire": candidate.wire} if candidate.wire else {}


def _predict(profile: Profile, case: Case, candidate: Candidate) -> Prediction:
    speeds, network = profile.speeds, profile.network
    given = settings(case, candidate)
    return predict(candidate.reducer, case.nodes, case.size, network=network, speeds=speeds, **given)


def _bucket(profile: Profile, case: Case, candidate: Candidate) -> int:
    """Return the smallest half of a half … of the gradient in which a step takes little longer than whole."""
    whole = _predict(profile, case, candidate).seconds
    buckets = 1
    while 2 * buckets <= case.size:
        bucket = replace(case, size=-(-case.size // (2 * buckets)))
        if 2 * buckets * _predict(profile, bucket, candidate).seconds > (1 + BUCKET_OVERHEAD) * whole:
            break
        buckets *= 2
    return -(-case.size // buckets)


def _reason(profile: Profile, case: Case, best: Candidate, seconds: Mapping[Candidate, float]) -> str:
    """Return one line: what is picked, what comes next of the other kind, and for which case."""
    if sum(map(len, case.nodes)) == 1:
        return ALONE
    is_sparse, measured = REDUCERS[best.reducer].sparse, tried(profile, case)
    of_the_other_kind = [each for each in seconds if REDUCERS[each.reducer].sparse != is_sparse]
    other = min(of_the_other_kind, key=lambda each: seconds[each])
    beta = profile.network.link(is_inter=len(case.nodes) > 1).beta
    rate = f"{8e-9 / beta:.3g} Gbit/s" if beta else "no limit of bytes"

    def told(candidate: Candidate) -> str:
        return f"{seconds[candidate] * 1e3:.3g} ms {'measured' if candidate in measured else 'expected'}"

    kind = "dense" if is_sparse else "sparse"
    return f"{best}: {told(best)} a step, the best {kind} one ({other}) {told(other)}; {case}, {rate}"
