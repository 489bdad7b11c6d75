"""``reducer: auto``: the profile of the ranks, and the reducer that is chosen from it for each phase."""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from commlib import InvalidArgument, Topology
from commlib.errors import one_line
from commlib.folders import expanded, user_cache
from commlib.tuning.probe import Job, Profile, job_of
from commlib.tuning.tuner import ALONE, Case, Choice, choose, choose_buckets, choose_within
from commlib.vectors import VALUE_BYTES
from training.config.config import Config
from training.process.job import all_or_exit, on_rank0

# Raised by the cost model for numbers that were never measured and for unknown names.
UNPREDICTABLE = (ArithmeticError, LookupError, TypeError, ValueError)
_ONE_RANK = Choice(reducer="dense", options={}, seconds=0.0, dense_seconds=0.0, reason=ALONE)


def path_for(ranks: int, nodes: int) -> Path:
    """Return the default path of the profile of such ranks, below ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    return user_cache() / f"profile-{ranks}ranks-{nodes}nodes.json"


def profile_path(given: str | None, topology: Topology) -> Path:
    """Return the path that was given for a profile, or the default."""
    return path_for(topology.world.size, len(topology.nodes)) if given is None else expanded(given)


def profile_for(config: Config, topology: Topology) -> Profile | None:
    """Return the profile of these ranks, on rank 0, if a phase's reducer is to be chosen from it.

    All ranks call it together. Where there is none, or one of other ranks, all exit with status 2.
    """
    comm = topology.world
    if comm.size == 1 or all(config.phases[number].budget for number in config.automatic):
        return None
    job, remedy = job_of(topology), _remedy(config, topology)

    def read() -> Profile | None:
        return _read(profile_path(config.profile, topology), job, remedy) if comm.rank == 0 else None

    return all_or_exit(comm, read)


def _read(path: Path, job: Job, remedy: str) -> Profile:
    try:
        profile = Profile.load(path)
    except InvalidArgument as error:
        raise ValueError(f"{error}; reducer=auto expects one of {job}; to measure it: {remedy}") from error
    try:
        profile.check(job)
    except InvalidArgument as error:
        raise ValueError(f"{path}: {error}; to measure again: {remedy}") from error
    return profile


def _remedy(config: Config, topology: Topology) -> str:
    """Return the command that measures these ranks; all of them call it together."""
    slots = Counter(topology.world.allgather_objects(topology.world.host))
    arguments = ["cloudtrain", "tune", "-np", str(topology.world.size)]
    if len(slots) > 1:
        arguments += ["-H", ",".join(f"{host}:{count}" for host, count in slots.items())]
    if (layout := config.ranks_per_node) is not None:
        counts = [layout] if isinstance(layout, int) else layout
        arguments += ["--ranks-per-node", ",".join(map(str, counts))]
    if config.profile is not None:
        arguments += ["--profile", config.profile]
    if config.transport != "auto":
        arguments += ["--transport", config.transport]
    return shlex.join(arguments)


def choose_reducers(
    config: Config, topology: Topology, profile: Profile | None, size: int
) -> dict[int, Choice]:
    """Return what rank 0 chooses for each phase with ``auto``, by number, on all ranks.

    ``profile``: as :func:`profile_for` returns it. ``size``: entries of the gradient. All ranks call it
    together.
    """
    if not config.automatic:
        return {}
    if topology.world.size == 1:
        return dict.fromkeys(config.automatic, _ONE_RANK)
    on_gpus = topology.world.arrays is not np
    within = choices_within(config, topology.nodes, size, on_gpus=on_gpus)
    by_profile = [number for number in config.automatic if number not in within]
    if not by_profile:
        return within
    remedy = _remedy(config, topology)

    def choices() -> dict[int, Choice]:
        assert profile is not None
        densities = {number: config.density_of(config.phases[number]) for number in by_profile}
        try:
            nodes = topology.nodes
            return {
                number: choose(profile, nodes, size, density, on_gpus=on_gpus)
                for number, density in densities.items()
            }
        except UNPREDICTABLE as error:
            path = profile_path(config.profile, topology)
            why = f"{type(error).__name__}: {error}"
            expected = f"expected a profile from which steps can be predicted ({why})"
            raise ValueError(one_line(f"{path}: {expected}; to measure again: {remedy}")) from error

    return within | on_rank0(topology.world, choices)


def choices_within(
    config: Config, nodes: Sequence[Sequence[int]], size: int, *, on_gpus: bool
) -> dict[int, Choice]:
    """Return what is chosen for each phase with a budget, by number."""
    found = dict[int, Choice]()
    for number, phase in enumerate(config.phases):
        if phase.budget is not None:
            density = config.density_of(phase)
            choice = choose_within(phase.budget.bytes_per_step, nodes, size, density, on_gpus=on_gpus)
            used = phase.with_local_steps(choice.local_steps or 1).local_steps
            if used is not None and used != choice.local_steps:
                why = f"{choice.reason}; {used} steps, for the fragments and their delay"
                choice = replace(choice, local_steps=used, reason=why)
            found[number] = choice
    return found


def check_budget(number: int, choice: Choice | None, steps: int) -> None:
    """Raise ``ValueError`` where a phase of so many steps is too short for the choice within its budget."""
    if choice is not None and (choice.local_steps or 1) > steps:
        expected = f"expected one that allows an exchange within the phase's {steps} steps"
        raise ValueError(f"phases[{number}].budget: {expected}, got one that does every {choice.local_steps}")


def with_buckets(config: Config, topology: Topology, profile: Profile | None, size: int) -> Config:
    """Return the configuration with the size of buckets that rank 0's profile advises, if any; collective."""
    if config.bucket_mib is not None or topology.world.size == 1:
        return config

    def largest() -> float | None:
        return None if profile is None else bucket_mib(config, topology.nodes, profile, size)

    return config.model_copy(update={"bucket_mib": on_rank0(topology.world, largest)})


def bucket_mib(config: Config, nodes: Sequence[Sequence[int]], profile: Profile, size: int) -> float:
    """Return a bucket size in MiB: the largest of those that the cost model advises for the phases."""
    counts = []
    for phase in config.phases:
        options = config.reducer_config(phase)
        case = Case(nodes, size, config.density_of(phase))
        reducer = options.pop("name")
        options.pop("wrappers", None)  # they cost no message
        counts.append(choose_buckets(profile, case, reducer, options))
    return -(-size // min(counts)) * VALUE_BYTES / 2**20
