"""Checks that need a GPU: ranks that share it, through NCCL and without, against the CPU's exact path.

``python benchmarks/gpu_checks.py > checks.jsonl`` prints a JSON object a line: the check, whether
every bit is that of the CPU, or why it could not be tried. Several ranks on one GPU claim to be on machines
of their own (``NCCL_HOSTID``); NCCL may refuse all the same, so others are threads of one process. No MPI is
needed: all other messages go through pipes.
"""

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":  # runs where the package is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from commlib import Communicator, Topology, make_reducer
from commlib.transport import nccl, simulated
from commlib.transport.base import Request, Requests, check_color
from commlib.tuning.probe import Gradients

Case = tuple[str, dict[str, Any], int]  # a reducer, its options, and the size
Finding = tuple[str, dict[str, Any]]  # of which check, and what
PipesOfRanks = Sequence[Sequence["SimpleQueue[Any]"]]

STEPS = 3
RANKS, THREADS = 2, 4  # ranks through NCCL, and ranks of one process
SIZES = (1, 1_000, 1_000_003, 25_557_032)  # the last is ResNet-50's
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("dense", {}),
    ("torus2d", {}),
    ("allgather", {"density": 0.01}),
    ("hitopk", {"density": 0.01}),
    ("hitopk", {"density": 0.01, "wire": "gap+fp16"}),
    ("hitopk", {"density": 0.001, "wire": "qsgd8"}),
    ("hioktopk", {"density": 0.01}),
)


class Receipt(Request):
    """A message that comes through a pipe."""

    def __init__(self, comm: "Pipes", array: Any, source: int) -> None:
        self._comm, self._array, self._source = comm, array, source

    def wait(self) -> None:
        """Fill the array."""
        self._array[...] = self._comm.take(self._source)


class Pipes(Communicator):
    """Ranks that are processes, with ``pipes[source][destination]`` from each to each; for a few bytes only.

    All ranks of a pair use the same groups in the same order, so that their messages need no names.
    """

    def __init__(self, pipes: PipesOfRanks, rank: int, members: Sequence[int]) -> None:
        super().__init__(rank, len(members), platform.node())
        self._pipes, self._members = pipes, members

    def _free(self) -> None:
        """Free nothing: the pipes are the processes'."""

    def give(self, value: Any, rank: int) -> None:
        self._pipes[self._members[self.rank]][self._members[rank]].put(value)

    def take(self, rank: int) -> Any:
        return self._pipes[self._members[rank]][self._members[self.rank]].get()

    def allgather_objects(self, value: Any) -> list[Any]:
        for rank in range(self.size):
            self.give(value, rank)
        return [self.take(rank) for rank in range(self.size)]

    def split(self, color: int) -> "Pipes":
        colors = self.allgather_objects(check_color(color))
        ranks = [rank for rank, other in enumerate(colors) if other == color]
        return Pipes(self._pipes, ranks.index(self.rank), [self._members[rank] for rank in ranks])

    def start_allgather_ints(self, values: Sequence[int]) -> Any:
        rows = self.allgather_objects([int(value) for value in values])
        return lambda: np.array(rows, np.int64).reshape(self.size, len(values))

    def alltoall_ints(self, values: Sequence[int]) -> Any:
        return np.array(self.allgather_objects(list(values)), np.int64)[:, self.rank]

    def _send(self, array: Any, destination: int) -> Request:
        self.give(array.copy(), destination)
        return Requests(())  # it has been sent

    def _receive(self, array: Any, source: int) -> Request:
        return Receipt(self, array, source)


gradients_of = functools.lru_cache(maxsize=1)(Gradients)  # those of a size are drawn once


def digests(topology: Topology, name: str, options: dict[str, Any], size: int) -> list[str]:
    """Return digests of all means, of the residual, and of the bytes that were sent."""
    comm = topology.world
    reducer = make_reducer(name, topology, size=size, **options)
    gradients = gradients_of(size)
    means = []
    for step in range(STEPS):
        mean = reducer.reduce(comm.arrays.asarray(gradients.of(comm.rank, step)))
        means.append(host(mean).tobytes())
    sent = repr(reducer.last.traffic.sent).encode()
    return [hashlib.sha256(part).hexdigest() for part in (*means, host(reducer.residual).tobytes(), sent)]


def host(array: Any) -> Any:
    return array.get() if hasattr(array, "get") else array


def rank_through_nccl(pipes: PipesOfRanks, rank: int, sizes: Sequence[int], out: Any) -> None:
    """Run all checks as one rank of NCCL; ``out`` gets the findings of rank 0, or an error."""
    try:
        begun = time.perf_counter()
        comm = nccl.over(Pipes(pipes, rank, range(len(pipes))), share_gpus=True)
        connected = {"ranks": comm.size, "seconds": time.perf_counter() - begun}
        for found in chain([("connect", connected)], check(comm, sizes)):
            if rank == 0:
                out.put(found)
    except BaseException:  # noqa: BLE001 - of any kind: the parent prints it
        out.put(("failed", {"rank": rank, "error": traceback.format_exc()}))


