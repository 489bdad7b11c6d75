"""Rounds of local steps on quadratic losses, by every reducer, and Streaming DiLoCo's.

Its fragments leave in turns, and replicas go on while exchanges are under way.
"""

import math
from itertools import pairwise

import keras
import numpy as np
import pytest

from benchmarks.shapes import SHAPES
from commlib import InvalidArgument
from commlib.exchange import pieces_of
from commlib.rounds import Schedule, fragment_bounds
from commlib.topology import LinkBytes
from tests.extent import more
from tests.training.streamed import (
    CASES,
    DILOCO,
    OPTIONS,
    SIZE,
    START,
    Course,
    assert_nothing_is_lost,
    on_ranks,
    transcribed,
)
from training.config.records import Outer
from training.models import MODELS
from training.run.local_steps import FlatVariables

VARIABLES = [(7,), (), (5, 4), (2, 3, 2), (3,), (17,)]


def course(schedule, steps, outer):
    return Course(schedule, steps, outer, fragment_bounds(VARIABLES, schedule.fragments))


def drawn(seed):
    """Return a schedule, a number of steps and an outer optimizer."""
    random = np.random.default_rng(seed)
    fragments, interval = int(random.integers(1, len(VARIABLES) + 1)), int(random.integers(1, 5))
    delay = int(random.integers(0, interval))
    outer = Outer(
        rate=float(random.choice([0.5, 1.0])),
        momentum=float(random.choice([0.0, 0.9])),
        fragments=fragments,
        delay=delay,
        update="eager" if delay and random.integers(2) else "mixed",
    )
    schedule = Schedule(fragments * interval, fragments, delay)
    return schedule, int(random.integers(1, 3 * schedule.steps + 2)), outer


ROUNDS = 5
OUTER = (Outer(), Outer(**DILOCO), Outer(rate=0.5, momentum=0.8))
SCHEDULES = [
    *((Schedule(steps), ROUNDS * steps, outer) for steps in (1, 4, 30) for outer in OUTER),
    (Schedule(6, 2, 0), 20, Outer(fragments=2, **DILOCO)),
    (Schedule(6, 3, 1), 25, Outer(fragments=3, delay=1, **DILOCO)),
    (Schedule(5, 1, 4), 23, Outer(delay=4, mixing=0.8)),
    (Schedule(8, 4, 1), 24, Outer(fragments=4, delay=1, mixing=0.0, rate=0.7)),
    (Schedule(8, 4, 1), 25, Outer(fragments=4, delay=1, update="eager", **DILOCO)),
    *(drawn(seed) for seed in range(12)),
    *more(*(drawn(seed) for seed in range(12, 100))),
]


@pytest.mark.parametrize(("schedule", "steps", "outer"), SCHEDULES)
def test_weights_are_those_of_the_algorithm_written_down_in_float64(schedule, steps, outer):
    seen = on_ranks(3, course(schedule, steps, outer))
    expected, _ = transcribed(3, course(schedule, steps, outer))
    found = np.array([rank.weights for rank in seen]).swapaxes(0, 1)
    # float32 rounding of some tens of steps, which momentum adds up
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
    assert len({rank.weights[-1].tobytes() for rank in seen}) == 1
    if steps > schedule.steps and schedule.delay and outer.own_share:
        assert len({rank.weights[schedule.interval + schedule.delay - 1].tobytes() for rank in seen}) == 3


def rounds(ranks, steps, case="dense", outer=None, **others):
    """Return what each rank sees in rounds of so many steps; weights and reports are those of their ends."""
    given = course(Schedule(steps), ROUNDS * steps, outer or Outer())
    found = on_ranks(ranks, given, CASES[case], **others)
    for rank in found:
        rank.weights, rank.reports = rank.weights[steps - 1 :: steps], rank.reports[steps - 1 :: steps]
    return found


@pytest.mark.parametrize("world_size", [1, 4, *more(2, 3, 5)])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_common_weights_agree_to_the_bit_and_no_difference_is_lost(case, steps, world_size):
    seen = rounds(world_size, steps, case)
    for number in range(ROUNDS):
        assert len({rank.weights[number].tobytes() for rank in seen}) == 1
    tolerance = 1e-4
    if "decay" not in CASES[case][1]:
        assert_nothing_is_lost(seen, tolerance)
        return
    # of what is forgotten the sum is known
    forgotten = sum(report.forgotten.sum for rank in seen for report in rank.reports)
    kept = world_size * (START.astype(np.float64) - seen[0].weights[-1]) + sum(rank.residual for rank in seen)
    given = np.sum([rank.differences for rank in seen], dtype=np.float64)
    assert kept.sum() + forgotten == pytest.approx(given, abs=SIZE * tolerance)
    assert (forgotten != 0) == (world_size > 1)


