"""Rounds in which replicas take different numbers of steps: who stops when, and what differences weigh."""

from functools import partial

import numpy as np
import pytest

from commlib import Topology
from commlib.exchange import BucketExchange
from commlib.reducers.report import Stopwatch
from commlib.rounds import Pace, Schedule
from commlib.transport import simulated
from tests.extent import more
from tests.launching import DIGITS
from tests.training.refusal import invoke
from tests.training.replicas import (
    batch_of,
    check_same,
    config_of,
    flat,
    pace,
    replica_of,
    resumed,
    saved,
    state_of,
    take,
)
from tests.training.small import assert_same_weights, crash_after, phase, records_of, trainer
from tests.training.small import on_ranks as run_on_ranks
from tests.training.streamed import CASES, DILOCO, Course, assert_nothing_is_lost, on_ranks, transcribed
from tests.training.test_stages import Clock
from training.config.config import load_with_warnings
from training.config.records import Outer
from training.results import LoopSeconds

BUCKETS = [9, 11, 16, 4, 20]  # of which each fragment has some
BOUNDS = {1: [0, 60], 2: [0, 36, 60], 3: [0, 20, 40, 60]}
SECONDS = 2.5


def course(seed, schedule, steps, outer):
    """Return what three ranks do, of which each is twice as fast or slow as another."""
    random = np.random.default_rng(seed)
    seconds = random.uniform(0.2, 1.5, (3, steps)) * [[1], [2], [0.5]]
    samples, bounds = random.integers(1, 9, (3, steps)), BOUNDS[schedule.fragments]
    return Course(schedule, steps, outer, bounds, BUCKETS, seconds, samples, SECONDS)


SCHEDULES = [
    (Schedule(6), 20, Outer()),
    (Schedule(6), 19, Outer(**DILOCO)),
    (Schedule(8, 2), 21, Outer(fragments=2)),
    (Schedule(12, 3, 2), 31, Outer(fragments=3, delay=2, **DILOCO)),
    (Schedule(12, 3, 1), 30, Outer(fragments=3, delay=1, update="eager", rate=0.7)),
]


@pytest.mark.parametrize(("schedule", "steps", "outer"), SCHEDULES)
@pytest.mark.parametrize("seed", [0, *more(*range(1, 8))])
def test_weights_are_those_of_the_formulas_in_float64(schedule, steps, outer, seed):
    seen = on_ranks(3, course(seed, schedule, steps, outer))
    expected, taken = transcribed(3, course(seed, schedule, steps, outer))
    assert np.array([rank.taken for rank in seen]).T.tolist() == taken.tolist()
    assert taken.any(axis=0).all()
    assert not taken[:, 1].all()  # the slow rank has passed over some
    assert taken[:: schedule.interval].all()  # the first after an exchange
    found = np.array([rank.weights for rank in seen]).swapaxes(0, 1)
    # float32 rounding of some tens of steps, which momentum adds up
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
    assert len({rank.weights[-1].tobytes() for rank in seen}) == 1


@pytest.mark.parametrize("case", ["dense", "hitopk", "oktopk", *more("gtopk", "torus2d", "dense, four bits")])
def test_nothing_is_lost_of_the_differences_as_they_weigh(case):
    seen = on_ranks(3, course(3, Schedule(8, 2, 1), 27, Outer(fragments=2, delay=1)), CASES[case])
    assert_nothing_is_lost(seen)


@pytest.mark.parametrize(
    ("counts", "weighs"), [([5, 5], True), ([0, 0], True), ([3, 1], True), ([3, 1], False)]
)
def test_a_difference_weighs_exactly_1_where_all_have_as_many_samples(counts, weighs):
    values = np.random.default_rng(1).standard_normal((2, 40)).astype(np.float32)

    def body(comm):
        with BucketExchange(Topology(comm), [40], {"name": "dense"}) as exchange:
            pace, gradient = Pace(exchange.slices, weighs=weighs), values[comm.rank].copy()
            pace.took(0.0, counts[comm.rank])
            exchange.submit_part(slice(0, 40), gradient, pace.leaves(slice(0, 40)))
            return exchange.wait()[0].tobytes(), gradient.tobytes() == values[comm.rank].tobytes()

    mean = np.mean(values, axis=0).tobytes()
    is_plain = counts != [3, 1] or not weighs
    for found, same in simulated.run(body, 2):
        assert (found == mean, same) == (is_plain, is_plain)


SLOW = {0: 1.0, 1: 2.0, 2: 1.0}  # seconds of a step of each rank
LOCAL = {"local_steps": 4, "local": "rank", "round_seconds": 3.5}
STREAMED = LOCAL | {
    "local_steps": 8,
    "reducer": "{name: hitopk, density: 0.1}",
    "outer": "{rate: 0.7, momentum: 0.9, fragments: 2, delay: 2}",
}
ADAMW = "optimizer={name: adamw}"


