"""What ``cloudtrain bench reducers`` is asked to measure, and the ranks that it measures on."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from commlib import REDUCERS, Communicator, Link, Network, Reducer, Topology, make_reducer, transport
from commlib.density import check_density
from commlib.errors import InvalidArgument, look_up
from training.bench.inputs import Gradients
from training.bench.oktopk_numpy import PlainOkTopK
from training.bench.steps import CLOCKS, Clock
from training.job import WORLD_SIZES

RANKS, RANKS_PER_NODE = 8, 4
SIZE, QUICK_SIZE = 1_000_000, 100_000
STEPS, WARM_UP_STEPS = 5, 2
# Beside transcriptions: VGG-16, which Ok-Topk was published with.
PEERS_SIZE, PEERS_QUICK_SIZE, PEERS_STEPS = 14_728_266, 1_000_000, 8

BASELINE = "dense"
# Papers' algorithms as one would write them down in NumPy, and the reducers that are measured beside them.
TRANSCRIPTIONS: dict[str, Callable[..., Reducer]] = {"oktopk_numpy": PlainOkTopK}
TRANSCRIBED = {"oktopk": "oktopk_numpy"}


@dataclass(frozen=True)
class Options:
    """The command's options; ``None`` and empty sequences stand for the defaults.

    ``peers``: beside ``TRANSCRIPTIONS`` instead of beside ``dense``.
    """

    ranks: int | None = None
    ranks_per_node: int | None = None
    size: int | None = None
    density: float = 0.01
    reducers: Sequence[str] = ()
    steps: int | None = None
    inter_gbit: float = 25
    inter_microseconds: float = 30
    intra_gbit: float = 1200
    intra_microseconds: float = 10
    quick: bool = False
    peers: bool = False

    def __post_init__(self) -> None:
        for name in ("ranks", "ranks_per_node", "size", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                option = "-np" if name == "ranks" else f"--{name.replace('_', '-')}"
                raise InvalidArgument(f"{option}: expected at least 1, got {value}")
        check_density(self.density)
        for name in self.reducers:
            look_up(REDUCERS, "reducer", name)
            if self.peers and name not in TRANSCRIBED:
                known = ", ".join(TRANSCRIBED)
                raise InvalidArgument(f"--reducer: expected one with --peers ({known}), got {name}")
        _ = self.network

    @property
    def network(self) -> Network:
        """Return the links that the virtual clock and the cost model predict for."""
        return Network(self._link("intra"), self._link("inter"))

    def _link(self, name: str) -> Link:
        latency, rate = getattr(self, f"{name}_microseconds"), getattr(self, f"{name}_gbit")
        try:
            return Link.of(microseconds=latency, gbit_per_second=rate)
        except InvalidArgument as error:
            raise InvalidArgument(f"--{name}-microseconds, --{name}-gbit: {error}") from None

    @property
    def size_or_default(self) -> int:
        """Return the entries of a gradient."""
        if self.peers:
            return self.size or (PEERS_QUICK_SIZE if self.quick else PEERS_SIZE)
        return self.size or (QUICK_SIZE if self.quick else SIZE)


@dataclass(frozen=True)
class Plan:
    """Ranks to measure on, and what.

    ``run`` calls a function on all ranks and returns rank 0's result; of real ranks each gets its own.
    ``steps``: those that count, after the warm-up.
    """

    run: Callable[[Callable[[Communicator], Any]], Any]
    ranks_per_node: int | None
    clock: Clock
    size: int
    density: float
    steps: range
    names: Sequence[str]
    network: Network
    gradients: Gradients
    quick: bool
    peers: bool

    @classmethod
    def of(cls, options: Options, comm: Communicator | None) -> "Plan":
        """Return what to do on the ranks of ``comm``, or on simulated ones without it."""
        ranks_per_node, steps = options.ranks_per_node, options.steps
        if comm is None:
            ranks_per_node = ranks_per_node or RANKS_PER_NODE
            clock = CLOCKS["cpu" if options.peers else "virtual"]
        else:
            clock = CLOCKS["wall"]
            if options.ranks not in (None, comm.size):
                raise InvalidArgument(f"-np: expected the {comm.size} ranks of this job, got {options.ranks}")
        return cls(
            run=_on(comm, options.ranks or RANKS, ranks_per_node, options.network),
            ranks_per_node=ranks_per_node,
            clock=clock,
            size=options.size_or_default,
            density=options.density,
            steps=range(WARM_UP_STEPS, WARM_UP_STEPS + (steps or (PEERS_STEPS if options.peers else STEPS))),
            names=options.reducers or list(TRANSCRIBED if options.peers else REDUCERS),
            network=options.network,
            gradients=Gradients(options.size_or_default),
            quick=options.quick,
            peers=options.peers,
        )

    def topology(self, comm: Communicator) -> Topology:
        """Return the nodes, on one of the ranks."""
        return Topology(comm, self.ranks_per_node)

    def make(self, name: str, topology: Topology) -> Reducer:
        """Return a reducer with its defaults, or a transcription, at the density of the plan."""
        if name in TRANSCRIPTIONS:
            return TRANSCRIPTIONS[name](topology, self.size, **self.density_of(name))
        return make_reducer(name, topology, self.size, **self.density_of(name))

    def peer_of(self, name: str) -> str | None:
        """Return what a reducer is measured beside; the baseline has no peer."""
        if self.peers:
            return TRANSCRIBED[name]
        return None if name == BASELINE else BASELINE

    def density_of(self, name: str) -> dict[str, float]:
        """Return the option ``density``, where a reducer has it."""
        return {"density": self.density} if name in TRANSCRIPTIONS or REDUCERS[name].sparse else {}

    def case(self, name: str, nodes: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Return what tells this measurement of a reducer from others."""
        return {
            "size": self.size,
            "density": self.density_of(name).get("density"),
            "ranks_of_nodes": [len(node) for node in nodes],
            "clock": self.clock.name,
            "warm_up_steps": self.steps.start,
            "network": asdict(self.network),
            "quick": self.quick,
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
