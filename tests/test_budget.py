"""A reducer, a codec and a number of local steps for a budget of bytes."""

import pytest

from commlib import bytes_of_nodes
from commlib.reducers import REDUCERS
from commlib.tuning.tuner import SHORT_WIRES, choose_within

NODES = [range(4 * node, 4 * node + 4) for node in range(8)]
SIZE, DENSITY = 1_000_000, 0.01


def bytes_of_rank(reducer, nodes=NODES, **options):
    """Return what a rank of the busiest node sends in an exchange."""
    own = {"density": DENSITY, **options} if REDUCERS[reducer].sparse else {}
    sent = bytes_of_nodes(reducer, nodes, SIZE, **own)
    link = "inter" if len(nodes) > 1 else "intra"
    return max(getattr(each, link) / len(node) for each, node in zip(sent, nodes, strict=True))


def every_candidate(nodes=NODES):
    for name, reducer in REDUCERS.items():
        for wire in SHORT_WIRES if reducer.sparse else ("",):
            yield bytes_of_rank(name, nodes, **({"wire": wire} if wire else {}))


@pytest.mark.parametrize("nodes", [NODES, [range(6)]], ids=["8 nodes", "1 node"])
@pytest.mark.parametrize("bytes_per_step", [10, 300, 7_000, 100_000, 10**7])
def test_no_candidate_needs_fewer_local_steps_and_of_those_with_as_many_the_choice_sends_most(
    bytes_per_step, nodes
):
    choice = choose_within(bytes_per_step, nodes, SIZE, DENSITY)
    sent = bytes_of_rank(choice.reducer, nodes, **choice.options)
    assert sent <= choice.local_steps * bytes_per_step
    assert choice.local_steps == 1 or sent > (choice.local_steps - 1) * bytes_per_step
    for other in every_candidate(nodes):
        assert other > (choice.local_steps - 1) * bytes_per_step or choice.local_steps == 1
        assert other <= sent or other > choice.local_steps * bytes_per_step


def test_a_budget_with_room_for_all_entries_in_every_step_has_no_local_steps():
    choice = choose_within(10**9, NODES, SIZE, DENSITY)
    assert choice.local_steps == 1
    assert not REDUCERS[choice.reducer].sparse


def test_the_reason_names_choice_and_budget():
    choice = choose_within(1_000, NODES, SIZE, DENSITY)
    wire = choice.options["wire"]
    assert choice.reason.startswith(f"{choice.reducer} with {wire}: ")
    assert f"one every {choice.local_steps} steps" in choice.reason
    assert choice.reason.endswith("32 ranks on 8 nodes, at most 1 kB a step")
