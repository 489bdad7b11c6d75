"""What happens in a run: the lines that a user reads, and the records beside them."""

import json
from types import SimpleNamespace

import pytest

from tests.launching import DIGITS
from tests.training.small import ALONE
from tests.training.test_summary import TASK, epoch
from training.config.config import load
from training.results import Position, Slowest, StageMeans
from training.run import build, events
from training.run.events import live_line

AT = Position(phase=1, epoch=2, step=3, phase_steps=23, steps=43, samples=192, run_epoch=4)


def test_a_switch_tells_what_is_held_back_in_a_line_and_a_record_that_json_can_hold():
    event = events.switched("hitopk", "dense", 0.12345)
    line = "switch from hitopk to dense: the residual (norm 0.123 on rank 0) goes into the next step"
    assert list(event.lines()) == [line]
    assert json.loads(json.dumps(event.record(), allow_nan=False)) == event.record()


def ended(**changes):
    this = SimpleNamespace(steps=40, epoch_steps=20, epochs=2, result=SimpleNamespace(reducer="hitopk"))
    return events.epoch_ended(epoch(**changes), TASK, [this], Position(phase_steps=20))


def test_records_are_flat():
    means = StageMeans({"select": 0.5}, 0.25, 0.75, Slowest(3, 0.125))
    record = ended(stages=means).record()
    assert (record["top1"], record["images_per_second"]) == (0.9, 1234.5)
    assert not {"stages", "metrics", "throughput"} & set(record)
    assert (record["stage_seconds"], record["slowest"]) == ({"select": 0.5}, {"rank": 3, "excess": 0.125})
    assert (record["hidden_seconds"], record["hidden_share"]) == (0.25, 0.75)
    # two epochs have ended before the third, whose phase has another
    assert [line[:12] for line in ended().lines()] == ["epoch  3/4  "]


def test_the_live_line_tells_the_time_that_is_left_of_the_phase():
    line = "epoch 5  step 23/40 of hitopk at 6 px  loss 0.250 (rank 0)"
    phases = [SimpleNamespace(steps=40, result=SimpleNamespace(reducer="hitopk", input="6 px"))] * 2
    assert live_line(phases, AT, 0.25, None) == line
    times = "  hidden 83%  slowest rank 3 (+12%)"
    timed = live_line(phases, AT, 0.25, 3725.4, times)
    assert timed == f"{line}{times}  1:02:05 left of phase 2/2"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (10, "the second moment is frozen after 10 of the 10 steps of phase 1"),
        (11, "the second moment is frozen after 1 of the 2,000 steps of phase 2"),
        (2011, "optimizer.freeze_variance=2011 has no effect: the run has 2010 steps"),
    ],
)
def test_a_run_tells_when_the_variance_is_frozen(given, line):
    config = load(DIGITS, [*ALONE, "optimizer=adam", f"optimizer.freeze_variance={given}"])
    assert build.how_the_variance_is_frozen(config, [10, 2000]) == [line]
    assert build.how_the_variance_is_frozen(load(DIGITS, list(ALONE)), [10]) == []
