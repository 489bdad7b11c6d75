"""Steps worked out by hand from the papers: what travels, what comes back, what each rank keeps.

Every number on the right side of an assertion follows from the comment above it. All values are small whole
numbers whose sums and quotients are exact in float32, so nothing here needs a tolerance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from commlib import LinkBytes, Topology, make_reducer
from commlib.transport import simulated
from tests.reducers.test_peers_defects import dense, non_zeros

Entries = Mapping[int, float]  # value by index; all the other entries are zero


@dataclass(frozen=True)
class Step:
    """What one step left behind: the mean and its entries as reported, by rank residual and bytes sent."""

    mean: dict[int, float]
    residuals: list[dict[int, float]]
    sent: list[LinkBytes]
    applied: int

    @property
    def sent_between_nodes(self) -> list[int]:
        assert not any(sent.intra for sent in self.sent)
        return [sent.inter for sent in self.sent]


def run(
    name: str,
    size: int,
    k: int,
    steps: Sequence[Sequence[Entries]],
    ranks_per_node: int | Sequence[int] = 1,
    shards: int = 1,
    **options,
) -> list[Step]:
    """Reduce ``steps[step][rank]``, with ``k`` entries selected of each of the ``shards``."""
    if name not in ("dense", "torus2d"):
        options["density"] = k * shards / size

    def body(comm):
        topology = Topology(comm, ranks_per_node=ranks_per_node)
        reducer = make_reducer(name, topology, size=size, **options)
        seen = []
        for gradients in steps:
            mean = reducer.reduce(dense(size, gradients[comm.rank]))
            report = reducer.last
            seen.append((non_zeros(mean), non_zeros(reducer.residual), report.traffic.sent, report.applied))
        return seen

    by_rank = simulated.run(body, len(steps[0]))
    results = []
    for seen in zip(*by_rank, strict=True):
        means, residuals, sent, applied = zip(*seen, strict=True)
        assert all(mean == means[0] for mean in means)
        assert len(set(applied)) == 1
        results.append(Step(means[0], list(residuals), list(sent), applied[0]))
    return results


# ------------------------------------------------------------- top-k all-gather


def test_allgather_adds_what_each_rank_selected_and_keeps_the_rest():
    # P = 3, k = 2. Selected: {4: 9, 7: −6}, {7: −6, 8: 3}, {4: 3, 11: 12}.
    # The sum is {4: 12, 7: −12, 8: 3, 11: 12}; each sends 2 entries of 8 bytes to 2 others.
    gradients = [{4: 9, 7: -6, 8: 2}, {7: -6, 8: 3, 0: 1}, {4: 3, 11: 12, 7: -2}]
    (step,) = run("allgather", 30, 2, [gradients])
    assert step.mean == {4: 4, 7: -4, 8: 1, 11: 4}
    assert step.residuals == [{8: 2}, {0: 1}, {7: -2}]
    assert step.sent_between_nodes == [32, 32, 32]


# ------------------------------------------------------------- gTop-k: a top-k at every merge

GTOPK_4 = [{0: 12, 3: 5, 5: 1}, {3: 6, 4: -7, 6: 2}, {0: -4, 2: 8, 7: 3}, {4: 6, 7: 10, 1: 1}]


def test_gtopk_on_four_ranks_merges_in_a_tree_and_who_merges_keeps_what_falls_out():
    # The Top-k operation of definition 1, in the tree of figure 3; k = 2.
    # Selected:        {0: 12, 3: 5}   {3: 6, 4: −7}   {0: −4, 2: 8}   {4: 6, 7: 10}
    # Left over:       {5: 1}          {6: 2}          {7: 3}          {1: 1}
    # Rank 0 adds 1's: {0: 12, 3: 11, 4: −7}          keeps {0: 12, 3: 11}, drops {4: −7}
    # Rank 2 adds 3's: {0: −4, 2: 8, 4: 6, 7: 10}     keeps {2: 8, 7: 10}, drops {0: −4, 4: 6}
    # Rank 0 adds 2's: {0: 12, 2: 8, 3: 11, 7: 10}    keeps {0: 12, 3: 11}, drops {2: 8, 7: 10}
    # Index 0 is in the result although −4 of it fell out in the other half of the tree: rank 2 keeps that.
    # The top-k of the whole sum (figure 1) would be {3: 11, 7: 10}: a tree of merges may miss it.
    (step,) = run("gtopk", 20, 2, [GTOPK_4])
    assert step.mean == {0: 3, 3: 2.75}
    assert step.residuals == [{2: 8, 4: -7, 5: 1, 7: 10}, {6: 2}, {0: -4, 4: 6, 7: 3}, {1: 1}]
    # 16 bytes a message. Up: 1 → 0, 3 → 2, 2 → 0. Down: 0 → 2, 0 → 1, 2 → 3.
    assert step.sent_between_nodes == [32, 16, 32, 16]


def test_gtopk_sends_in_the_next_step_what_the_merges_dropped():
    # Nothing new arrives. Selected from the residuals above, with a zero of lowest index where less is left:
    #                  {2: 8, 7: 10}   {0: 0, 6: 2}    {0: −4, 4: 6}   {0: 0, 1: 1}
    # Left over:       {4: −7, 5: 1}   {}              {7: 3}          {}
    # Rank 0 adds 1's: {0: 0, 2: 8, 6: 2, 7: 10}      keeps {2: 8, 7: 10}, drops {6: 2}
    # Rank 2 adds 3's: {0: −4, 1: 1, 4: 6}            keeps {0: −4, 4: 6}, drops {1: 1}
    # Rank 0 adds 2's: {0: −4, 2: 8, 4: 6, 7: 10}     keeps {2: 8, 7: 10}, drops {0: −4, 4: 6}
    _, step = run("gtopk", 20, 2, [GTOPK_4, [{}, {}, {}, {}]])
    assert step.mean == {2: 2, 7: 2.5}
    assert step.residuals == [{0: -4, 4: -7 + 6, 5: 1, 6: 2}, {}, {1: 1, 7: 3}, {}]


def test_gtopk_on_two_ranks_is_the_top_k_of_the_sum():
    # Figure 2: rank 1 sends, rank 0 adds {1: 4, 2: 6 − 2, 9: −8} and keeps the two largest, 1 before 2.
    (step,) = run("gtopk", 20, 2, [[{1: 4, 2: 6}, {2: -2, 9: -8}]])
    assert step.mean == {1: 2, 9: -4}
    assert step.residuals == [{2: 4}, {}]


def test_gtopk_on_three_ranks_lets_the_last_sit_out_the_first_round():
    # k = 1. Selected {1: 5}, {3: 4}, {5: −6}. Round 1: rank 0 adds {3: 4}, keeps {1: 5}; rank 2 has no
    # partner. Round 2: rank 0 adds {5: −6}, keeps it, drops {1: 5}.
    (step,) = run("gtopk", 20, 1, [[{0: 2, 1: 5}, {1: -3, 3: 4}, {3: 3, 5: -6}]])
    assert step.mean == {5: -2}
    assert step.residuals == [{0: 2, 1: 5, 3: 4}, {1: -3}, {3: 3}]
    assert step.sent_between_nodes == [16, 8, 8]


def test_gtopk_on_six_ranks_merges_over_a_gap():
    # k = 1, rank r holds {r: 6·(r + 1)}. Round 1: 0 ← 1, 2 ← 3, 4 ← 5: each keeps the later, larger one.
    # Round 2: 0 ← 2, and 4 has no partner. Round 3: 0 ← 4, which holds {5: 36}.
    (step,) = run("gtopk", 20, 1, [[{rank: 6 * (rank + 1)} for rank in range(6)]])
    assert step.mean == {5: 6}
    # Rank 0 drops its own 6, then rank 1's 12, then rank 3's 24.
    assert step.residuals == [{0: 6, 1: 12, 3: 24}, {}, {2: 18}, {}, {4: 30}, {}]
    assert step.sent_between_nodes == [3 * 8, 8, 16, 8, 16, 8]


# ------------------------------------------------------------- Ok-Topk: regions, thresholds, leftovers

# P = 4, k = 4; the last entry of each rank is not selected.
OKTOPK_4 = [
    {0: 8, 40: 3, 90: -5, 122: 2, 60: 1},
    {10: 2, 40: 4, 80: 6, 138: -3, 155: 1},
    {0: -7, 50: 5, 90: -4, 140: 2, 80: -1},
    {20: 3, 70: 9, 100: 4, 150: -6, 40: 1},
]
# Each rank would have the regions begin at its second, third and fourth index:
#   (40, 90, 122)   (40, 80, 138)   (50, 90, 140)   (70, 100, 150)
# The means, rounded down, are 200/4 = 50, 360/4 = 90 and 550/4 = 137: regions 0–49, 50–89, 90–136, 137–159.
# Sums by region:
#   {0: 1, 10: 2, 20: 3, 40: 7}     {50: 5, 70: 9, 80: 6}
#   {90: −9, 100: 4, 122: 2}        {138: −3, 140: 2, 150: −6}
# The fourth largest magnitude is 6, at 80 and at 150: of ties, the lowest index. Applied: 40, 70, 80, 90.
OKTOPK_4_RESIDUALS = {
    "sender": [
        {0: 8, 122: 2, 60: 1},  # 40 and 90 were applied
        {10: 2, 138: -3, 155: 1},  # 40 and 80
        {0: -7, 50: 5, 140: 2, 80: -1},  # 90; it holds 80 as well but did not send it
        {20: 3, 100: 4, 150: -6, 40: 1},  # 70
    ],
    # What was not selected stays where it is; sums that are not applied join it in the owner of their region.
    "owner": [
        {60: 1} | {0: 1, 10: 2, 20: 3},
        {155: 1} | {50: 5},
        {80: -1} | {100: 4, 122: 2},
        {40: 1} | {138: -3, 140: 2, 150: -6},
    ],
}


@pytest.mark.parametrize("leftovers", OKTOPK_4_RESIDUALS)
def test_oktopk_on_four_ranks_leaves_what_is_not_applied_with_senders_or_with_owners(leftovers):
    (step,) = run("oktopk", 160, 4, [OKTOPK_4], leftovers=leftovers)
    assert step.mean == {40: 1.75, 70: 2.25, 80: 1.5, 90: -2.25}
    assert step.residuals == OKTOPK_4_RESIDUALS[leftovers]
    # To the owners, 8 bytes an entry: rank 0 sends 90 and 122; rank 1 10, 40 and 138; rank 2 0, 50 and 140;
    # rank 3 20, 70 and 100. The magnitudes of all regions (4, 3, 3, 3; 4 bytes each) go round, since the
    # threshold is due; then what is applied of them (1, 2, 1, 0; 8 bytes each). A rank hands on all but what
    # its right neighbour began with.
    split, magnitudes, applied = [2, 3, 3, 3], [4, 3, 3, 3], [1, 2, 1, 0]
    assert step.sent_between_nodes == [
        8 * split[rank] + 4 * (13 - magnitudes[right]) + 8 * (4 - applied[right])
        for rank, right in enumerate([1, 2, 3, 0])
    ]


# P = 3, k = 3; the last entry of each rank is not selected.
OKTOPK_3 = [{3: 18, 30: -12, 60: 6, 70: 3}, {10: 15, 33: 12, 61: -9, 3: 6}, {9: 21, 36: -6, 80: 24, 50: 3}]
# Regions begin at (30 + 33 + 36)/3 = 33 and (60 + 61 + 80)/3 = 67. Sums:
#   {3: 18, 9: 21, 10: 15, 30: −12}   {33: 12, 36: −6, 60: 6, 61: −9}   {80: 24}
# Applied: 3, 9 and 80. The global threshold is 18; the local ones are 6, 9 and 6.


@pytest.mark.parametrize(
    ("leftovers", "residuals"),
    [
        ("sender", [{30: -12, 60: 6, 70: 3}, {3: 6, 10: 15, 33: 12, 61: -9}, {36: -6, 50: 3}]),
        ("owner", [{70: 3, 10: 15, 30: -12}, {3: 6, 33: 12, 36: -6, 60: 6, 61: -9}, {50: 3}]),
    ],
)
def test_oktopk_on_three_ranks(leftovers, residuals):
    (step,) = run("oktopk", 90, 3, [OKTOPK_3], leftovers=leftovers)
    assert step.mean == {3: 6, 9: 7, 80: 8}
    assert step.residuals == residuals


def test_oktopk_reuses_regions_and_thresholds_in_the_second_step():
    # What is accumulated, with the residual of the first step:
    #   {5: 6, 30: −15, 60: 6, 70: 3}   {3: 6, 10: 15, 20: 9, 30: −6, 33: 12, 61: −9}
    #   {10: 3, 36: −18, 50: 3, 88: 30}
    # Selected by the thresholds 6, 9, 6: three, four and two entries, all between k/2 and 2k:
    #   5, 30, 60    10, 20, 33, 61    36, 88
    # Sums: {5: 6, 10: 15, 20: 9, 30: −15}   {33: 12, 36: −18, 60: 6, 61: −9}   {88: 30}
    # Two of them reach 18, and that is above k/2: the threshold stays, and two are applied.
    later = [{5: 6, 30: -3}, {20: 9, 30: -6}, {10: 3, 36: -12, 88: 30}]
    _, step = run("oktopk", 90, 3, [OKTOPK_3, later])
    assert step.mean == {36: -6, 88: 10}
    assert step.residuals == [
        {5: 6, 30: -15, 60: 6, 70: 3},
        {3: 6, 10: 15, 20: 9, 30: -6, 33: 12, 61: -9},
        {10: 3, 50: 3},
    ]
    # No magnitudes travel. Rank 0 sends 60; rank 1 10, 20; rank 2 36. Applied: 0, 1 and 1; what is passed on
    # is all but the right neighbour's.
    assert step.sent_between_nodes == [8 * 1 + 8 * (0 + 1), 8 * 2 + 8 * (0 + 1), 8 * 1 + 8 * (1 + 1)]


def test_oktopk_finds_the_global_threshold_anew_when_more_than_twice_k_reach_it():
    # k = 1. First both send {4: 2}: the local thresholds are 2, the global one is 4. Then both send two
    # entries, as many as the local thresholds may let through, and all four sums are above 4: exact again.
    steps = [[{4: 2}, {4: 2}], [{5: 10, 15: 8}, {25: 7, 35: 6}]]
    first, second = run("oktopk", 40, 1, steps)
    assert (first.mean, first.residuals) == ({4: 2}, [{}, {}])
    assert second.mean == {5: 5}
    assert second.residuals == [{15: 8}, {25: 7, 35: 6}]


def test_oktopk_with_fewer_entries_than_ranks_has_empty_regions():
    # k = 1: each rank has all regions begin at its only index. The mean of 10, 20, 30, 40 is 25: rank 0 owns
    # 0–24, rank 3 owns 25–99, ranks 1 and 2 own nothing. The largest sum is 16 at 30.
    gradients = [{10: 4}, {20: 8}, {30: 16}, {40: -12}]
    (step,) = run("oktopk", 100, 1, [gradients], leftovers="owner")
    assert step.mean == {30: 4}
    assert step.residuals == [{10: 4, 20: 8}, {}, {}, {40: -12}]
    # Rank 1 sends 20 to rank 0, rank 2 sends 30 to rank 3. Two magnitudes each of ranks 0 and 3 go round, and
    # the entry of rank 3; neither is handed to where it comes from.
    assert step.sent_between_nodes == [8 + 8 + 8, 8 + 8 + 8 + 8, 8 + 8, 8 + 8]


# ------------------------------------------------------------- SparCML: recursive doubling

DOUBLING_4 = [{3: 4, 10: 8, 50: 1}, {3: 20, 20: 16, 10: 3}, {10: -8, 20: 24, 3: -2}, {10: 16, 40: 32, 60: 1}]


def test_ssar_doubling_on_four_ranks_adds_up_what_overlaps():
    # k = 2. Round 1: ranks 0 and 1 hold {3: 24, 10: 8, 20: 16}, ranks 2 and 3 {10: 8, 20: 24, 40: 32}.
    # Round 2: {3: 24, 10: 16, 20: 40, 40: 32}. Two entries sent, then three.
    (step,) = run("ssar_doubling", 64, 2, [DOUBLING_4])
    assert step.mean == {3: 6, 10: 4, 20: 10, 40: 8}
    assert step.residuals == [{50: 1}, {10: 3}, {3: -2}, {60: 1}]
    assert step.sent_between_nodes == [8 * 2 + 8 * 3] * 4


def test_ssar_doubling_on_three_ranks_folds_the_third_into_the_first():
    # Rank 2 hands {9: −3, 50: 9} to rank 0, which then holds {0: 3, 9: 3, 50: 9}; rank 1 adds {9: 6, 30: 3}.
    # Rank 0 sends three entries to rank 1 and the result, four entries, to rank 2.
    (step,) = run("ssar_doubling", 60, 2, [[{0: 3, 9: 6}, {9: 6, 30: 3}, {9: -3, 50: 9}]])
    assert step.mean == {0: 1, 9: 3, 30: 1, 50: 3}
    assert step.residuals == [{}, {}, {}]
    assert step.sent_between_nodes == [8 * 3 + 8 * 4, 8 * 2, 8 * 2]


def test_ssar_doubling_sends_k_entries_a_round_where_all_ranks_hold_the_same():
    # the lower bound of section 5.3.1: k·log₂ P = 3 · 3 entries
    (step,) = run("ssar_doubling", 1000, 3, [[{7: 1, 70: 2, 700: 3}] * 8])
    assert step.mean == {7: 1, 70: 2, 700: 3}
    assert step.sent_between_nodes == [8 * 3 * 3] * 8


def test_ssar_doubling_doubles_the_entries_a_round_where_no_rank_holds_the_same():
    # the upper bound: k·(P − 1) = 3 · 7 entries
    gradients = [{100 * rank + place: 8 for place in range(3)} for rank in range(8)]
    (step,) = run("ssar_doubling", 1000, 3, [gradients])
    assert step.mean == {100 * rank + place: 1 for rank in range(8) for place in range(3)}
    assert step.sent_between_nodes == [8 * 3 * 7] * 8


def test_ssar_doubling_turns_dense_when_the_entries_of_both_partners_reach_delta():
    # d = 16, so δ = 8 entries. Rank r holds 8·(r + 1) at r, r + 4 and r + 8.
    # Round 1: 3 entries sent; 3 + 3 stay sparse. Round 2: 6 entries sent; 6 + 6 are past δ. Round 3: all 16
    # values of 4 bytes, where the 12 entries of each half would take 96 bytes.
    gradients = [dict.fromkeys((rank, rank + 4, rank + 8), 8 * (rank + 1)) for rank in range(8)]
    (step,) = run("ssar_doubling", 16, 3, [gradients])
    # index i is held by ranks i, i − 4 and i − 8, as far as there are such: 6 = 5 + 1 at 4, and so on
    assert list(step.mean.values()) == [1, 2, 3, 4, 6, 8, 10, 12, 6, 8, 10, 12, 5, 6, 7, 8]
    assert step.sent_between_nodes == [8 * 3 + 8 * 6 + 4 * 16] * 8


def test_ssar_doubling_bounds_the_union_by_the_sum_of_both_counts():
    # d = 16, δ = 8 (section 5.1: the union is not counted, |H1| + |H2| bounds it). Four ranks hold the same 5
    # entries: 5 + 5 count as past δ although there are only 5 in all, and round 2 sends 16 values.
    (step,) = run("ssar_doubling", 16, 5, [[{1: 4, 3: 8, 5: -4, 7: 16, 15: 4}] * 4])
    assert step.mean == {1: 4, 3: 8, 5: -4, 7: 16, 15: 4}
    assert step.sent_between_nodes == [8 * 5 + 4 * 16] * 4


# ------------------------------------------------------------- SparCML: split, then all-gather

# P = 3, k = 3, d = 30: ranges 0–9, 10–19, 20–29. The last entry of each rank is not selected.
SPLIT_3 = [{2: 9, 11: 6, 25: -3, 7: 1}, {2: 3, 5: 6, 28: 3, 11: 2}, {11: -3, 14: 12, 25: 3, 0: -1}]
# Sums: {2: 12, 5: 6}   {11: 3, 14: 12}   {25: 0, 28: 3}.
SPLIT_3_MEAN = {2: 4, 5: 2, 11: 1, 14: 4, 28: 1}
SPLIT_3_RESIDUALS = [{7: 1}, {11: 2}, {0: -1}]
# To the owners: rank 0 sends 11 and 25; rank 1 2, 5 and 28; rank 2 11 and 14 (25 is its own).
SPLIT_3_SENT = [8 * 2, 8 * 3, 8 * 2]


@pytest.mark.parametrize(
    ("name", "gathered"),
    [
        ("ssar_split", 2 * 8 * 2),  # two sums each go to two others as entries; the 0 at 25 is one too
        ("dsar_split", 2 * 4 * 10),  # ten values each go to two others
    ],
)
def test_split_reducers_on_three_ranks_gather_the_sums_as_entries_or_as_dense_ranges(name, gathered):
    (step,) = run(name, 30, 3, [SPLIT_3])
    assert step.mean == SPLIT_3_MEAN
    assert step.residuals == SPLIT_3_RESIDUALS
    assert step.sent_between_nodes == [split + gathered for split in SPLIT_3_SENT]


def test_ssar_split_on_ranges_that_are_not_equally_long():
    # d = 10 over three ranks: 0–2, 3–5, 6–9. A range of 3 is dense from δ = 1.5 entries on, one of 4 from 2.
    # k = 2. Sums: {0: 6, 2: 3} dense, {5: 3} sparse, {6: 3, 9: 9} dense.
    (step,) = run("ssar_split", 10, 2, [[{0: 6, 9: 3}, {2: 3, 9: 6}, {5: 3, 6: 3}]])
    assert step.mean == {0: 2, 2: 1, 5: 1, 6: 1, 9: 3}
    assert step.residuals == [{}, {}, {}]
    # Rank 0 sends 9; rank 1 sends 2 and 9; rank 2 sends 5. Three values, one entry and four values go round,
    # and a rank hands on all but the right neighbour's.
    assert step.sent_between_nodes == [8 + (12 + 16), 16 + (12 + 8), 8 + (8 + 16)]


# ------------------------------------------------------------- HiTopKComm

# Two nodes of two ranks (figure 3), d = 16: shards 0–7 and 8–15, k = 1 of each.
HITOPK_2X2 = [
    {0: 1, 1: 2, 8: 5},
    {0: 3, 1: -1, 3: 6, 10: -2, 11: 8},
    {2: 7, 3: 2, 8: 1, 9: 1},
    {3: 8, 8: -10, 11: 3},
]
# Node 0 adds up {0: 4, 1: 1, 3: 6 | 8: 5, 10: −2, 11: 8}, node 1 {2: 7, 3: 10 | 8: −9, 9: 1, 11: 3}.
# Selected: rank 0 {3: 6}, rank 1 {11: 8}, rank 2 {3: 10}, rank 3 {8: −9}.


def test_hitopk_on_two_nodes_of_two_ranks():
    # Stream 0 (ranks 0 and 2) adds up {3: 16}, stream 1 (ranks 1 and 3) {8: −9, 11: 8}.
    (step,) = run("hitopk", 16, 1, [HITOPK_2X2], ranks_per_node=2, shards=2)
    assert step.mean == {3: 4, 8: -2.25, 11: 2}
    assert step.applied == 3
    # What a node added up and did not select stays with the owner of the shard.
    assert step.residuals == [{0: 4, 1: 1}, {8: 5, 10: -2}, {2: 7}, {9: 1, 11: 3}]
    # Inside: 8 values of the other's shard, then the sums of the own shard. Between: one entry.
    entry = LinkBytes(inter=8)
    assert step.sent == [LinkBytes(intra=4 * 8 + 8 * sums) + entry for sums in (1, 2, 1, 2)]


def test_hitopk_adds_the_residual_of_the_shard_to_the_nodes_next_sum():
    # Node 0: {0: 4 + 3 + 3, 1: 1}, node 1: {2: 7, 0: 2}: index 0 is sent once the node's sum is large enough.
    later = [{0: 3}, {0: 3}, {0: 2}, {}]
    _, step = run("hitopk", 16, 1, [HITOPK_2X2, later], ranks_per_node=2, shards=2)
    # Stream 0: {0: 10} and {2: 7}. Stream 1: {8: 5} of rank 1 and {11: 3} of rank 3.
    assert step.mean == {0: 2.5, 2: 1.75, 8: 1.25, 11: 0.75}
    assert step.residuals == [{1: 1}, {10: -2}, {0: 2}, {9: 1}]


def test_hitopk_skips_a_step_where_one_shard_of_the_sum_is_infinite():
    def body(comm):
        reducer = make_reducer("hitopk", Topology(comm, ranks_per_node=2), size=16, density=0.25)
        # Each node's sum of the first shard is finite, that of both nodes is not; the second shard is zero.
        reducer.reduce(dense(16, {3: 3e38} if comm.rank % 2 else {}))
        return reducer.last.finite, bool(reducer.residual.any())

    assert simulated.run(body, 4) == [(False, False)] * 4


def test_hitopk_on_uneven_nodes_has_as_many_shards_as_the_smallest_node():
    # Nodes of two ranks and one: a single shard. Node 0 adds up {1: 6, 4: −9}, node 1 holds {0: 3, 5: 6}.
    # Rank 1 contributes and owns nothing.
    gradients = [{1: 3}, {1: 3, 4: -9}, {0: 3, 5: 6}]
    (step,) = run("hitopk", 12, 1, [gradients], ranks_per_node=[2, 1])
    assert step.mean == {4: -3, 5: 2}
    assert step.residuals == [{1: 6}, {}, {0: 3}]
    # Rank 0 hands the two sums to rank 1, which has sent it 12 values.
    assert step.sent == [LinkBytes(intra=16, inter=8), LinkBytes(intra=48), LinkBytes(inter=8)]


@pytest.mark.parametrize(
    ("leftovers", "residuals"),
    [
        # 11 stays with rank 1, which sent it.
        ("sender", [{0: 4, 1: 1}, {8: 5, 10: -2, 11: 8}, {2: 7}, {9: 1, 11: 3}]),
        # The regions of stream 1 begin at 9, the mean of 11 and 8: rank 3 owns 9–15, and the sum at 11.
        ("owner", [{0: 4, 1: 1}, {8: 5, 10: -2}, {2: 7}, {9: 1, 11: 3 + 8}]),
    ],
)
def test_hioktopk_keeps_one_of_each_shard_where_hitopk_keeps_one_a_node(leftovers, residuals):
    # Sums as in hitopk; the largest of stream 0 is {3: 16}, of stream 1 {8: −9}.
    options = {"ranks_per_node": 2, "shards": 2, "leftovers": leftovers}
    (step,) = run("hioktopk", 16, 1, [HITOPK_2X2], **options)
    assert step.mean == {3: 4, 8: -2.25}
    assert step.residuals == residuals


# ------------------------------------------------------------- dense


def test_dense_on_three_ranks_hands_every_part_round_twice():
    # d = 7: parts of 2, 2 and 3 values. Rank r sends the parts r − 1, r − 2, then r, r − 1.
    gradients = [dict(enumerate(range(0, 21, 3))), {0: 3, 6: -3}, {6: 3}]
    (step,) = run("dense", 7, 7, [gradients])
    assert step.mean == {0: 1, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6}
    assert step.residuals == [{}, {}, {}]
    lengths = [2, 2, 3]
    parts = [(2, 1, 0, 2), (0, 2, 1, 0), (1, 0, 2, 1)]
    assert step.sent_between_nodes == [4 * sum(lengths[part] for part in of_rank) for of_rank in parts]


def test_torus2d_on_two_nodes_of_two_ranks_sends_half_of_each_half_between_nodes():
    # d = 8: shards of 4, slices of 2. Inside: 4 values of the other's shard, then the 4 of the own. Between:
    # a slice to add up and a slice of the result.
    (step,) = run("torus2d", 8, 8, [[{rank: 4, 7: 4 * rank} for rank in range(4)]], ranks_per_node=2)
    assert step.mean == {0: 1, 1: 1, 2: 1, 3: 1, 7: 6}
    assert step.sent == [LinkBytes(intra=4 * (4 + 4), inter=4 * (2 + 2))] * 4
