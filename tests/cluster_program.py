"""What the ranks of tests/test_cluster.py run: every reducer, and what the network cards send meanwhile.

usage, on every rank: cluster_program.py RESULTS.json
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from commlib import REDUCERS, Communicator, Topology, make_reducer, transport

SIZE = 1_000_003
DENSITY = 0.03
STEPS = 3
CARD = Path("/sys/class/net/eth0/statistics/tx_bytes")
SEGMENTS = Path("/proc/self/net/snmp")
SEGMENT_BYTES = 1514  # of Ethernet


def gradient(rank: int, step: int) -> np.ndarray:
    """Heavy-tailed, different on every rank and step, a part shared so that selections overlap."""
    own = np.random.default_rng([rank, step]).standard_normal(SIZE, np.float32)
    shared = np.random.default_rng([99, step]).standard_normal(SIZE, np.float32)
    return (own + 2 * shared) ** 3


def reduce_all(
    comm: Communicator, ranks_per_node: int | None = None, card: Path | None = None
) -> dict[str, dict[str, Any]]:
    """Run every reducer. By name: digests of the means, bytes accounted a step, bytes that left the card.

    ``again``: at most so many of those bytes TCP has sent a second time.
    """
    topology = Topology(comm, ranks_per_node=ranks_per_node)
    gradients = [gradient(comm.rank, step) for step in range(STEPS)]
    seen = {}
    for name, kind in REDUCERS.items():
        settings = {"density": DENSITY} if kind.sparse else {}
        reducer = make_reducer(name, topology, size=SIZE, **settings)
        before, again = _sent_by(card, comm)
        means, accounted = [], []
        for each in gradients:
            means.append(hashlib.sha256(reducer.reduce(each)).hexdigest())
            assert reducer.last is not None
            accounted.append(reducer.last.traffic.sent.inter)
        after, still_again = _sent_by(card, comm)
        seen[name] = {"means": means, "accounted": accounted}
        seen[name] |= {"card": after - before, "again": still_again - again}
    return seen


def _sent_by(card: Path | None, comm: Communicator) -> tuple[int, int]:
    comm.barrier()
    sent = (int(card.read_text()), _sent_again()) if card else (0, 0)
    comm.barrier()
    return sent


def _sent_again() -> int:
    """Return the bytes that TCP has sent a second time: on a busy machine it takes late ones for lost."""
    names, values = (line.split() for line in SEGMENTS.read_text().splitlines() if line.startswith("Tcp:"))
    return SEGMENT_BYTES * int(values[names.index("RetransSegs")])


if __name__ == "__main__":
    world = transport.mpi.world()
    everyone = world.allgather_objects({"host": world.host, "seen": reduce_all(world, card=CARD)})
    if world.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(everyone))
