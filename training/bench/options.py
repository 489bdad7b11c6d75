"""The options of ``cloudtrain bench reducers``, which of them go together, and the candidates."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.oktopk_numpy import PlainOkTopK
from commlib import REDUCERS, Link, Network, Reducer, make_reducer
from commlib.density import check_density
from commlib.errors import InvalidArgument, look_up
from commlib.wire import make_codec
from training.bench.allreduce import ALLREDUCES

SIZE, QUICK_SIZE = 1_000_000, 100_000
STEPS, ALLREDUCE_STEPS = 5, 20
# Against transcriptions: VGG-16, which Ok-Topk was published with.
PEERS_SIZE, PEERS_QUICK_SIZE, PEERS_STEPS = 14_728_266, 1_000_000, 8
DENSITY = 0.01

BASELINE = "dense"
# Algorithms of papers in plain NumPy, and the reducers that are measured against them.
TRANSCRIPTIONS: dict[str, type[Reducer]] = {"oktopk_numpy": PlainOkTopK}
TRANSCRIBED = {"oktopk": "oktopk_numpy"}
# Candidates that are none of ``REDUCERS``.
KINDS: dict[str, type[Reducer]] = {**TRANSCRIPTIONS, **ALLREDUCES}

LINKS = ("inter_gbit", "inter_microseconds", "intra_gbit", "intra_microseconds")
CLUSTER = ("nodes", "rates", "algorithm", "timeout")
# Names on the command line, where these are others.
CALLED = {"ranks": "-np", "sizes": "--size", "densities": "--density", "reducers": "--reducer"}
CALLED |= {"wires": "--wire", "rates": "--rate", "horovod": "--no-horovod"}


@dataclass(frozen=True)
class BenchCandidate:
    """A candidate: a reducer, a transcription or an all-reduce; its codec if it is not its own."""

    name: str
    wire: str | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.wire}" if self.wire else self.name

    @property
    def kind(self) -> Callable[..., Reducer]:
        """Return its constructor, which takes a topology and a size."""
        return KINDS.get(self.name) or partial(make_reducer, self.name)

    @property
    def sparse(self) -> bool:
        """Return whether it has a density."""
        return (KINDS.get(self.name) or REDUCERS[self.name]).sparse


@dataclass(frozen=True)
class Options:
    """The command's options; ``None`` and empty sequences stand for the defaults.

    ``peers``: against ``TRANSCRIPTIONS`` instead of against ``dense``; ``allreduce``: against ``ALLREDUCES``,
    without Horovod's unless ``horovod``. ``wires``: codecs of sparse reducers. ``cluster``: on an emulated
    one of ``nodes``, at each of ``rates``, for each of ``sizes`` and ``densities``; ``algorithm`` of MPI's
    all-reduce there, probed where none is given; ``timeout``: seconds that one job may take.
    """

    ranks: int | None = None
    ranks_per_node: int | None = None
    sizes: Sequence[int] = ()
    densities: Sequence[float] = ()
    reducers: Sequence[str] = ()
    wires: Sequence[str] = ()
    steps: int | None = None
    inter_gbit: float = 25
    inter_microseconds: float = 30
    intra_gbit: float = 1200
    intra_microseconds: float = 10
    quick: bool = False
    peers: bool = False
    allreduce: bool = False
    horovod: bool = True
    cluster: bool = False
    nodes: int | None = None
    rates: Sequence[str] = ()
    algorithm: str | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_names()
        self._check_combinations()
        _ = self.network

    def _check_numbers(self) -> None:
        for name in ("ranks", "ranks_per_node", "steps", "nodes", "timeout"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise InvalidArgument(f"{called(name)}: expected at least 1, got {value:g}")
        for size in self.sizes:
            if size < 1:
                raise InvalidArgument(f"--size: expected at least 1, got {size}")
        for density in self.densities:
            check_density(density)

    def _check_names(self) -> None:
        for wire in self.wires:
            make_codec(wire)
        for name in self.reducers:
            look_up(REDUCERS, "reducer", name)
            if self.peers and name not in TRANSCRIBED:
                known = ", ".join(TRANSCRIBED)
                raise InvalidArgument(f"--reducer: expected one with --peers ({known}), got {name}")
        if self.wires and not any(each.sparse for each in self.candidates()):
            raise InvalidArgument(f"--wire: expected a sparse --reducer, got {', '.join(self.reducers)}")

    def _check_combinations(self) -> None:
        """Refuse options without effect."""
        if self.cluster:
            self._refuse(("ranks", "peers", "allreduce", *LINKS), "without --cluster")
            return
        self._refuse(CLUSTER, "with --cluster")
        for name in ("sizes", "densities"):
            if len(given := getattr(self, name)) > 1:
                raise InvalidArgument(f"{called(name)}: expected one without --cluster, got {len(given)}")
        if self.peers:
            self._refuse(("wires", "allreduce"), "without --peers")
        if self.allreduce:
            self._refuse(LINKS, "without --allreduce")
        else:
            self._refuse(["horovod"], "with --allreduce or --cluster")

    def _refuse(self, names: Iterable[str], expected: str) -> None:
        for name in names:
            if getattr(self, name) != getattr(Options, name):
                raise InvalidArgument(f"{called(name)}: has an effect only {expected}")

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
    def size(self) -> int:
        """Return the entries of a gradient."""
        if self.sizes:
            return self.sizes[0]
        if self.peers:
            return PEERS_QUICK_SIZE if self.quick else PEERS_SIZE
        return QUICK_SIZE if self.quick else SIZE

    @property
    def density(self) -> float:
        """Return the share that sparse reducers select."""
        return self.densities[0] if self.densities else DENSITY

    @property
    def counted_steps(self) -> int:
        """Return how many steps count."""
        return self.steps or (ALLREDUCE_STEPS if self.allreduce else PEERS_STEPS if self.peers else STEPS)

    def candidates(self) -> Iterator[BenchCandidate]:
        """Yield the reducers to measure, sparse ones with each of the codecs."""
        for name in self.reducers or (TRANSCRIBED if self.peers else REDUCERS):
            for wire in (self.wires if REDUCERS[name].sparse else ()) or (None,):
                yield BenchCandidate(name, wire)

    def allreduces(self) -> Iterator[BenchCandidate]:
        """Yield the all-reduces to measure them against."""
        for name in ALLREDUCES if self.allreduce else ():
            if self.horovod or name != "horovod":
                yield BenchCandidate(name)


def called(name: str) -> str:
    """Return the name of an option on the command line.

    >>> called("ranks"), called("inter_gbit")
    ('-np', '--inter-gbit')
    """
    return CALLED.get(name, f"--{name.replace('_', '-')}")
