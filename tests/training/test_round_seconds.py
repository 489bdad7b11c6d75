"""Rounds in which replicas take different numbers of steps: who stops when, and what differences weigh."""

import re

import numpy as np
import pytest

from commlib import Topology
from commlib.exchange import BucketExchange
from commlib.reducers.report import Stopwatch
from commlib.rounds import Pace, Schedule
from commlib.transport import simulated
from tests.extent import more
from tests.gpu.test_training import batch_of
from tests.launching import DIGITS, python_on_ranks, run, tail
from tests.training.refusal import refused
from tests.training.replicas import Replica, replica_of
from tests.training.small import crash_after, metrics_of, phase, records_of, trainer
from tests.training.stored import newest, save_whole
from tests.training.streamed import DILOCO, Course, on_ranks, transcribed
from tests.training.test_local_steps import _small_model, config_of, flat, state_of  # noqa: F401 - a fixture
from tests.training.test_rounds import CASES, START
from tests.training.test_stages import Clock
from tests.training.test_streaming_runs import pace as pace_of
from training.checkpoint.folders import Checkpoints
from training.checkpoint.places import Folder
from training.config.config import ConfigurationError, load_with_warnings
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
    moved = START.astype(np.float64) - seen[0].weights[-1]
    given = np.sum([rank.differences for rank in seen], axis=(0, 1), dtype=np.float64)
    held_back = np.sum([rank.residual for rank in seen], axis=0, dtype=np.float64)
    # float32 rounding of sums of some tens of differences, each below 10
    np.testing.assert_allclose(3 * moved + held_back, given, atol=2e-4)


@pytest.mark.parametrize("case", ["hitopk", *more("dense", "oktopk")])
def test_a_thread_gives_the_bits_of_the_same_run_without_one(case):
    given = 3, course(5, Schedule(12, 3, 2), 31, Outer(fragments=3, delay=2, **DILOCO)), CASES[case]
    for plain, threaded in zip(on_ranks(*given), on_ranks(*given, overlap=True), strict=True):
        assert np.array(plain.weights).tobytes() == np.array(threaded.weights).tobytes()
        assert plain.residual.tobytes() == threaded.residual.tobytes()


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
    assert simulated.run(body, 2) == [(mean, True)] * 2 or counts == [3, 1]
    if counts == [3, 1]:
        assert all(
            (found == mean, same) == (not weighs, not weighs) for found, same in simulated.run(body, 2)
        )


# ---------------------------------------------------------------------------------------- real models

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


def take(replica, step, last=1000, *, spoilt=False):
    """Take or pass over one step, numbered from 1; return whether it was taken, and the report."""
    (only, *_), parts = replica.config.phases, replica.parts
    hyperparameters = pace_of(only, step, last)
    if parts.step.passes_over():
        return False, parts.step.pass_over(hyperparameters)
    bias = replica.variables[-1]
    before = bias.numpy()
    if spoilt:
        bias.assign(np.full(bias.shape, np.nan, np.float32))
    report = parts.step.take(
        replica.backward_of(only), batch_of(replica.topology.world.rank, step), hyperparameters
    )[1]
    if spoilt:
        bias.assign(before)
    parts.step.stopwatch.restart()
    return True, report


@pytest.mark.parametrize(
    ("local", "taken"),
    [("rank", ["1111", "1100", "1111"]), ("node", ["1100", "1100", "1111"])],  # ranks 0 and 1 are a node
)
def test_a_slow_replica_takes_fewer_steps_and_its_difference_counts_less(local, taken):
    config = config_of(LOCAL | {"local": local})

    def body(comm):
        replica, sent = replica_with(comm, config, [2, 1]), []
        exchange, before = replica.gradients.exchange, flat(replica)
        submit = exchange.submit_part

        def note(fragment, difference, samples):
            sent.append((difference.astype(np.float64), samples))
            submit(fragment, difference, samples)

        exchange.submit_part = replica.local._send = note
        steps = [take(replica, step)[0] for step in range(1, 9)]
        (difference, samples), _ = sent
        return (
            steps,
            before,
            difference,
            samples,
            flat(replica).tobytes(),
            replica.optimizer.iterations.numpy(),
        )

    ranks = simulated.run(body, 3)
    for (steps, *_, iterations), expected in zip(ranks, taken, strict=True):
        assert "".join("01"[each] for each in steps) == 2 * expected
        assert iterations == 2 * expected.count("1")
    assert [rank[3] for rank in ranks] == [[each.count("1")] for each in taken]
    assert len({rank[4] for rank in ranks}) == 1


