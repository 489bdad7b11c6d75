"""The plan of ``cloudtrain bench reducers``: its candidates, and the ranks that it measures on."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from commlib import Communicator, Network, Reducer, Topology, transport
from commlib.errors import InvalidArgument
from commlib.transport.mpi import WORLD_SIZES
from commlib.tuning.gradients import Gradients
from commlib.vectors import partition
from training.bench.options import BASELINE, TRANSCRIBED, BenchCandidate, Options
from training.bench.steps import CLOCKS, Clock

RANKS, RANKS_PER_NODE = 8, 4
WARM_UP_STEPS = 2
# Against all-reduces: five reducers of 25.6 M entries, on eight ranks of one machine, fit in 24 GiB.
LARGEST_GROUP_ENTRIES = 5 * 25_600_000


@dataclass(frozen=True)
class Plan:
    """What ``options`` ask for, and the ranks to measure it on.

    ``run`` calls a function on all ranks and returns rank 0's result; of real ranks each gets its own.
    ``steps``: those that count, after the warm-up. ``allreduces``: the baselines of all candidates, where
    these are not ``peer_of`` each.
    """

    options: Options
    run: Callable[[Callable[[Communicator], Any]], Any]
    ranks_per_node: int | None
    clock: Clock
    steps: range
    candidates: Sequence[BenchCandidate]
    allreduces: Sequence[BenchCandidate]
    gradients: Gradients

    @classmethod
    def of(cls, options: Options, comm: Communicator | None) -> "Plan":
        """Return the plan for the ranks of ``comm``, or for simulated ones without it."""
        ranks_per_node = options.ranks_per_node
        if comm is None:
            if options.allreduce:
                raise InvalidArgument(
                    "--allreduce: expected ranks of mpirun or horovodrun, got simulated ones"
                )
            ranks_per_node = ranks_per_node or RANKS_PER_NODE
            clock = CLOCKS["cpu" if options.peers else "virtual"]
        else:
            clock = CLOCKS["wall"]
            if options.ranks not in (None, comm.size):
                raise InvalidArgument(f"-np: expected the {comm.size} ranks of this job, got {options.ranks}")
        return cls(
            options=options,
            run=_on(comm, options.ranks or RANKS, ranks_per_node, options.network),
            ranks_per_node=ranks_per_node,
            clock=clock,
            steps=range(WARM_UP_STEPS, WARM_UP_STEPS + options.counted_steps),
            candidates=list(options.candidates()),
            allreduces=list(options.allreduces()),
            gradients=Gradients(options.size),
        )

    def topology(self, comm: Communicator) -> Topology:
        """Return the nodes of the ranks."""
        return Topology(comm, self.ranks_per_node)

    def make(self, candidate: BenchCandidate, topology: Topology) -> Reducer:
        """Return a reducer of the plan's size and density, else with its defaults."""
        wire = {"wire": candidate.wire} if candidate.wire else {}
        density = {"density": self.options.density} if candidate.sparse else {}
        return candidate.kind(topology, self.options.size, **density, **wire)

    def peer_of(self, candidate: BenchCandidate) -> BenchCandidate | None:
        """Return the peer of a reducer; the baseline has none."""
        if self.options.peers:
            return BenchCandidate(TRANSCRIBED[candidate.name])
        return None if candidate.name == BASELINE else BenchCandidate(BASELINE)

    def groups(self) -> Iterator[Sequence[BenchCandidate]]:
        """Yield the candidates in groups of about one length, each of which fits into memory."""
        count = -(-len(self.candidates) * self.options.size // LARGEST_GROUP_ENTRIES)
        for low, high in pairwise(partition(len(self.candidates), count)):
            yield self.candidates[low:high]

    def case(self, candidate: BenchCandidate, nodes: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Return the case of a candidate: all that distinguishes its measurement from others."""
        return {
            "size": self.options.size,
            "density": self.options.density if candidate.sparse else None,
            "wire": candidate.wire,
            "ranks_of_nodes": [len(node) for node in nodes],
            "clock": self.clock.name,
            "warm_up_steps": self.steps.start,
            **({} if self.allreduces else {"network": asdict(self.options.network)}),
            "quick": self.options.quick,
        }


def has_ranks() -> bool:
    """Return whether mpirun, horovodrun or srun has started this process with others."""
    return any(os.environ.get(name, "1") != "1" for name in WORLD_SIZES)


def _on(
    comm: Communicator | None, ranks: int, ranks_per_node: int | None, network: Network
) -> Callable[[Callable[[Communicator], Any]], Any]:
    if comm is not None:
        return lambda function: function(comm)
    return lambda function: transport.simulated.run(function, ranks, ranks_per_node, network)[0]