def timed(parts, seconds):
    """Let each gradient of a rank take ``seconds`` of a clock of its own."""
    clock, step = Clock(), parts.step
    step.stopwatch = Stopwatch(clock, LoopSeconds)
    step._gradient = clock.taking(seconds, step._gradient)


def replica_with(comm, config, layout=None):
    replica = replica_of(comm, config, layout)
    timed(replica.parts, SLOW[comm.rank])
    return replica


@pytest.mark.parametrize(
    ("local", "taken"),
    [("rank", ["1111", "1100", "1111"]), ("node", ["1100", "1100", "1111"])],  # ranks 0 and 1 are a node
)
def test_a_slow_replica_takes_fewer_steps_and_its_difference_counts_less(local, taken):
    config = config_of(LOCAL | {"local": local})

    def body(comm):
        replica, sent = replica_with(comm, config, [2, 1]), []
        common, leave = flat(replica).astype(np.float64), replica.local.pace.leaves

        def note(fragment):
            sent.append((common - flat(replica), leave(fragment)))
            return sent[-1][1]

        replica.local.pace.leaves = note
        for step in range(1, 9):
            take(replica, step)
            if step == 4:
                moved = common - flat(replica)
        steps = "".join("01"[step not in replica.passed_over] for step in range(1, 9))
        return steps, *sent[0], moved, flat(replica).tobytes(), replica.optimizer.iterations.numpy()

    ranks = simulated.run(body, 3)
    weights = [each.count("1") for each in taken]  # a sample a step
    expected = np.average([difference for _, difference, *_ in ranks], axis=0, weights=weights)
    assert np.abs(expected - np.mean([difference for _, difference, *_ in ranks], axis=0)).max() > 1e-3
    for (steps, _, samples, moved, end, iterations), own in zip(ranks, taken, strict=True):
        assert steps == 2 * own
        assert (samples, iterations) == ([own.count("1")], 2 * own.count("1"))
        np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=1e-6)  # of float32
        assert end == ranks[0][4]


def test_seconds_that_no_round_takes_change_no_bit():
    configs = [config_of(STREAMED | {"round_seconds": seconds}, words=(ADAMW,)) for seconds in ("null", 1000)]

    def body(comm, config):
        replica = replica_with(comm, config, [2, 1])
        for step in range(1, 20):
            take(replica, step, 19)
        return replica.passed_over, flat(replica).tobytes(), state_of(replica)

    one, other = (simulated.run(lambda comm, config=config: body(comm, config), 3) for config in configs)
    assert one == other
    assert one[0][0] == []


def test_after_a_round_that_was_skipped_all_begin_anew():
    """Rank 0 fails in step 5: what leaves after step 8 arrives after step 10, and undoes all steps since."""
    config = config_of(STREAMED | {"round_seconds": 1.5})

    def body(comm):
        replica, seen = replica_with(comm, config, [2, 1]), []
        for step in range(1, 11):
            seen.append(take(replica, step, spoilt=(comm.rank, step) == (0, 5)).finite)
        pace = replica.local.pace.state_dict()
        take(replica, 11)
        return seen, pace, 11 in replica.passed_over

    expected = [True] * 9 + [False], {"spent": 0.0, "samples": [0, 0]}, False
    assert simulated.run(body, 3) == [expected] * 3


LAST = 19


@pytest.mark.parametrize(
    ("keys", "at"), [(LOCAL, 7), (STREAMED, 11), *more((LOCAL, 6), (STREAMED, 13), (LOCAL, 8))]
)
def test_a_run_goes_on_to_the_bit_within_a_round(tmp_path, keys, at):
    """With the time that its steps had taken: rank 1 has passed over step 7, or 11, and does the next."""
    config = config_of(keys, words=(ADAMW,))
    whole = simulated.run(lambda comm: saved(comm, config, tmp_path, LAST, (at,), made=replica_with), 2)
    folder = tmp_path / str(at)
    again = simulated.run(lambda comm: resumed(comm, config, folder, LAST, made=replica_with), 2)
    check_same(whole, again, at, LAST)
    fast, slow = (rank[LAST][1] - rank[at][1] for rank in whole)  # the steps of each that it took
    assert slow < fast == LAST - at


def test_other_ranks_begin_a_round_anew(tmp_path):
    config = config_of(LOCAL, words=(ADAMW,))
    simulated.run(lambda comm: saved(comm, config, tmp_path, 7, (7,), made=replica_with), 2)
    for world_size, last in ((1, 8), (3, LAST)):
        go_on = partial(resumed, config=config, folder=tmp_path / "7", last=last, made=replica_with)
        again = simulated.run(go_on, world_size)
        for lines, seen, *_ in again:
            assert "local steps: all ranks begin with the optimizer state of rank 0" in lines[1]
            assert seen[8][1] == seen[7][1] + 1  # which rank 1 of two would have passed over
            assert seen[last][0] == again[0][1][last][0]


