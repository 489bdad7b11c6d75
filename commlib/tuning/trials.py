"""Measure some steps of promising reducers in a job, to correct the predictions of the cost model."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from commlib.arrays import finish
from commlib.density import check_density
from commlib.reducers import make_reducer
from commlib.topology import Topology
from commlib.tuning.gradients import Gradients
from commlib.tuning.probe import SHORTEST_SECONDS
from commlib.tuning.profile import Candidate, Profile, Trial
from commlib.tuning.tuner import Case, expect, settings, tried
from commlib.vectors import Float32

PROMISING = 1.4  # times what the fastest is expected to take: candidates up to there are tried
CLOSE = 1.15  # times what the fastest took: such candidates are tried once more
WARM_UP_STEPS, STEPS = 2, 5
GRADIENTS = 3  # that the steps of a trial cycle through
TRIAL_SECONDS = 3.0  # after which a slow candidate has been tried enough


def try_out(topology: Topology, profile: Profile, size: int, densities: Iterable[float]) -> Profile:
    """Measure some steps of promising candidates; return the profile with these trials.

    All ranks call it together with the same profile, and all get the same one. Gradients of ``size`` entries
    are those of :class:`commlib.tuning.gradients.Gradients`.
    """
    if topology.world.size == 1:
        return profile
    generated = Gradients(size)
    world = topology.world
    gradients = [world.arrays.asarray(generated.of(world.rank, step)) for step in range(GRADIENTS)]
    del generated  # it is larger than a reducer
    for density in densities:
        case = Case(topology.nodes, size, check_density(density))
        while (candidate := _most_promising(profile, case)) is not None:
            profile = _with_trial(topology, profile, case, candidate, gradients)
        for candidate in _close_to_the_fastest(profile, case):
            profile = _with_trial(topology, profile, case, candidate, gradients)
    return profile


def _most_promising(profile: Profile, case: Case) -> Candidate | None:
    """Return the candidate expected to be the fastest of those not tried here; ``None`` if all are slow."""
    seconds, so_far = expect(profile, case), tried(profile, case)
    untried = [each for each in seconds if each not in so_far]
    best = min(untried, key=lambda each: seconds[each], default=None)
    return best if best and seconds[best] <= PROMISING * min(seconds.values()) else None


def _close_to_the_fastest(profile: Profile, case: Case) -> list[Candidate]:
    seconds, so_far = expect(profile, case), tried(profile, case)
    limit = CLOSE * min(seconds[each] for each in so_far)
    return [each for each in so_far if seconds[each] <= limit]


def _with_trial(
    topology: Topology, profile: Profile, case: Case, candidate: Candidate, gradients: Sequence[Float32]
) -> Profile:
    """Return the profile with one more trial: median seconds from barrier to barrier on the slowest rank."""
    world = topology.world
    reducer = make_reducer(candidate.reducer, topology, case.size, **settings(case, candidate))
    taken: list[float] = []
    while len(taken) < WARM_UP_STEPS + STEPS:
        gradient = gradients[len(taken) % len(gradients)]
        world.barrier()
        start = world.now()
        reducer.reduce(gradient)
        finish(world.arrays)
        world.barrier()
        taken.append(max(world.allgather_objects(world.now() - start)))
        if len(taken) > WARM_UP_STEPS and sum(taken) > TRIAL_SECONDS:
            break
    seconds = max(median(taken[WARM_UP_STEPS:]), SHORTEST_SECONDS)
    trial = Trial(candidate, case.size, case.density, seconds)
    return replace(profile, trials=(*profile.trials, trial))
