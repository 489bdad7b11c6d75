"""A trace of some steps of a run: the stages of each rank's loop and engine over time, in one file.

https://ui.perfetto.dev and ``chrome://tracing`` show its format, Chrome's trace events.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from commlib.trace import ENGINE, LOOP, ClockOffset, Recorder, Span, clock_offset
from training.callbacks.callback import Callback, RunEvent, RunView
from training.results import Step

TRACE = "trace.json"
THREADS = {LOOP: 0, ENGINE: 1}


@dataclass(frozen=True)
class RankTrace:
    """The spans of one rank, by its own clock."""

    host: str
    offset: ClockOffset
    spans: list[Span]


class Profiler(Callback):
    """Traces ``steps`` steps of all ranks after the first, slower one, then writes ``trace.json``."""

    def __init__(self, steps: int) -> None:
        self._steps, self._taken = steps, 0
        self._recorder: Recorder | None = None

    def on_step_end(self, run: RunView, step: Step) -> None:
        end = step.start + step.seconds
        if self._taken < self._steps and self.add_step(run, run.position.steps, step.start, end):
            self._write(run)

    def on_run_end(self, run: RunView) -> None:
        if self._taken < self._steps:
            self._write(run)

    def add_step(self, run: RunView, number: int, start: float, end: float) -> bool:
        """Count a step, with its times by the transport's clock; return whether it is the last one."""
        if self._recorder is None:
            self._recorder = Recorder()
            run.record(self._recorder)
            return False
        self._recorder.add(f"step {number}", start, end)
        self._taken += 1
        return self._taken == self._steps

    def end(self, run: RunView) -> list[RankTrace]:
        """Stop recording, and return the spans of all ranks in order; collective, between two steps."""
        run.record(None)
        spans = [] if self._recorder is None else self._recorder.spans
        world = run.topology.world
        return world.allgather_objects(RankTrace(world.host, clock_offset(world), spans))

    def _write(self, run: RunView) -> None:
        """Write the trace; collective. No step's time includes this."""
        traces = self.end(run)
        if self._taken == 0:
            run.progress.say("trace: no step: only those after the first of this process are traced")
        elif (folder := run.folder) is not None:
            content = json.dumps(merged(traces))
            if folder.attempt(TRACE, lambda: folder.write_file(TRACE, content)):
                file, steps = str(folder.path / TRACE), f"{self._taken} step{'s' * (self._taken > 1)}"
                error = max(trace.offset.error for trace in traces)  # of the clocks
                fields = {"file": file, "steps": self._taken, "clock_error_seconds": error}
                line = f"trace of {steps}: {file} (for https://ui.perfetto.dev)"
                run.report(RunEvent("trace", fields, [line]))
        run.restart_step_clock()


def merged(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """Return a trace of all ranks, a process each, in microseconds by rank 0's clock since the first span."""
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
