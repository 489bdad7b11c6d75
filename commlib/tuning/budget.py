"""Choose a reducer, its codec and the number of local steps for a budget of bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from commlib.density import check_density
from commlib.prediction import bytes_of_nodes
from commlib.tuning.profile import Candidate
from commlib.tuning.tuner import Case, Choice, candidates, settings

WIRES = ("gap+fp16", "gap+lloyd2")  # the codecs that are chosen from


@dataclass(frozen=True)
class _Within:
    """A candidate that meets a budget: the bytes of an exchange, and the local steps that it then needs."""

    candidate: Candidate
    sent: float
    local_steps: int


def choose_within(bytes_per_step: float, nodes: Sequence[Sequence[int]], size: int, density: float) -> Choice:
    """Return the reducer and codec that need the fewest local steps to an exchange, and how many these are.

    ``bytes_per_step``: that a rank may send in an average step, between nodes where there are several, else
    inside. Of candidates that need as few steps, the one that sends most. By closed forms alone: all ranks
    choose alike, and nothing is measured.

    >>> nodes = [range(8 * node, 8 * node + 8) for node in range(16)]
    >>> choice = choose_within(1000, nodes, size=1_000_000, density=0.01)
    >>> choice.reducer, choice.options, choice.local_steps
    ('hioktopk', {'wire': 'gap+lloyd2'}, 14)
    """
    case = Case(nodes, size, check_density(density))
    found = [_within(bytes_per_step, case, each) for each in _candidates()]
    best = min(found, key=lambda each: (each.local_steps, -each.sent))
    wire = best.candidate.wire
    exchange = f"{best.sent / 1e3:.3g} kB a rank and exchange, one every {best.local_steps} steps"
    return Choice(
        reducer=best.candidate.reducer,
        options={"wire": wire} if wire else {},
        seconds=0.0,
        dense_seconds=0.0,
        reason=f"{best.candidate}: {exchange}; {case}, at most {bytes_per_step / 1e3:.3g} kB a step",
        local_steps=best.local_steps,
    )


def _candidates() -> list[Candidate]:
    """Return all reducers that declare what they cost, the sparse ones with each of the ``WIRES``."""
    reducers = {each.reducer: each.wire is not None for each in candidates()}
    return [
        Candidate(name, wire) for name, sparse in reducers.items() for wire in (WIRES if sparse else (None,))
    ]


def _within(bytes_per_step: float, case: Case, candidate: Candidate) -> _Within:
    sent = bytes_of_nodes(candidate.reducer, case.nodes, case.size, **settings(case, candidate))
    several = len(case.nodes) > 1
    of_rank = max(
        (each.inter if several else each.intra) / len(node)
        for each, node in zip(sent, case.nodes, strict=True)
    )
    return _Within(candidate, of_rank, max(1, ceil(of_rank / bytes_per_step)))
