"""After warm-up a step makes no long array: residual, mean, sums and what is received lie in memory kept."""

import numpy as np
import pytest

from benchmarks.memory import Meter, MeteredCommunicator, traced
from commlib import REDUCERS, Topology, make_reducer
from commlib.transport import simulated
from tests.extent import more

SIZE = 1_000_000
SHARE = 0.05  # of a dense vector
WARM_UP, STEPS = 4, 2
WIRES = ("fp16", "gap", "gap+qsgd8")
CASES = {name: (name, {"density": 0.001} if reducer.sparse else {}) for name, reducer in REDUCERS.items()}
for _wire in WIRES:
    CASES[f"hitopk-{_wire}"] = ("hitopk", {"density": 0.001, "wire": _wire})
CASES["allgather-reused"] = ("allgather", {"density": 0.001, "selector": "reused"})


@pytest.fixture(scope="module")
def gradients():
    """Two of each rank, heavy tailed."""
    drawn = np.random.default_rng(1).standard_t(2, SIZE + 8).astype(np.float32)
    return lambda rank, step: np.ascontiguousarray(drawn[rank : rank + SIZE][:: 1 - 2 * (step % 2)])


@pytest.mark.parametrize("ranks_per_node", [2, *more(1, [3, 1])], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_step_allocates_less_than_a_twentieth_of_a_dense_vector(case, ranks_per_node, gradients):
    """What the transport allocates does not count: simulated ranks copy every message."""
    name, options = CASES[case]

    def body(comm):
        given = [gradients(comm.rank, step) for step in range(2)]
        meter = Meter()
        topology = Topology(MeteredCommunicator(comm, meter), ranks_per_node=ranks_per_node)
        reducer = make_reducer(name, topology, size=SIZE, **options)
        peaks = []
        for step in range(WARM_UP + STEPS):
            meter.restart()
            mean = reducer.reduce(given[step % 2])  # while the mean before is held
            with meter.pause():
                peaks.append(meter.peak)
        assert mean.any()
        return max(peaks[WARM_UP:])

    with traced():
        peaks = simulated.run(body, 4)
    assert max(peaks) < SHARE * 4 * SIZE