@pytest.mark.parametrize("case", [*OPTIONS, "sparseloco"])
def test_the_round_of_a_rank_that_failed_is_skipped_on_all_ranks(case):
    seen = rounds(4, 4, case, Outer(**DILOCO), failed=(2, 5))  # the first step of the second round
    assert [[report.finite for report in rank.reports] for rank in seen] == [
        [True, False, True, True, True]
    ] * 4
    for rank in seen:
        assert rank.weights[1].tobytes() == rank.weights[0].tobytes() == seen[0].weights[0].tobytes()
        assert rank.weights[2].tobytes() == seen[0].weights[2].tobytes() != rank.weights[1].tobytes()
        # the same local steps from the same weights: nothing of the skipped round is left anywhere
        if rank is not seen[2]:
            assert rank.differences[2].tobytes() == rank.differences[1].tobytes()


@pytest.mark.parametrize("case", [each for each in CASES if "decay" not in CASES[each][1]])
def test_no_difference_is_lost_of_fragments(case):
    seen = on_ranks(3, course(Schedule(8, 4, 1), 27, Outer(fragments=4, delay=1)), CASES[case])
    assert len({rank.weights[-1].tobytes() for rank in seen}) == 1
    assert_nothing_is_lost(seen)


@pytest.mark.parametrize("case", ["dense", "hitopk", "oktopk", "sparseloco"])
@pytest.mark.parametrize("limit", [None, 2.5])
@pytest.mark.parametrize("seed", [0, 1, 5, *more(*range(20, 40))])
def test_a_thread_gives_the_bits_of_the_same_run_without_one(case, seed, limit):
    given, random = course(*drawn(seed)), np.random.default_rng(seed)
    given.limit, given.seconds = limit, random.uniform(0.2, 1.5, (3, given.steps))
    given.samples = random.integers(1, 9, (3, given.steps))
    runs = [on_ranks(3, given, CASES[case], overlap=each) for each in (False, True)]
    assert [rank.threads for run in runs for rank in run] == [False] * 3 + [True] * 3
    for plain, overlapped in zip(*runs, strict=True):
        assert np.array(plain.weights).tobytes() == np.array(overlapped.weights).tobytes()
        assert plain.residual.tobytes() == overlapped.residual.tobytes()
        pairs = zip(plain.reports, overlapped.reports, strict=True)
        assert all((a and a.traffic) == (b and b.traffic) for a, b in pairs)


def test_each_exchange_has_the_bytes_of_its_fragment():
    seen = on_ranks(2, course(Schedule(6, 3, 1), 12, Outer(fragments=3, delay=1)))[0]
    sent = [LinkBytes() if each is None else each.traffic.sent for each in seen.reports]
    bounds = fragment_bounds(VARIABLES, 3)
    sizes = [high - low for low, high in pairwise(bounds)]
    # two ranks of a node send half of a fragment each way: 2·4·d/2 bytes
    expected = {3: sizes[1], 5: sizes[2], 7: sizes[0], 9: sizes[1], 11: sizes[2], 12: SIZE}
    assert sum(sizes) == SIZE
    for step, own in enumerate(sent, 1):
        assert abs(own.intra - 4 * expected.get(step, 0)) <= 4, step  # odd sizes are halved unevenly


@pytest.mark.parametrize("outer", [Outer(), Outer(update="eager", delay=1)], ids=["mixed", "eager"])
@pytest.mark.parametrize("failing", [9, 10, 11])  # leaving step 10 arrives after step 11
def test_where_a_rank_fails_all_ranks_go_back_to_the_common_weights(outer, failing):
    schedule, case = Schedule(10, 2, 1), ("hitopk", {"density": 0.2})
    outer = outer.model_copy(update={"delay": 1, "fragments": 2, "rate": 0.7, "momentum": 0.9})
    seen = on_ranks(3, course(schedule, 16, outer), case, failed=(2, failing))
    at = 11 if failing <= 10 else 16  # a fragment that has left already arrives, and only the next is skipped
    for rank in seen:
        finite = {step: each.finite for step, each in enumerate(rank.reports, 1) if each is not None}
        assert finite == {6: True, 11: at != 11, 16: at != 16}
        assert rank.weights[at - 1].tobytes() == seen[0].weights[at - 1].tobytes()
        assert np.isfinite(rank.weights[-1]).all()
    if at == 11:  # the first fragment has not been exchanged; the second has, after step 5
        theta = seen[0].weights[10]
        first = fragment_bounds(VARIABLES, 2)[1]
        assert theta[:first].tobytes() == START[:first].tobytes()
        assert (theta[first:] != START[first:]).any()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((10, 3, 0), "^fragments: expected a divisor of the 10 local steps, got 3$"),
        ((12, 3, 4), "^delay: expected fewer steps than the 4 from one fragment's .*, got 4$"),
    ],
)
def test_a_schedule_that_does_not_fit_its_steps_is_refused(given, expected):
    with pytest.raises(InvalidArgument, match=expected):
        Schedule(*given)


