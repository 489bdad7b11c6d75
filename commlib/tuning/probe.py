"""The profile of a job: the measured speeds of its links and kernels, inputs of the cost model, in a file.

All ranks measure at the same time: they share cards, memory and perhaps cores in a step as well.
"""

import json
import math
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from commlib.arrays import Workspace, clear, finish, zeros
from commlib.cost import Group
from commlib.density import entries
from commlib.errors import InvalidArgument, one_line, shown
from commlib.kernels import kernels_of
from commlib.network import Link, Network
from commlib.reducers.messages import swap_messages
from commlib.selection import Selector
from commlib.topology import Topology
from commlib.transport.base import Communicator
from commlib.vectors import Float32
from commlib.work import Speeds

FORMAT = 3  # of the file
WIRES = ("fp32", "gap+fp16")  # the codecs that are measured and chosen from


def processor() -> str:
    """Return the name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


@dataclass(frozen=True)
class Job:
    """What a profile belongs to: the hosts, their processors, and how many ranks each node has."""

    hosts: tuple[str, ...]
    processors: tuple[str, ...]
    ranks_of_nodes: tuple[int, ...]

    def __str__(self) -> str:
        ranks, nodes = sum(self.ranks_of_nodes), len(self.ranks_of_nodes)
        on = "1 node" if nodes == 1 else f"{nodes} nodes"
        return f"{ranks} rank{'s' * (ranks > 1)} on {on} of {', '.join(self.hosts)}"


@dataclass(frozen=True)
class Candidate:
    """A reducer and its wire codec; none for one that sends no entries.

    ``options``: the options other than density and ``wire``, as JSON.
    """

    reducer: str
    wire: str | None = None
    options: str = "{}"

    @property
    def given(self) -> dict[str, Any]:
        """The options other than density, the wire codec among them."""
        return ({"wire": self.wire} if self.wire else {}) | json.loads(self.options)

    def __str__(self) -> str:
        given = [value if name == "wire" else f"{name}={value}" for name, value in self.given.items()]
        return f"{self.reducer} with {', '.join(given)}" if given else self.reducer


@dataclass(frozen=True)
class Trial:
    """The median seconds of some steps of a reducer, on a gradient of ``size`` entries.

    ``spread``: the interquartile range of the seconds over their median, if the steps of all candidates that
    the pick is made from took turns; else ``None``.
    """

    candidate: Candidate
    size: int
    density: float
    seconds: float
    spread: float | None = None


@dataclass(frozen=True)
class Profile:
    """Links and speeds of a job, and reducers that were tried there.

    ``throughput``: of what was trained there, as :mod:`training.plan.site` reads it; of no use to commlib.
    """

    job: Job
    network: Network
    speeds: Speeds
    trials: tuple[Trial, ...] = ()
    throughput: tuple[Mapping[str, Any], ...] = ()

    def save(self, path: Path) -> None:
        """Write the profile to a file, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.new")
        aside.write_text(json.dumps({"format": FORMAT} | asdict(self), indent=1) + "\n")
        aside.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Profile":
        """Return what ``save`` wrote; ``InvalidArgument`` names a missing or damaged file, in one line."""
        try:
            return cls.of(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise InvalidArgument(one_line(f"{path}: no such profile")) from None
        except Exception as error:  # whatever a file that holds anything leads to
            what = f"({type(error).__name__}: {str(error) or 'nested too deep'})"
            raise InvalidArgument(
                one_line(f"{path}: expected a profile of format {FORMAT}, got something else {what}")
            ) from error

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Profile":
        """Return the profile of what a file holds; some exception if it holds none."""
        if content["format"] != FORMAT:
            raise ValueError(f"format {shown(content['format'])}")
        given = content["job"]
        hosts, processors = (tuple(map(str, given[key])) for key in ("hosts", "processors"))
        job = Job(hosts, processors, tuple(map(int, given["ranks_of_nodes"])))
        network = Network(**{name: Link(**link) for name, link in content["network"].items()})
        speeds = Speeds(**content["speeds"])
        if missing := [wire for wire in WIRES if wire not in speeds.code]:
            raise ValueError(f"speeds.code: expected {', '.join(WIRES)}, got no {missing[0]}")
        trials = tuple(map(_trial, content["trials"]))
        return cls(job, network, speeds, trials, tuple(content.get("throughput", ())))

    def check(self, job: Job) -> None:
        """Raise ``InvalidArgument`` where the profile was measured in another job than this one."""
        if self.job != job:
            which = ""  # where the summaries of both jobs are equal
            if str(self.job) == str(job):
                which = f" ({list(self.job.processors)} there, {list(job.processors)} here)"
            raise InvalidArgument(one_line(f"expected a profile of {job}, got one of {self.job}{which}"))


def _trial(content: Mapping[str, Any]) -> Trial:
    """Return a trial, whose reducer and wire may be unknown: predicting it then raises an error."""
    trial = Trial(**{**content, "candidate": Candidate(**content["candidate"])})
    if not (trial.size > 0 and 0 < trial.density <= 1 and trial.seconds > 0):
        raise ValueError(f"trials: expected a size, a density and seconds above 0, got {shown(content)}")
    return trial


Float64 = npt.NDArray[np.float64]

SEED = 20_221_121
DEGREES_OF_FREEDOM = 3  # a variance, but far outliers
LAYERS = 24  # with a scale each: large entries are clustered, as in real gradients


class Gradients:
    """Gradients that resemble those of training: heavy tailed, in clusters, partly shared between ranks.

    An entry is ``scale·(lasting + step + own)``: the first equal on all ranks in all steps, the second on all
    ranks in one step, the third of one rank in one step.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        generator = np.random.default_rng(SEED)
        scales = np.exp(generator.normal(size=LAYERS)).astype(np.float32)
        self._scale = scales[np.arange(size) * LAYERS // size]
        self._lasting, noise = generator.standard_t(DEGREES_OF_FREEDOM, (2, size)).astype(np.float32)
        self._sums: dict[int, tuple[Float64, Float64]] = {}
        self._noise = np.tile(noise, 2)  # drawn once: every window of it is a rotation, as good as a new draw

    def of(self, rank: int, step: int) -> Float32:
        """Return the gradient of one rank in one step, a new float32 array of shape ``(size,)``."""
        gradient: Float32 = self._lasting + self._window(step, 0)
        gradient += self._window(step, 1 + rank)
        gradient *= self._scale
        return gradient

    def sum_of(self, ranks: int) -> tuple[Float64, Float64]:
        """Return the sums over ranks, in float64, of the gradients of step 0 and of their magnitudes.

        They are stored: the results of one candidate after the other are compared with them.
        """
        if ranks not in self._sums:
            total, magnitudes = np.zeros((2, self.size))
            for rank in range(ranks):
                gradient = self.of(rank, 0)
                total += gradient
                magnitudes += np.abs(gradient)
            self._sums[ranks] = total, magnitudes
        return self._sums[ranks]

    def _window(self, step: int, number: int) -> Float32:
        start = int(np.random.default_rng([SEED, step, number]).integers(self.size))
        return self._noise[start : start + self.size]


MESSAGE_BYTES = (1 << 10, 1 << 14, 1 << 18, 1 << 21, 1 << 23)
INCAST_BYTES = 1 << 19
HOPS = 24  # short messages one after the other
BURST = 16  # messages of a rank at once, when the gap between them is measured
RUNS, WARM_UP_RUNS = 11, 2
KERNEL_SECONDS = 0.02  # of a run: in less than its turn on a shared core, a rank would seem to be alone
MOST_CALLS = 64
SHORTEST_SECONDS = 1e-9  # that a clock can measure
KERNEL_SIZE, KERNEL_DENSITIES = 1 << 23, (0.01, 0.001)
SETS = 4  # of arrays, beyond what the largest caches hold
ADDED_UP = 4  # vectors, when the speed of adding up sparse ones is measured


def job_of(topology: Topology) -> Job:
    """Return the job that a profile of these ranks belongs to; all ranks call it together."""
    world, parts = topology.world, f"{len(os.sched_getaffinity(0))} cores of {processor()}"
    if world.arrays is not np:
        cuda = world.arrays.cuda
        gpu = cuda.runtime.getDeviceProperties(cuda.Device().id)["name"].decode()
        parts += f", {gpu} by {getattr(world, 'between', 'nccl')}"
    gathered = world.allgather_objects((world.host, parts))
    hosts, processors = zip(*dict.fromkeys(gathered), strict=True)
    return Job(hosts, processors, tuple(map(len, topology.nodes)))


def ranks_per_core(world: Communicator) -> float:
    """Return the ranks of a core on the machine where they are most; its namespaces count as one machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text() if boot.exists() else world.host
    told = world.allgather_objects((machine, os.sched_getaffinity(0), world.shares_cores))
    if not any(shares for *_, shares in told):
        return 1.0
    machines = [[cores for name, cores, _ in told if name == each] for each in {name for name, *_ in told}]
    return max(1.0, *(len(each) / len(reduce(set.union, each)) for each in machines))


def implausible(profile: Profile) -> str | None:
    """Return what no link can be like in one line; ``None`` if the measured ones are plausible."""
    ranks, network = profile.job.ranks_of_nodes, profile.network
    if max(ranks) > 1 and network.intra.alpha > 1e-3:
        return f"a latency of {network.intra.alpha * 1e3:.3g} ms inside a node"
    if len(ranks) > 1 and network.inter.alpha > 0.1:
        return f"a latency of {network.inter.alpha * 1e3:.3g} ms between nodes"
    return None


def measure(topology: Topology) -> Profile:
    """Measure links and kernels, some seconds; all ranks call it together, and all get the same profile."""
    network = Network()  # the default values of a link that the job does not have are never used
    intra = _link(topology.world, topology.node, sharing=1) or network.intra
    inter = _link(topology.world, topology.stream, sharing=topology.streams) or network.inter
    if len(topology.nodes) > 2:
        inter = replace(inter, incast=_incast(topology, inter))
    speeds = _speeds(topology.world)
    return Profile(job_of(topology), Network(intra, inter), speeds)


def _link(world: Communicator, comm: Communicator, sharing: int) -> Link | None:
    """Return the link within ``comm``, through which ``sharing`` ranks send at the same time.

    α and β: the least squares of the relative errors over messages of different lengths, where each rank
    sends one to the next and receives one (gTop-k measures them with such ping-pongs). The shortest are
    sent in a chain, as in a ring: ranks that begin at different times wait once for each other. The gap comes
    from several short messages at once. ``busy``, the wait for processors, is by how much α exceeds the
    latency of a ping-pong between two ranks alone. ``None`` where every ``comm`` has one rank.
    """
    sizes = world.allgather_ints([comm.size])[:, 0]
    if sizes.max() == 1:
        return None
    first = int(np.flatnonzero(sizes > 1)[0])
    pair = comm.size > 1 and int(comm.allgather_ints([world.rank])[0, 0]) == first
    terms, seconds, short = [], [], MESSAGE_BYTES[0]
    for length in MESSAGE_BYTES:
        hops = HOPS if length == short else 1
        seconds.append(_shift_seconds(world, comm, length, hops))
        # ranks that share a card take turns after the first message
        terms.append([1.0, (1 + (sharing - 1) / hops) * length])
    rows = np.array(terms) / np.maximum(seconds, SHORTEST_SECONDS)[:, None]
    found = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]
    alpha, beta = np.maximum(found, 0.0).tolist()
    burst = _shift_seconds(world, comm, BURST * short, HOPS, short)
    gap = (burst - seconds[0]) / (BURST - 1)
    message = world.arrays.zeros(short, np.uint8)
    alone = slowest(world, lambda: _to_and_fro(comm, message) if pair else None, HOPS) / 2
    busy = min(alpha - (alone - short * beta), alpha)
    return Link(alpha, beta, gap=min(max(gap, 0.0), alpha), busy=max(busy, 0.0))


