"""Two loops that share a topology: their exchanges meet in the wrong order, and the message says so."""

import pytest

from commlib import RanksDisagree, Topology, make_reducer
from commlib.transport import simulated


def test_ranks_whose_loops_meet_in_the_wrong_order_are_told_what_happened_and_what_to_do():
    def body(comm):
        reducer = make_reducer("dense", Topology(comm), size=5)
        if comm.rank == 0:
            reducer.synchronize_step(True)
        else:  # as another loop does that is at the same step, and whose reducer has the same settings
            comm.allgather_ints([True, 0])
            comm.allgather_objects(reducer.settings() | {"step": 0})

    with pytest.raises(RanksDisagree, match="threads share a topology; give each loop a topology of its own"):
        simulated.run(body, 2)
