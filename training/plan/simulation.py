"""Run the reducers of a plan, their own code, on simulated ranks, beside the closed forms.

The ranks are threads of this process, and messages take virtual time; computing takes none.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from commlib import Communicator, LinkBytes, Topology, make_reducer
from commlib.reducers import reducer_options
from commlib.transport import simulated
from commlib.vectors import VALUE_BYTES
from datacache.capacity import free_memory_bytes
from training.plan.exchange import Exchange
from training.plan.memory import kept_by
from training.plan.planner import PhasePlan, Plan

REUSED = "reused"  # the selector whose thresholds of one step are reused in the next, which then counts
MOST_MESSAGES = 1_200_000  # of all ranks: some minutes
MOST_BYTES = 16 << 30  # of all ranks together
SHARE = 0.75  # of the free memory
LEAST_SIZE = 1_000
SEED = 5


@dataclass(frozen=True)
class Simulation:
    """A step on simulated ranks and by closed forms: bytes of the busiest node on the slow link, seconds.

    ``phases``: numbers of those that it stands for. ``size``: entries, fewer than the model's where memory is
    short. ``ranks``: fewer than asked for where they would send too many messages, one after the other.
    """

    phases: list[int]
    reducer: str
    ranks: int
    nodes: int
    size: int
    seconds: float
    expected_seconds: float
    sent: int
    expected_sent: int


def simulations(plan: Plan, ranks: int) -> Iterator[Simulation]:
    """Yield a simulation of each reducer that declares a cost, on as large a gradient as fits in memory."""
    alike: dict[str, list[PhasePlan]] = {}
    for phase in plan.phases:
        alike.setdefault(repr((phase.reducer, phase.options)), []).append(phase)
    for phases in alike.values():
        first = phases[0]
        options = {key: value for key, value in first.options.items() if key != "wrappers"}
        exchange = Exchange(plan.site, [plan.weights], first.reducer, options)
        if exchange.is_known:
            yield _simulate([phase.number for phase in phases], _fitting(exchange, ranks))


def _fitting(exchange: Exchange, ranks: int) -> Exchange:
    """Return the exchange on ranks halved while they send too many messages, with entries that fit memory."""
    exchange = exchange.among(ranks)
    while _steps(exchange) * exchange.messages() > MOST_MESSAGES:
        ranks //= 2
        exchange = exchange.among(ranks)
    room = min(MOST_BYTES, int(SHARE * free_memory_bytes()))
    size = sum(exchange.sizes)
    while size > LEAST_SIZE and exchange.site.ranks * _rank_bytes(replace(exchange, sizes=[size])) > room:
        size = max(LEAST_SIZE, size * 9 // 10)
    return replace(exchange, sizes=[size])


def _rank_bytes(exchange: Exchange) -> int:
    """Return the bytes of a simulated rank: of its reducer, its gradient, and messages on their way."""
    (size,), sent = exchange.sizes, exchange.rank_bytes() or LinkBytes()
    kept = kept_by(exchange.reducer, exchange.options, exchange.site.nodes, size, sent)
    vector = VALUE_BYTES * size
    gradient = vector if _steps(exchange) > 1 else 0  # that of a single step is a view of the noise
    # Copies of what ranks send are under way at the same time, before anything has arrived.
    on_their_way = min(sent.intra + sent.inter, vector)
    return kept.residual + kept.vectors + gradient + max(kept.entries, on_their_way)


def _steps(exchange: Exchange) -> int:
    """Return how many steps are run, of which the last one counts."""
    selector = (reducer_options(exchange.reducer) | dict(exchange.options)).get("selector")
    return 2 if selector == REUSED else 1


def _simulate(phases: list[int], exchange: Exchange) -> Simulation:
    site, (size,) = exchange.site, exchange.sizes
    noise = np.random.default_rng(SEED).standard_normal(2 * size + site.ranks, np.float32)

    def body(comm: Communicator) -> tuple[float, LinkBytes]:
        reducer = make_reducer(exchange.reducer, Topology(comm), size, **exchange.options)
        gradient = noise[comm.rank * size // site.ranks :][:size]  # other entries are large on each rank
        begun = 0.0
        for step in range(_steps(exchange)):
            if step:  # the reducer adds the residual again: both steps select from the same noise
                gradient = gradient - reducer.residual
            comm.barrier()
            begun = comm.now()
            reducer.reduce(gradient)
        assert reducer.last is not None
        return comm.now() - begun, reducer.last.traffic.sent

    counts = list(map(len, site.nodes))
    found: list[Any] = simulated.run(body, site.ranks, counts, site.network)
    of_nodes = [sum((found[rank][1] for rank in node), LinkBytes()) for node in site.nodes]
    sent = [each.inter if len(of_nodes) > 1 else each.intra for each in of_nodes]
    return Simulation(
        phases=phases,
        reducer=exchange.reducer,
        ranks=site.ranks,
        nodes=len(site.nodes),
        size=size,
        seconds=max(seconds for seconds, _ in found),
        expected_seconds=exchange.messages_seconds(),
        sent=max(sent),
        expected_sent=max(exchange.node_bytes()),
    )