def _incast(topology: Topology, inter: Link) -> float:
    """Return how many times as long all ranks take to send to all others as the link says."""
    world, nodes = topology.world, topology.nodes
    outgoing = [world.arrays.zeros(INCAST_BYTES, np.uint8)] * world.size
    group = Group(len(nodes), max(map(len, nodes)), Network(Link(0, 0), inter))
    workspace = Workspace(world.arrays)
    seconds = slowest(world, lambda: swap_messages(world, outgoing, workspace))
    return max(1.0, (seconds - inter.alpha) / (group.exchange(INCAST_BYTES) - inter.alpha))


def _shift_seconds(
    world: Communicator, comm: Communicator, total_bytes: int, hops: int, length: int | None = None
) -> float:
    """Return the seconds of one of ``hops`` shifts in a row: each rank sends ``total_bytes`` to the next.

    The bytes are sent at once, in messages of ``length`` bytes, by default of ``comm.eager_bytes``.
    """
    outgoing, incoming = world.arrays.zeros((2, total_bytes), np.uint8)
    step = length or comm.eager_bytes
    cuts = [slice(start, start + step) for start in range(0, total_bytes, step)] if comm.size > 1 else []

    def shift() -> None:
        requests = [comm.receive(incoming[cut], (comm.rank - 1) % comm.size) for cut in cuts]
        requests += [comm.send(outgoing[cut], (comm.rank + 1) % comm.size) for cut in cuts]
        for request in requests:
            request.wait()

    return slowest(world, shift, hops)