def test_the_common_weights_move_by_the_mean_that_is_weighted_by_steps():
    config = config_of(LOCAL | {"local_steps": 4})

    def body(comm):
        replica = replica_with(comm, config, [2, 1])
        before, differences = flat(replica), []
        leave = replica.local.pace.leaves

        def note(fragment):
            differences.append(before - flat(replica).astype(np.float64))
            return leave(fragment)

        replica.local.pace.leaves = note
        for step in range(1, 5):
            take(replica, step)
        return before - flat(replica).astype(np.float64), differences[0]

    ranks = simulated.run(body, 3)
    expected = sum(n * own for n, (_, own) in zip([4, 2, 4], ranks, strict=True)) / 10
    assert np.abs(expected - np.mean([own for _, own in ranks], axis=0)).max() > 1e-3
    for moved, _ in ranks:
        np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=1e-6)  # of float32


def test_seconds_that_no_round_takes_change_no_bit():
    configs = [config_of(STREAMED | {"round_seconds": seconds}, words=(ADAMW,)) for seconds in ("null", 1000)]

    def body(comm, config):
        replica = replica_with(comm, config, [2, 1])
        steps = [take(replica, step, 19)[0] for step in range(1, 20)]
        return all(steps), flat(replica).tobytes(), state_of(replica)

    one, other = (simulated.run(lambda comm, config=config: body(comm, config), 3) for config in configs)
    assert one == other
    assert one[0][0]


# ----------------------------------------------------------------------------------- rounds that fail


def test_after_a_round_that_was_skipped_all_begin_anew():
    """Rank 0 fails in step 5: what leaves after step 8 arrives after step 10, and undoes all steps since."""
    config = config_of(STREAMED | {"round_seconds": 1.5})

    def body(comm):
        replica, seen = replica_with(comm, config, [2, 1]), []
        for step in range(1, 11):
            taken, report = take(replica, step, spoilt=(comm.rank, step) == (0, 5))
            seen.append((taken, report.finite))
        return seen, replica.local.pace.state_dict(), take(replica, 11)[0], flat(replica).tobytes()

    for seen, pace, again, _ in simulated.run(body, 3):
        assert [finite for _, finite in seen] == [True] * 9 + [False]
        assert pace == {"spent": 0.0, "samples": [0, 0]}
        assert again


# ------------------------------------------------------------------------------------------- checkpoints

LAST = 19


def saved(comm, config, folder, at):
    replica, seen = replica_with(comm, config), []
    for step in range(1, LAST + 1):
        taken, _ = take(replica, step, LAST)
        if step == at:
            save_whole(Checkpoints(Folder(folder), comm), at, replica.shared_state(), replica.own_state())
        if step > at:
            seen.append((taken, flat(replica).tobytes()))
    return seen, state_of(replica)


def resumed(comm, config, folder, at):
    replica = replica_with(comm, config)
    lines, seen = replica.restore(newest(Checkpoints(Folder(folder), comm))), []
    for step in range(at + 1, LAST + 1):
        seen.append((take(replica, step, LAST)[0], flat(replica).tobytes()))
    return lines, (seen, state_of(replica))


@pytest.mark.parametrize(
    ("keys", "at"), [(LOCAL, 7), (STREAMED, 11), *more((LOCAL, 6), (STREAMED, 13), (LOCAL, 8))]
)
def test_a_run_goes_on_to_the_bit_within_a_round(tmp_path, keys, at):
    """With the time that its steps had taken: rank 1 has passed over step 7, or 11, and does the next."""
    config = config_of(keys, words=(ADAMW,))
    whole = simulated.run(lambda comm: saved(comm, config, tmp_path, at), 2)
    again = simulated.run(lambda comm: resumed(comm, config, tmp_path, at), 2)
    assert [rank for _, rank in again] == whole
    assert [rank[0] for rank in again] == [[], []]
    assert [taken for taken, _ in whole[0][0]] == [True] * (LAST - at)
    assert not all(taken for taken, _ in whole[1][0])


