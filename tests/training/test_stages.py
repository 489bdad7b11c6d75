"""Where the time of steps goes: what each rank measures, and what an epoch makes of all ranks."""

import json
from dataclasses import replace

import pytest

from commlib import LinkBytes, Report
from commlib.reducers.report import StageSeconds, Stopwatch
from commlib.topology import Traffic
from commlib.transport import simulated
from tests.training.small import phase, records_of, trainer
from training.checkpoint.serialization import parsed
from training.results import (
    EpochAccumulator,
    LoopSeconds,
    PhaseResult,
    Slowest,
    StageSums,
    Step,
    means_over_ranks,
)
from training.tasks.task import Tested

ALL_STAGES = [
    *("data_wait", "forward_backward", "exchange_wait", "norms", "update"),
    *("select", "intra", "inter", "combine"),
]


def step_of(rank, *, busy=0.0, hidden=0.0):
    """A step whose selection and forward and backward pass take longer on higher ranks."""
    seconds = StageSeconds(select=1.0 + rank, inter=4.0 - rank)
    report = Report(True, 3, 5, Traffic(LinkBytes(1, 2), LinkBytes(3, 4)), seconds, busy, hidden)
    return Step(0.5, report, 20.0, LoopSeconds(1.0, 6.0 + rank, 2.0, 0.5, 0.25))


class Clock:
    """A clock that only the functions move that take time."""

    now = 100.0

    def __call__(self):
        return self.now

    def taking(self, seconds, function):
        def slow(*args, **options):
            self.now += seconds
            return function(*args, **options)

        return slow

    def batches(self, batches, seconds):
        for batch in batches:
            self.now += seconds
            yield batch


@pytest.mark.parametrize("is_finite", [True, False])
def test_the_loop_measures_each_part_of_a_step(tmp_path, is_finite):
    clock = Clock()
    run = trainer(tmp_path, "log_every=1", "clip_norm=1.0", phases=(phase(steps=3),))
    parts, (only,) = run.parts, run.phases
    gradients, optimizer = parts.exchange.gradients, parts.optimizer
    run.topology.world.now, parts.step.stopwatch = clock, Stopwatch(clock, LoopSeconds)
    backward, submit_inputs = only.backward, gradients.submit_inputs
    training_batches = only.data.training_batches
    backward._backward = clock.taking(1, backward._backward)
    spoil = 1.0 if is_finite else float("nan")
    gradients.submit_inputs = clock.taking(2, lambda given: submit_inputs([each * spoil for each in given]))
    optimizer._clipped = clock.taking(3, optimizer._clipped)
    optimizer._update = clock.taking(4, optimizer._update)
    only.data.training_batches = lambda *at: clock.batches(training_batches(*at), 5)
    run.fit()

    applied = {"norms": 3.0, "update": 4.0} if is_finite else {"norms": 0.0, "update": 0.0}
    expected = {"data_wait": 5.0, "forward_backward": 1.0, "exchange_wait": 2.0, **applied}
    steps = records_of(tmp_path, "step")
    assert len(steps) == 3
    for line in steps:
        assert {name: line["stage_seconds"][name] for name in expected} == expected
        assert list(line["stage_seconds"]) == ALL_STAGES
        assert line["step_seconds"] == sum(expected.values())
        assert (line["busy_seconds"], line["hidden_seconds"]) == (0.0, 0.0)
    (epoch,) = records_of(tmp_path, "epoch")
    assert {name: epoch["stage_seconds"][name] for name in expected} == expected
    assert epoch["train_seconds"] == 3 * sum(expected.values())
    assert (epoch["hidden_seconds"], epoch["hidden_share"], epoch["slowest"]) == (0.0, None, None)


def test_a_resumed_epoch_has_the_seconds_of_all_its_steps():
    def body(comm):
        step = replace(step_of(comm.rank), size=8)
        before = EpochAccumulator()
        before.add(step)
        accumulator = parsed(EpochAccumulator, json.dumps(before.as_tree()))
        accumulator.add(step)
        of = PhaseResult("hitopk", "6 px", 1)
        return accumulator.result(comm, 7, epoch=0, phase=of, tested=Tested({}, 0), run_seconds=1.0)

    result, _ = simulated.run(body, 2)
    assert (result.steps, result.train_seconds) == (2, 2 * 20.0)
    assert result.throughput == 2 * 2 * 8 / (2 * 20.0)  # of both ranks


def test_an_epoch_has_the_means_of_all_ranks_and_the_slowest_of_them():
    def body(comm):
        accumulator = EpochAccumulator()
        for hidden in (0.0, 1.0 + comm.rank):
            accumulator.add(step_of(comm.rank % 3, busy=5.0, hidden=hidden))
        of = PhaseResult("hitopk", "6 px", 1)
        return accumulator.result(comm, 7, epoch=0, phase=of, tested=Tested({}, 0), run_seconds=1.0)

    totals, *others = simulated.run(body, 4)
    assert others == [totals] * 3  # on every rank
    means = totals.stages
    assert means.stage_seconds["select"] == pytest.approx((1 + 2 + 3 + 1) / 4)
    assert means.stage_seconds["forward_backward"] == pytest.approx((6 + 7 + 8 + 6) / 4)
    assert means.stage_seconds["inter"] == pytest.approx((4 + 3 + 2 + 4) / 4)
    assert list(means.stage_seconds) == ALL_STAGES
    assert means.hidden_seconds == pytest.approx((1 + 2 + 3 + 4) / 8)
    assert means.hidden_share == pytest.approx((1 + 2 + 3 + 4) / 40)
    # data wait, forward and backward, selection: 8, 10, 12 and 8 seconds a step
    assert means.slowest == Slowest(2, pytest.approx(12 / 9.5 - 1))
    assert (totals.sent_intra_bytes, totals.sent_inter_bytes) == (8, 16)
    assert (totals.loss, totals.dense_inter_bytes) == (0.5, 4 * 2 * 7)


def test_waiting_for_others_makes_no_rank_the_slowest():
    waiting = Step(0.5, step_of(0).report, 99.0, LoopSeconds(1.0, 6.0, 50.0, 9.0, 9.0))
    of_ranks = [StageSums(), StageSums(), StageSums()]
    for sums, step in zip(of_ranks, (waiting, step_of(1), step_of(0)), strict=True):
        sums.add(step)
    assert means_over_ranks(of_ranks).slowest.rank == 1