def _to_and_fro(comm: Communicator, message: npt.NDArray[np.uint8]) -> None:
    """Send a message from the first rank to the second one and back."""
    if comm.rank == 0:
        comm.send(message, 1).wait()
        comm.receive(message, 1).wait()
    elif comm.rank == 1:
        comm.receive(message, 0).wait()
        comm.send(message, 0).wait()


def slowest(world: Communicator, action: Callable[[], object], times: int = 1) -> float:
    """Return the seconds that ``action`` takes on the slowest rank, the median of several runs."""
    return float(np.median(in_turns(world, action, times=times)))


def in_turns(world: Communicator, *actions: Callable[[], object], times: int = 1) -> Float64:
    """Return the seconds of each action on the slowest rank, run by run: they take turns in each.

    ``times``: an action is called so often in a run, which counts by the mean.
    """
    own = []
    for _ in range(WARM_UP_RUNS + RUNS):
        for action in actions:
            world.barrier()
            start = world.now()
            for _ in range(times):
                action()
            finish(world.arrays)
            own.append(world.now() - start)
    seconds: Float64 = np.max(world.allgather_objects(own), axis=0) / times
    return seconds.reshape(-1, len(actions))[WARM_UP_RUNS:]


def calls_of_run(world: Communicator, action: Callable[[], object]) -> int:
    """Return how many calls take ``KERNEL_SECONDS``, up to ``MOST_CALLS``, the same number on all ranks."""
    action()  # the first takes longer
    start = world.now()
    action()
    finish(world.arrays)
    longest = max(world.allgather_objects(world.now() - start))
    if longest < SHORTEST_SECONDS:  # on a virtual clock that computing does not move
        return 1
    return min(MOST_CALLS, math.ceil(KERNEL_SECONDS / longest))