def check(comm: Communicator, sizes: Sequence[int]) -> Iterator[Finding]:
    """Yield what is found, the same on all ranks: each rank on a node of its own, and all on one."""
    topologies = {per_node: Topology(comm, ranks_per_node=per_node) for per_node in (1, comm.size)}
    for case in cases(sizes):
        for per_node, topology in topologies.items():
            begun = time.perf_counter()
            seen = comm.allgather_objects(digests(topology, *case))
            found = {"case": case, "ranks_per_node": per_node, "digests": seen}
            yield "reducer", found | {"seconds": time.perf_counter() - begun}


def cases(sizes: Sequence[int]) -> list[Case]:
    return [(*case, size) for size in sizes for case in CASES]


def connected(ranks: int) -> PipesOfRanks:
    context = multiprocessing.get_context("spawn")
    return [[context.SimpleQueue() for _ in range(ranks)] for _ in range(ranks)]


def through_nccl(ranks: int, sizes: Sequence[int], limit: float) -> list[Finding]:
    """Run ranks as processes that share the GPU; return their findings until they ended or ``limit``."""
    context = multiprocessing.get_context("spawn")
    pipes, out = connected(ranks), context.Queue()
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    processes = []
    for rank in range(ranks):
        processes.append(context.Process(target=rank_through_nccl, args=(pipes, rank, sizes, out)))
        processes[-1].start()
    found, until = [], time.monotonic() + limit
    while time.monotonic() < until and (any(each.is_alive() for each in processes) or not out.empty()):
        if not out.empty():
            found.append(out.get())
            if found[-1][0] == "failed":
                break
        time.sleep(0.01)
    else:
        statuses = [each.exitcode for each in processes]
        if None in statuses:
            found.append(("failed", {"error": f"not done after {limit:g} s"}))
        elif any(statuses):
            found.append(("failed", {"error": f"the ranks ended with the statuses {statuses}"}))
    for process in processes:
        process.join(1)
        process.kill()
    return found


def versions() -> dict[str, Any]:
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    return {
        "device": properties["name"].decode(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "cuda": cupy.cuda.runtime.runtimeGetVersion(),
        "nccl": cupy.cuda.nccl.get_version(),
        "cupy": cupy.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def compare(ranks: int, sizes: Sequence[int], limit: float) -> bool:
    """Print the findings, a line each; return whether every bit was as on the CPU."""
    import cupy

    right = True
    for what, found in through_nccl(ranks, sizes, limit):
        if what == "reducer":
            case, per_node, seen = found["case"], found["ranks_per_node"], found["digests"]
            expected = in_threads(case, ranks, per_node, np)
            seconds = {"seconds": found["seconds"]}
            right &= is_same(case, ranks, per_node, "nccl", lambda seen=seen: seen, expected, **seconds)
        else:
            print_json(what, found)
            right &= what != "failed" and all(found.values())
    for case in cases(sizes[:-1]):
        for per_node in (1, THREADS):
            expected = in_threads(case, THREADS, per_node, np)
            run = functools.partial(in_threads, case, THREADS, per_node, cupy)
            right &= is_same(case, THREADS, per_node, "one process", run, expected)
            if per_node == 1:
                run = functools.partial(through_pinned_buffers, case, THREADS)
                right &= is_same(case, THREADS, per_node, "pinned buffers", run, expected)
    return right


def is_same(
    case: Case, ranks: int, per_node: int, way: str, run: Callable[[], Any], expected: Any, **more: float
) -> bool:
    """Print whether ``run()`` is as expected, or its error."""
    name, options, size = case
    own = {"reducer": name, **options, "size": size}
    own |= {"ranks": ranks, "ranks_per_node": per_node, "through": way}
    try:
        found: dict[str, Any] = {"bitwise": run() == expected}
    except Exception:  # noqa: BLE001 - of any kind: the others are checked all the same
        found = {"bitwise": False, "error": traceback.format_exc()}
    print_json("reducer", own | found | more)
    return bool(found["bitwise"])


def through_pinned_buffers(case: Case, ranks: int) -> list[Any]:
    """Return the digests of ranks with a node and a stream of their own each, that send through the host."""
    import cupy

    def body(comm: Communicator) -> list[str]:
        with cupy.cuda.Stream(non_blocking=True):
            return digests(Topology(nccl.over(comm, between="mpi")), *case)

    return simulated.run(body, ranks, ranks_per_node=1)


def in_threads(case: Case, ranks: int, per_node: int, arrays: Any) -> list[Any]:
    body = lambda comm: digests(Topology(comm, ranks_per_node=per_node), *case)  # noqa: E731
    return simulated.run(body, ranks, arrays=arrays)


def print_json(what: str, found: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"check": what, **found}) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Run the checks; return 0 where all bits are right, 1 where some are not, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for all ranks together")
    given = parser.parse_args()
    if problem := nccl.missing():
        print_json("missing", {"problem": problem})
        return 2
    print_json("versions", versions())
    right = compare(RANKS, given.sizes, given.limit)
    print_json("all", {"bitwise": right})
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
