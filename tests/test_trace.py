"""Spans of a rank's threads, and what a clock is ahead of rank 0's."""

import numpy as np
import pytest

from commlib import Topology
from commlib.reducers.report import StageSeconds, Stopwatch
from commlib.trace import Recorder, Span, clock_offset
from commlib.transport import simulated
from tests.exchanges import whole_exchange

SIZES = [30, 500, 41]


class Clock:
    """A clock that the test moves."""

    def __init__(self):
        self.now = 10.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("recorder", [Recorder(), None])
def test_a_stage_inside_another_counts_once_and_is_a_span_inside_its_span(recorder):
    clock = Clock()
    stopwatch = Stopwatch(clock, StageSeconds)
    stopwatch.recorder = recorder
    with stopwatch.measure("combine"):
        clock.now += 1
        with stopwatch.measure("inter"):
            clock.now += 3
        clock.now += 2
    clock.now += 5
    with stopwatch.measure("inter"):
        clock.now += 7
    assert stopwatch.seconds == StageSeconds(inter=10.0, combine=3.0)
    assert recorder is None or recorder.spans == [
        Span("loop", "inter", 11.0, 14.0),
        Span("loop", "combine", 10.0, 16.0),
        Span("loop", "inter", 21.0, 28.0),
    ]
    stopwatch.restart()
    assert stopwatch.seconds == StageSeconds()


def test_a_stage_that_raises_is_a_span_that_ends_there():
    clock, recorder = Clock(), Recorder()
    stopwatch = Stopwatch(clock, StageSeconds)
    stopwatch.recorder = recorder
    with pytest.raises(ValueError, match="spoiled"), stopwatch.measure("select"):
        clock.now += 1
        raise ValueError("spoiled")
    with stopwatch.measure("intra"):
        clock.now += 2
    assert recorder.spans == [Span("loop", "select", 10.0, 11.0), Span("loop", "intra", 11.0, 13.0)]


# ------------------------------------------------------------------------------------------ buckets


def inside(span, others):
    return [each for each in others if each.start <= span.start and span.end <= each.end]


@pytest.mark.world_sizes(3)
@pytest.mark.parametrize("is_overlapped", [True, False])
@pytest.mark.parametrize("wrappers", [(), ({"name": "momentum_correction", "momentum": 0.5},)])
def test_each_bucket_is_a_span_around_those_of_its_stages(ranks, is_overlapped, wrappers):
    def body(comm):
        recorder, topology = Recorder(), Topology(comm, ranks_per_node=2)
        options = {"density": 0.1, "wrappers": wrappers}
        with whole_exchange("hitopk", topology, SIZES, overlap=is_overlapped, **options) as exchange:
            gradient = np.random.default_rng(comm.rank).standard_normal(exchange.size).astype(np.float32)
            for recorded in (None, recorder, recorder, None):
                exchange.record(recorded)
                exchange.reduce(gradient)
        return recorder.spans

    for spans in ranks.run(body):
        whole = [span for span in spans if span.name.startswith("bucket")]
        stages = [span for span in spans if span not in whole]
        assert sorted(span.name for span in whole) == sorted(["bucket 0", "bucket 1", "bucket 2"] * 2)
        assert {span.name for span in stages} == {"select", "intra", "inter", "combine"}
        assert {span.thread for span in spans} == {"engine" if is_overlapped else "loop"}
        assert all(span.start <= span.end for span in spans)
        assert all(inside(span, whole) for span in stages)
        assert any(span.end > span.start for span in stages)


# ------------------------------------------------------------------------------------------- clocks


class Ahead:
    """A communicator whose clock is ahead of the one that the ranks share."""

    def __init__(self, comm, seconds):
        self._comm, self._seconds = comm, seconds

    def now(self):
        return self._comm.now() + self._seconds

    def __getattr__(self, name):
        return getattr(self._comm, name)


@pytest.mark.world_sizes(1, 5)
def test_a_clock_that_is_ahead_is_found_to_be_to_within_the_error_that_is_told(ranks):
    ahead = [7.0, 1007.5, -3.0, 0.0, 1e-3]

    def body(comm):
        offset = clock_offset(Ahead(comm, ahead[comm.rank]))
        return offset.seconds, offset.error

    found = ranks.run(body)
    for (seconds, error), planted in zip(found, ahead, strict=False):
        assert abs(seconds - (planted - ahead[0])) <= error + 1e-9  # of 1000 s, the rounding
        assert error < 1e-3  # the exchange takes microseconds of the virtual clock
    assert found[0][0] == 0.0


class HeldUp(Ahead):
    """One that stands still for a second in every second round, after it has read the clock."""

    calls = 0

    def now(self):
        self.calls += 1
        return super().now() - (self.calls % 4 == 1 + 2 * self.rank)


def test_a_rank_that_is_held_up_in_some_rounds_is_judged_by_the_others():
    first, second = simulated.run(lambda comm: clock_offset(HeldUp(comm, 50.0 * comm.rank)), 2)
    assert first.seconds == 0.0
    assert abs(second.seconds - 50.0) <= second.error < 1e-3