def _speeds(world: Communicator) -> Speeds:
    """Measure every kernel on all ranks at the same time.

    Gradient, residual and result are others at each call: what a step works on has left the caches since the
    step before.
    """
    size, (many, few) = KERNEL_SIZE, (entries(density, KERNEL_SIZE) for density in KERNEL_DENSITIES)
    gradients, arrays, kernels = Gradients(size), world.arrays, kernels_of(world.arrays)
    host = gradients.of(world.rank, 0)
    turned = (arrays.asarray(np.roll(host, turn)) for turn in range(ADDED_UP))
    selected = [kernels.make_selector("exact").select(vector, many) for vector in turned]

    def seconds(action: Callable[[], object]) -> float:
        return slowest(world, action, calls_of_run(world, action))

    other = gradients.of(world.rank, 1)
    turns = cycle([(arrays.array(host), arrays.array(other), zeros(size, arrays)) for _ in range(SETS)])

    def add() -> None:
        gradient, residual, out = next(turns)
        np.add(gradient, residual, out=out)

    def place() -> None:
        for each in next(turns):
            selected[0].subtract_from(each)

    def select(selector: Selector, k: int) -> None:
        gradient, residual, out = next(turns)
        selector.select_sum(gradient, residual, k, out)

    few_and_many = [partial(select, kernels.make_selector("exact"), k) for k in (few, many)]
    selecting = in_turns(world, *few_and_many, times=calls_of_run(world, few_and_many[0]))
    keep = max(0.0, float(np.median(selecting[:, 1] - selecting[:, 0])) / (many - few))
    return Speeds(
        add=seconds(add) / size,
        fill=seconds(lambda: clear(next(turns)[2])) / size,
        select=max(0.0, float(np.median(selecting[:, 0])) - few * keep) / size,
        keep=keep,
        place=seconds(place) / (3 * many),
        entry=seconds(lambda: kernels.sum_sparse(selected)) / (ADDED_UP * many),
        code={
            wire: seconds(lambda: codec.decode(codec.encode(selected[0]), size)) / many  # noqa: B023
            for wire, codec in ((wire, kernels.make_codec(wire)) for wire in WIRES)
        },
        ranks_per_core=ranks_per_core(world) if arrays is np else 1.0,
    )
