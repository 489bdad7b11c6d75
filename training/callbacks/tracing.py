"""A trace of some steps of a run: the stages of each rank's loop and engine over time, in one file.

https://ui.perfetto.dev and ``chrome://tracing`` show its format, Chrome's trace events.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from commlib.trace import ENGINE, LOOP, ClockOffset, Recorder, Span, clock_offset
from training.callbacks.callback import Callback, Event, RunView
from training.results import Step

TRACE = "trace.json"
THREADS = {LOOP: 0, ENGINE: 1}


@dataclass(frozen=True)
class Traced(Event):
    """``steps`` of all ranks are in ``file``; their clocks are aligned to within ``clock_error_seconds``."""

    kind = "trace"
    file: str
    steps: int
    clock_error_seconds: float

    def lines(self) -> Iterable[str]:
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        yield f"trace of {steps}: {self.file} (for https://ui.perfetto.dev)"


class Profiler(Callback):
    """Traces some steps of all ranks, and writes ``trace.json`` when they are over."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._tracing: Tracing | None = None

    def on_run_begin(self, run: RunView) -> None:
        """Begin with the next step."""
        self._tracing = Tracing(self._steps, run)

    def on_step_end(self, run: RunView, step: Step) -> None:
        """Add the step; collective after the last one."""
        end = step.start + step.seconds
        if self._tracing is not None and self._tracing.add_step(run.position.steps, step.start, end):
            self._write(run, self._tracing)

    def on_run_end(self, run: RunView) -> None:
        """Write the trace of a run that had fewer steps."""
        if self._tracing is not None:
            self._write(run, self._tracing)

    def _write(self, run: RunView, tracing: "Tracing") -> None:
        """Write the trace; collective. No step's time includes this."""
        self._tracing, traces = None, tracing.end()
        if tracing.steps == 0:
            run.progress.say("trace: no step: only those after the first of this process are traced")
        elif (folder := run.folder) is not None:
            content = json.dumps(merged(traces))
            if folder.attempt(TRACE, lambda: folder.write_file(TRACE, content)):
                error = max(trace.offset.error for trace in traces)
                run.report(Traced(str(folder.path / TRACE), tracing.steps, error))
        run.restart_step_clock()


@dataclass(frozen=True)
class RankTrace:
    """The spans of one rank, by its own clock."""

    host: str
    offset: ClockOffset
    spans: list[Span]


class Tracing:
    """Records ``steps`` steps after the first one, which is slower than the others."""

    def __init__(self, steps: int, run: RunView) -> None:
        self._left, self._run = steps, run
        self._recorder: Recorder | None = None
        self.steps = 0  # recorded so far

    def add_step(self, number: int, start: float, end: float) -> bool:
        """Count a step, with its times by the transport's clock; return whether it is the last one."""
        if self._recorder is None:
            self._recorder = Recorder()
            self._run.record(self._recorder)
            return False
        self._recorder.add(f"step {number}", start, end)
        self.steps += 1
        return self.steps == self._left

    def end(self) -> list[RankTrace]:
        """Stop recording, and return the spans of all ranks in order; collective, between two steps."""
        self._run.record(None)
        spans = [] if self._recorder is None else self._recorder.spans
        world = self._run.topology.world
        return world.allgather_objects(RankTrace(world.host, clock_offset(world), spans))


def merged(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """Return a trace of all ranks: a process for each, whose threads are its loop and its engine.

    All times are by rank 0's clock, in microseconds since the first span of any rank.
    """
    starts = [span.start - trace.offset.seconds for trace in traces for span in trace.spans]
    first = min(starts, default=0.0)
    events = [event for rank, trace in enumerate(traces) for event in _events(rank, trace, first)]
    errors = {"clock_error_seconds": [trace.offset.error for trace in traces]}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": errors}


def _events(rank: int, trace: RankTrace, first: float) -> Iterator[dict[str, Any]]:
    """Yield the names of a rank and its threads, and its spans by thread and time, outer before inner."""
    yield _metadata("process_name", rank, 0, name=f"rank {rank} ({trace.host})")
    yield _metadata("process_sort_index", rank, 0, sort_index=rank)
    for thread, number in THREADS.items():
        yield _metadata("thread_name", rank, number, name=thread)
    for span in sorted(trace.spans, key=lambda span: (THREADS[span.thread], span.start, -span.end)):
        yield {
            "name": span.name,
            "ph": "X",
            "pid": rank,
            "tid": THREADS[span.thread],
            "ts": 1e6 * (span.start - trace.offset.seconds - first),
            "dur": 1e6 * (span.end - span.start),
        }


def _metadata(kind: str, rank: int, thread: int, **values: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": thread, "args": values}
