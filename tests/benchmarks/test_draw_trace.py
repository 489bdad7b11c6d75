"""The picture of a trace: stages from the second step on, a row for each rank's loop and engine."""

from benchmarks.draw_trace import draw, spans
from tests.test_docs import texts


def event(name, start, duration, rank=0, thread=0):
    return {"ph": "X", "name": name, "ts": start, "dur": duration, "pid": rank, "tid": thread}


def test_a_trace_is_drawn_from_its_second_step_on(tmp_path):
    content = {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 0},
            event("step 2", 0.0, 5e6),
            event("forward_backward", 0.0, 4e6),
            event("step 3", 5e6, 2e6),
            event("forward_backward", 5e6, 1e6),
            event("bucket 0", 5.5e6, 1e6, thread=1),
            event("select", 5.5e6, 0.5e6, thread=1),
            event("step 2", 0.5e6, 4e6, rank=1),
            event("inter", 4e6, 0.25e6, rank=1, thread=1),
            event("step 3", 4.5e6, 2.5e6, rank=1),  # half a second before rank 0
            event("forward_backward", 4.5e6, 1e6, rank=1),
            event("inter", 6e6, 0.5e6, rank=1, thread=1),
        ]
    }
    found = spans(content)
    assert [(each["name"], each["ts"]) for each in found] == [
        ("forward_backward", 0.5e6),
        ("select", 1e6),
        ("forward_backward", 0.0),
        ("inter", 1.5e6),
    ]
    path = tmp_path / "trace.svg"
    draw(found, path)
    drawn = texts(path)
    assert {"rank 0, loop", "rank 0, engine", "rank 1, loop", "rank 1, engine"} <= set(drawn)
    assert {"forward backward", "select", "inter"} <= set(drawn)
    assert "update" not in drawn