@pytest.mark.parametrize("world_size", [1, 3])
def test_other_ranks_begin_a_round_anew(tmp_path, world_size):
    config = config_of(LOCAL, words=(ADAMW,))
    simulated.run(lambda comm: saved(comm, config, tmp_path, 7), 2)
    again = simulated.run(lambda comm: resumed(comm, config, tmp_path, 7), world_size)
    for lines, (seen, _) in again:
        assert "local steps: all ranks begin with the optimizer state of rank 0" in lines[1]
        assert seen[0][0]  # step 8, which rank 1 of two would have passed over
        assert seen[-1][1] == again[0][1][0][-1][1]


def test_other_buckets_of_a_checkpoint_have_the_most_samples_of_any():
    pace = Pace([slice(0, 3), slice(3, 9)], 5.0)
    pace.took(1.0, 4)
    pace.leaves(slice(0, 3))
    pace.took(2.0, 4)
    other = Pace([slice(0, 3), slice(3, 6), slice(6, 9)], 5.0)
    other.load_state_dict(pace.state_dict())
    assert (other.spent, other.leaves(slice(0, 9))) == (2.0, [8, 8, 8])


# ------------------------------------------------------------------------------------- between phases


def test_after_local_steps_all_ranks_count_as_many_steps_of_the_optimizer():
    config = config_of(LOCAL, {}, words=(ADAMW,))

    def body(comm):
        replica = replica_with(comm, config)
        for step in range(1, 5):
            take(replica, step)
        own = int(replica.optimizer.iterations.numpy())
        replica.settle(pace_of(config.phases[0], 1, 2))
        replica.begin(config.phases[1])
        backward = replica.backward_of(config.phases[1])
        for step in (5, 6):
            batch = batch_of(comm.rank, step)
            replica.parts.step.take(backward, batch, pace_of(config.phases[0], 1, 2))
        return own, int(replica.optimizer.iterations.numpy()), flat(replica).tobytes()

    one, other = simulated.run(body, 2)
    assert (one[0], other[0]) == (4, 2)
    assert one[1:] == other[1:]
    assert one[1] == 6


# ---------------------------------------------------------------------------------------- whole runs

LINEAR = phase(epochs=2, local_steps=6, round_seconds=2.5)  # 22 steps an epoch, of 1 s each: 3 of 6 are taken


def test_steps_that_are_passed_over_count_as_steps_but_not_as_trained(tmp_path):
    run = trainer(tmp_path, "log_every=1", "checkpoints={every_steps: 5}", ADAMW, phases=(LINEAR,))
    timed(run.parts, 1.0)
    run.fit()
    lines = metrics_of(tmp_path)
    steps = [line for line in lines if line["kind"] == "step"]
    expected = [number % 6 >= 3 for number in range(44)]
    assert [line["passed_over"] for line in steps] == expected
    assert [line["loss"] is None for line in steps] == expected
    assert len({line["learning_rate"] for line in steps}) == 1
    assert run.position.steps == 44
    assert int(run.parts.optimizer.optimizer.iterations.numpy()) == 44 - sum(expected)
    epochs = [line for line in lines if line["kind"] == "epoch"]
    assert [(line["steps"], line["passed_over"]) for line in epochs] == [(22, 10), (22, 11)]
    assert np.isfinite([line["loss"] for line in epochs]).all()
    assert run.summary.phases[0].passed_over == 21
    (line,) = [line["reason"] for line in lines if line["kind"] == "local_steps"]
    expected = "phase 1: 6 local steps of each node to an exchange, none after 2.5 s of them"
    assert line == f"{expected}; its last round has 2"


