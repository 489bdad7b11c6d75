"""A trace of all ranks: one process for each, one thread each for its loop and its engine, one clock."""

import json

import pytest

from commlib.trace import ClockOffset, Span
from commlib.transport import simulated
from tests.gpu.test_training import config_of, two_layers
from tests.test_trace import Ahead
from tests.training.replicas import batch_of, replica_of
from tests.training.small import phase, records_of, trainer
from training.callbacks.tracing import Profiler, RankTrace, merged
from training.models import MODELS
from training.results import StepHyperparameters
from training.run_folder import RunFolder

LOOP_STAGES = ["data_wait", "forward_backward", "exchange_wait", "norms", "update"]
BUCKETS = "bucket_mib=0.0005"  # of the 586 entries of two_layers
AHEAD = (5.0, 1005.0, -7.0)  # seconds, of the clock of each rank


@pytest.fixture(autouse=True)
def _small_model(monkeypatch):
    monkeypatch.setitem(MODELS, "two_layers", two_layers)


def spans_of(trace, **of):
    """The events of a trace that are spans, of a process or a thread or of a name."""
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    return [span for span in spans if all(span[key] == value for key, value in of.items())]


def names_of(spans):
    return [span["name"] for span in sorted(spans, key=lambda span: span["ts"])]


def check(trace, ranks):
    trace = json.loads(json.dumps(trace, allow_nan=False))
    spans = spans_of(trace)
    assert {span["pid"] for span in spans} == set(range(ranks))
    assert {span["tid"] for span in spans} <= {0, 1}
    assert min(span["ts"] for span in spans) == 0
    assert all(span["dur"] >= 0 for span in spans)
    for rank in range(ranks):
        for thread in (0, 1):
            own = spans_of(trace, pid=rank, tid=thread)
            assert [span["ts"] for span in own] == sorted(span["ts"] for span in own)
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert named == {(rank, thread): ("loop", "engine")[thread] for rank in range(ranks) for thread in (0, 1)}
    assert len(trace["otherData"]["clock_error_seconds"]) == ranks
    return trace


def traced(comm, config, asked, steps, ahead):
    """Take steps on ranks whose clocks are ``ahead``; return the trace, and when the steps were."""
    comm = Ahead(comm, ahead[comm.rank])
    replica = replica_of(comm, config, 2)
    (only,) = config.phases
    backward, profiler, times = replica.backward_of(only), Profiler(asked), []
    for number in range(1, steps + 1):
        comm.barrier()
        start = comm.now()
        replica.step(backward, batch_of(comm.rank, number), StepHyperparameters(0.1, 0.9))
        end = comm.now()
        times.append((start - ahead[comm.rank], end - ahead[comm.rank]))
        if profiler.add_step(replica, number, start, end):
            traces = profiler.end(replica)
    return merged(traces), times


@pytest.mark.parametrize("overlap", [True, False])
def test_each_rank_is_a_process_with_the_steps_that_were_asked_for(overlap):
    config = config_of(BUCKETS, f"overlap={str(overlap).lower()}", reducers=("hitopk",))
    results = simulated.run(lambda comm: traced(comm, config, 2, 5, AHEAD), 3)
    trace = check(results[0][0], ranks=3)
    assert [json.dumps(other) for other, _ in results] == [json.dumps(trace)] * 3
    for rank in range(3):
        loop, exchanging = spans_of(trace, pid=rank, tid=0), spans_of(trace, pid=rank, tid=int(overlap))
        steps = [span for span in loop if span["name"].startswith("step")]
        assert names_of(steps) == ["step 2", "step 3"]  # the first is slower
        for stage in LOOP_STAGES[1:]:
            assert len([span for span in loop if span["name"] == stage]) == 2
        buckets = [span["name"] for span in exchanging if span["name"].startswith("bucket")]
        assert len(buckets) >= 2 * 3
        assert {buckets.count(name) for name in buckets} == {2}
        assert {"select", "intra", "inter", "combine"} <= {span["name"] for span in exchanging}
        assert bool(spans_of(trace, pid=rank, tid=1)) == overlap
    error = max(trace["otherData"]["clock_error_seconds"])
    assert 2 * error < 1e-3 < 1.0  # seconds
    first, last = (results[0][1][number] for number in (1, 2))  # by the clock that they share
    ends = [span["ts"] + span["dur"] for span in spans_of(trace)]
    assert max(ends) <= 1e6 * (last[1] - first[0] + 2 * error) + 1e-3