def test_other_buckets_of_a_checkpoint_have_the_most_samples_of_any():
    pace = Pace([slice(0, 3), slice(3, 9)], 5.0)
    pace.took(1.0, 4)
    pace.leaves(slice(0, 3))
    pace.took(2.0, 4)
    other = Pace([slice(0, 3), slice(3, 6), slice(6, 9)], 5.0)
    other.load_state_dict(pace.state_dict())
    assert (other.spent, other.leaves(slice(0, 9))) == (2.0, [8, 8, 8])


def test_after_local_steps_all_ranks_count_as_many_steps_of_the_optimizer():
    config = config_of(LOCAL, {}, words=(ADAMW,))

    def body(comm):
        replica = replica_with(comm, config)
        for step in range(1, 5):
            take(replica, step)
        own = int(replica.optimizer.iterations.numpy())
        replica.settle(pace(config.phases[0], 1, 2))
        replica.begin(config.phases[1])
        backward = replica.backward_of(config.phases[1])
        for step in (5, 6):
            batch = batch_of(comm.rank, step)
            replica.parts.step.take(backward, batch, pace(config.phases[0], 1, 2))
        return own, int(replica.optimizer.iterations.numpy()), flat(replica).tobytes()

    one, other = simulated.run(body, 2)
    assert (one[0], other[0]) == (4, 2)
    assert one[1:] == other[1:]
    assert one[1] == 6


LINEAR = phase(epochs=2, local_steps=6, round_seconds=2.5)  # 22 steps an epoch, of 1 s each: 3 of 6 are taken


def test_steps_that_are_passed_over_count_as_steps_but_not_as_trained_also_after_a_crash(tmp_path):
    def made(name):
        words = ("log_every=1", "checkpoints={every_steps: 5}", "resume=auto", ADAMW)
        run = trainer(tmp_path / name, *words, phases=(LINEAR,))
        timed(run.parts, 1.0)
        return run

    run = made("whole")
    run.fit()
    steps = records_of(tmp_path / "whole", "step")
    expected = [number % 6 >= 3 for number in range(44)]
    assert [line["passed_over"] for line in steps] == expected
    assert [line["loss"] is None for line in steps] == expected
    assert len({line["learning_rate"] for line in steps}) == 1
    assert run.position.steps == 44
    assert int(run.parts.optimizer.optimizer.iterations.numpy()) == 44 - sum(expected)
    epochs = records_of(tmp_path / "whole", "epoch")
    assert [(line["steps"], line["passed_over"]) for line in epochs] == [(22, 10), (22, 11)]
    losses = [line["loss"] for line in epochs]
    assert np.isfinite(losses).all()
    (line,) = [line["reason"] for line in records_of(tmp_path / "whole", "local_steps")]
    expected = "phase 1: 6 local steps of each node to an exchange, none after 2.5 s of them"
    assert line == f"{expected}; its last round has 2"

    # its checkpoint is of step 15, the third of a round: the next is passed over
    crash_after(made("crashed"), 18)
    again = made("crashed")
    again.fit()
    assert_same_weights(again, run)
    assert [each.summary.phases[0].passed_over for each in (run, again)] == [21, 21]
    assert [line["loss"] for line in records_of(tmp_path / "crashed", "epoch")] == losses


def test_a_slow_rank_takes_fewer_steps_and_all_have_the_same_weights(tmp_path, capsys):
    def slow(run):
        timed(run.parts, 3600.0 if run.rank == 1 else 1.0)

    phases = (phase(steps=8, local_steps=4, local="rank", round_seconds=1800),)
    results = run_on_ranks(tmp_path / "runs", 2, ADAMW, "digest_every=4", phases=phases, prepare=slow)
    assert [error for _, error in results] == [None, None]  # the digests of both ranks agree
    taken = [int(run.parts.optimizer.optimizer.iterations.numpy()) for run, _ in results]
    assert (taken, [run.summary.phases[0].passed_over for run, _ in results]) == ([8, 2], [6, 6])
    assert [line["steps"] for line in records_of(tmp_path / "runs", "digest")] == [4, 8]
    assert capsys.readouterr().out.count("  passed over 6 steps\n") == 1


def test_a_time_of_rounds_of_one_step_is_warned_of():
    words = [
        f"phases=[{phase(steps=4, local_steps=2, round_seconds=3, outer='{fragments: 2}')}]",
        "reducer=dense",
    ]
    (line,) = load_with_warnings(DIGITS, words).warnings
    assert line == "phases[0].round_seconds=3.0 has no effect: the one step to an exchange is always taken"


def test_the_plan_says_that_it_has_all_steps():
    words = ("phases.0.local_steps=5", "phases.0.round_seconds=2", "phases.0.reducer=dense")
    result = invoke("plan", "digits", *words)
    line = "a replica passes over the steps to the next exchange that are left after 2 s"
    assert f"phase 1: {line}; the plan has none passed over" in result.stdout.splitlines(), result.output