def test_a_run_that_crashed_goes_on_to_the_bit(tmp_path):
    words = ("checkpoints={every_steps: 5}", "resume=auto", ADAMW)
    runs = [trainer(tmp_path / "whole", *words, phases=(LINEAR,))]
    timed(runs[0].parts, 1.0)
    runs[0].fit()
    crashed = trainer(tmp_path / "crashed", *words, phases=(LINEAR,))
    timed(crashed.parts, 1.0)
    crash_after(crashed, 18)  # the checkpoint is of step 15, the third of a round: the next is passed over
    runs.append(trainer(tmp_path / "crashed", *words, phases=(LINEAR,)))
    timed(runs[1].parts, 1.0)
    runs[1].fit()
    whole, again = (flat(Replica.of(run.parts)).tobytes() for run in runs)
    assert whole == again
    assert [run.summary.phases[0].passed_over for run in runs] == [21, 21]
    of_epochs = [records_of(tmp_path / name, "epoch") for name in ("whole", "crashed")]
    assert [[each["loss"] for each in epochs] for epochs in of_epochs] == [
        [each["loss"] for each in of_epochs[0]]
    ] * 2


PROGRAM = """
import json, sys
from commlib.reducers.report import Stopwatch
from commlib.transport.mpi import world
from training import Trainer
from training.config.config import load
from training.results import LoopSeconds

comm, later = world(), [0.0]
run = Trainer(load(sys.argv[1], sys.argv[2:]))
if comm.rank == 1:  # each gradient of rank 1 takes an hour by its clock
    step, now = run.parts.step, comm.now
    gradient, step.stopwatch = step._gradient, Stopwatch(lambda: now() + later[0], LoopSeconds)

    def slow(*given):
        later[0] += 3600.0
        return gradient(*given)

    step._gradient = slow
run.fit()
taken = int(run.parts.optimizer.optimizer.iterations.numpy())
print(json.dumps([comm.rank, taken, run.summary.phases[0].passed_over]))
"""


@pytest.mark.launch
def test_a_slow_process_takes_fewer_steps_and_all_have_the_same_weights(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    given = f"phases=[{phase(steps=8, local_steps=4, round_seconds=1800)}]"
    words = (DIGITS, "cache={}", "ranks_per_node=1", "reducer=dense", ADAMW, given, f"output={tmp_path}/runs")
    program = (
        f"import runpy, sys; sys.argv[1:] = {[*words, 'digest_every=4']!r}; runpy.run_path('program.py')"
    )
    result = python_on_ranks(2, program, cwd=tmp_path)
    assert result.returncode == 0, tail(result)  # the digests of all ranks agree
    found = sorted(re.findall(r"^\[(\d), (\d+), (\d+)\]$", result.stdout, re.MULTILINE))
    assert found == [("0", "8", "6"), ("1", "2", "6")], tail(result)
    assert [line["steps"] for line in records_of(tmp_path / "runs", "digest")] == [4, 8]
    assert result.stdout.count("  passed over 6 steps\n") == 1


# ----------------------------------------------------------------------------------------- what is said


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"round_seconds": 2}, "phases[0].round_seconds: expected none without local_steps, got one"),
        (LOCAL | {"round_seconds": 0}, "phases[0].round_seconds: expected a number above 0, got 0"),
        (LOCAL | {"round_seconds": -1.5}, "phases[0].round_seconds: expected a number above 0, got -1.5"),
        (LOCAL | {"round_seconds": "soon"}, "phases[0].round_seconds: expected a number above 0, got "),
        (LOCAL | {"round_seconds": ".nan"}, "phases[0].round_seconds: expected a number above 0, got "),
    ],
)
def test_what_is_no_time_of_a_round_is_refused_in_one_line(keys, expected):
    with refused(expected, ConfigurationError):
        config_of(keys)


def test_a_time_of_rounds_of_one_step_is_warned_of():
    words = [
        f"phases=[{phase(steps=4, local_steps=2, round_seconds=3, outer='{fragments: 2}')}]",
        "reducer=dense",
    ]
    (line,) = load_with_warnings(DIGITS, words).warnings
    assert line == "phases[0].round_seconds=3.0 has no effect: the one step to an exchange is always taken"


@pytest.mark.launch
def test_the_plan_says_that_it_has_all_steps():
    words = ("phases.0.local_steps=5", "phases.0.round_seconds=2", "phases.0.reducer=dense")
    result = run("cloudtrain", "plan", "digits", *words)
    assert result.returncode == 0, tail(result)
    line = "a replica passes over the steps to the next exchange that are left after 2 s"
    assert f"phase 1: {line}; the plan has none passed over" in result.stdout.splitlines(), tail(result)