def test_times_are_microseconds_since_the_first_span_by_the_clock_of_rank_0():
    ours = RankTrace(
        "here", ClockOffset(0.0, 0.0), [Span("engine", "inter", 3.0, 3.5), Span("loop", "update", 2.0, 2.25)]
    )
    theirs = RankTrace("there", ClockOffset(100.0, 0.125), [Span("loop", "step 2", 101.5, 104.0)])
    trace = check(merged([ours, theirs]), ranks=2)
    assert spans_of(trace) == [
        {"name": "update", "ph": "X", "pid": 0, "tid": 0, "ts": 0.5e6, "dur": 0.25e6},
        {"name": "inter", "ph": "X", "pid": 0, "tid": 1, "ts": 1.5e6, "dur": 0.5e6},
        {"name": "step 2", "ph": "X", "pid": 1, "tid": 0, "ts": 0.0, "dur": 2.5e6},
    ]
    named = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert named == ["rank 0 (here)", "rank 1 (there)"]
    assert trace["otherData"]["clock_error_seconds"] == [0.0, 0.125]


def test_a_run_writes_its_trace_across_epochs_and_phases_and_goes_on(tmp_path, capsys):
    run = trainer(tmp_path, "trace=3", phases=(phase(steps=2, reducer="gtopk"), phase(steps=4)))
    run.fit()
    (folder,) = tmp_path.iterdir()
    trace = check(json.loads((folder / "trace.json").read_text()), ranks=1)
    steps = [span for span in spans_of(trace) if span["name"].startswith("step")]
    assert names_of(steps) == ["step 2", "step 3", "step 4"]

    def is_inside(span, outer):
        end = span["ts"] + span["dur"]
        return outer["ts"] - 1e-3 <= span["ts"] and end <= outer["ts"] + outer["dur"] + 1e-3

    for stage in LOOP_STAGES:
        own = [span for span in spans_of(trace, tid=0) if span["name"] == stage]
        within = [each for each in own if any(is_inside(each, step) for step in steps)]
        assert len(within) == 3 + (stage == "data_wait")  # the batches of an epoch are opened, too
    (line,) = records_of(tmp_path, "trace")
    assert line["steps"] == 3
    assert run.parts.step.stopwatch.recorder is run.parts.exchange.gradients.exchange._recorder is None
    assert f"trace of 3 steps: {folder / 'trace.json'}" in capsys.readouterr().out


@pytest.mark.parametrize(("steps", "said"), [(1, "trace: no step"), (3, "trace of 2 steps: ")])
def test_a_run_of_fewer_steps_writes_those_that_there_are_and_says_where_there_are_none(
    tmp_path, capsys, steps, said
):
    trainer(tmp_path, "trace=100", phases=(phase(steps=steps),)).fit()
    assert said in capsys.readouterr().out
    assert bool(list(tmp_path.glob("*/trace.json"))) == (steps > 1)
    traces = [
        span["name"]
        for path in tmp_path.glob("*/trace.json")
        for span in spans_of(json.loads(path.read_text()))
    ]
    assert [name for name in traces if name.startswith("step")] == ["step 2", "step 3"][: steps - 1]


def test_a_trace_that_does_not_fit_on_the_disk_costs_the_run_nothing(tmp_path, monkeypatch, capsys):
    run = trainer(tmp_path, "trace=1", phases=(phase(steps=3),))
    write_file = RunFolder.write_file

    def full(folder, name, content):
        if name == "trace.json":
            raise OSError(28, "No space left on device")
        write_file(folder, name, content)

    monkeypatch.setattr(RunFolder, "write_file", full)
    assert run.fit().tested == 360
    said = capsys.readouterr()
    assert "trace.json: cannot be written: No space left on device; training goes on" in said.err
    assert "trace of" not in said.out