def drawn_shapes(seed):
    random = np.random.default_rng(seed)
    return [
        tuple(random.integers(1, 20, random.integers(0, 4)).tolist()) for _ in range(random.integers(1, 30))
    ]


def test_a_part_of_the_weights_is_read_and_written_in_the_middle_of_variables():
    variables = [keras.Variable(np.full(shape, 1.0, np.float32)) for shape in [(3, 2), (), (4,)]]
    weights = FlatVariables(variables, np)
    expected = np.ones(11, np.float32)
    expected[4:9] = written = np.arange(2, 7, dtype=np.float32)
    weights.write(written, slice(4, 9))
    read = weights.read(slice(3, 10))
    written[...] = 0  # what was written is a copy
    weights.write(np.ones(2, np.float32), slice(0, 2))
    np.testing.assert_array_equal(weights.read(), expected)
    np.testing.assert_array_equal(read, expected[3:10])
    assert [variable.shape for variable in variables] == [(3, 2), (), (4,)]


@pytest.mark.parametrize("seed", range(20))
def test_fragments_differ_by_a_row_at_most_and_none_is_empty(seed):
    shapes = drawn_shapes(seed)
    size = sum(map(math.prod, shapes))
    for fragments in {1, min(4, len(shapes)), len(shapes)}:
        bounds = fragment_bounds(shapes, fragments)
        assert (bounds[0], bounds[-1], len(bounds)) == (0, size, fragments + 1)
        assert all(low < high for low, high in pairwise(bounds))
        largest = max(high - low for low, high in pairwise(bounds))
        row = max(math.prod(shape[1:]) for shape in shapes)
        assert largest <= size / fragments + row
    with pytest.raises(InvalidArgument, match=f"^fragments: expected at most the {len(shapes)} variables"):
        fragment_bounds(shapes, len(shapes) + 1)


@pytest.mark.parametrize("seed", range(20))
def test_pieces_between_fragments_are_rows_of_the_variables_in_order(seed):
    shapes = drawn_shapes(seed)
    ends = np.cumsum([0, *map(math.prod, shapes)])
    values = np.arange(ends[-1])
    variables = [
        values[low:high].reshape(shape) for shape, (low, high) in zip(shapes, pairwise(ends), strict=True)
    ]
    cuts = {
        each for count in (1, min(3, len(shapes)), len(shapes)) for each in fragment_bounds(shapes, count)
    }
    pieces = pieces_of(shapes, cuts)
    found = [
        variables[each.variable] if each.shape == () else variables[each.variable][each.rows]
        for each in pieces
    ]
    assert [each.shape for each in found] == [each.shape for each in pieces]
    assert [each.size for each in found] == [each.size for each in pieces]
    np.testing.assert_array_equal(np.concatenate([each.reshape(-1) for each in found]), values)
    assert cuts <= {each.start for each in pieces} | {ends[-1]}
    assert len(pieces) <= len(shapes) + len(cuts) - 2
    assert [found[number].reshape(-1)[0] for number in range(len(found))] == [each.start for each in pieces]


def gpt_small():
    with keras.StatelessScope(initialize_variables=False):
        model = MODELS["gpt_small"](8000)
    keras.utils.clear_session()  # forgets the variables that wait for values
    return [tuple(variable.shape) for variable in model.trainable_variables]


@pytest.mark.parametrize("shapes_of", [gpt_small, *SHAPES.values()], ids=lambda each: each.__name__)
def test_fragments_of_usual_models_are_of_about_equal_size(shapes_of):
    """Also where one variable has more entries than a fragment: 39 % of gpt_small, 72 % of VGG-19."""
    shapes = shapes_of()
    size = sum(map(math.prod, shapes))
    assert shapes_of is not gpt_small or max(map(math.prod, shapes)) > 0.38 * size
    for fragments in (2, 3, 4):  # a row of ResNet's last kernels is a tenth of a fifth
        largest = max(high - low for low, high in pairwise(fragment_bounds(shapes, fragments)))
        assert largest < 1.03 * size / fragments
