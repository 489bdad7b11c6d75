"""A schedule is its closed form at every step, exact at both ends, and comes back from YAML as it was."""

import math
import random
from functools import partial

import pytest

from tests.launching import DIGITS
from tests.training.refusal import refused
from training.config.config import ConfigurationError, load
from training.config.schedules import (
    SCHEDULES,
    Cosine,
    Drops,
    Linear,
    MomentumLine,
    Noam,
    Polynomial,
    Schedule,
    Span,
    Warmup,
    momentum_at,
)

EPOCH = Span(steps=80, epoch_steps=8, global_batch=1024)

COSINE = "{schedule: cosine, start: 0.4, end: 0.01, per_batch: 256, warmup: {start: 0.1, epochs: 0.5}}"
ONE_OF_EACH = {
    "linear": "{schedule: linear, start: 0.1, end: 0.3, warmup: {start: 0.0, steps: 3}}",
    "cosine": COSINE,
    "step": "{schedule: step, start: 0.1, factor: 0.2, at_epochs: [2, 4.5]}",
    "polynomial": "{schedule: polynomial, start: 1, end: 0.001, power: 2}",
    "noam": "{schedule: noam, scale: 2.0, warmup_steps: 10, model_size: 512, per_batch: 64}",
}

ENDS = [(0.1, 0.0), (0.0, 0.3), (0.1, 0.3), (1e-9, 7.7), (0.7, 0.7)]
LINES = [Linear, Cosine, partial(Polynomial, power=2.5)]


def rates(schedule: Schedule, steps: int) -> list[float]:
    return [schedule.at(step, steps) for step in range(steps)]


@pytest.mark.parametrize("line", LINES, ids=["linear", "cosine", "polynomial"])
def test_both_ends_are_exact_and_one_step_is_the_start(line):
    generator = random.Random(7)
    pairs = [*ENDS, *((generator.random(), generator.random()) for _ in range(500))]
    for start, end in pairs:
        steps = generator.randint(2, 1000)
        schedule = line(start=start, end=end)
        assert schedule.at(0, steps) == start
        assert schedule.at(steps - 1, steps) == end
        assert schedule.at(0, 1) == start


def test_the_cosine_is_half_way_in_the_middle_and_flat_at_its_ends():
    values = rates(Cosine(start=0.8, end=0.2), 5)
    half = 0.6 * math.sqrt(0.5) / 2
    assert values == pytest.approx([0.8, 0.5 + half, 0.5, 0.5 - half, 0.2], abs=1e-15)  # float64 rounding


@pytest.mark.parametrize("power", [0.5, 1, 2, 9])
def test_the_polynomial_is_the_power_of_what_is_left(power):
    values = rates(Polynomial(start=3.0, end=1.0, power=power), 9)
    assert values == pytest.approx([1 + 2 * (1 - step / 8) ** power for step in range(9)], abs=1e-14)


def test_steps_fall_at_shares_epochs_or_steps_of_the_phase():
    parts = [1.0] * 40 + [0.5] * 20 + [0.25] * 20
    for at in ({"at_shares": [0.5, 0.75]}, {"at_epochs": [5, 7.5]}, {"at_steps": [40, 60]}):
        schedule = Drops(start=1.0, factor=0.5, **at).resolved(EPOCH)
        assert schedule.at_steps == [40, 60]
        assert rates(schedule, 80) == parts


def test_a_share_that_rounding_puts_above_a_step_is_that_step():
    assert 0.07 * 100 > 7
    values = rates(Drops(start=1.0, factor=0.5, at_shares=[0.07]).resolved(Span(100, 10, 1)), 100)
    assert values.count(1.0) == 7


def test_noam_rises_in_a_line_to_its_peak_and_falls_with_the_root():
    schedule = Noam(scale=2.0, warmup_steps=16, model_size=64)
    values = rates(schedule, 64)
    peak = 2.0 / 8 / 4
    assert values[:16] == pytest.approx([peak * (step + 1) / 16 for step in range(16)], rel=1e-15)
    assert values[63] == peak / 2
    assert max(values) == values[15] == peak


def test_the_schedule_begins_where_the_warm_up_ends_and_has_the_other_steps():
    schedule = Linear(start=0.8, end=0.0, warmup=Warmup(start=0.2, steps=3))
    assert rates(schedule, 8) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.6, 0.4, 0.2, 0.0], abs=1e-15)
    assert schedule.at(3, 8) == 0.8
    bare, warm = Cosine(start=0.8, end=0.1), Cosine(start=0.8, end=0.1, warmup=Warmup(start=0.0, steps=5))
    assert rates(warm, 25)[5:] == rates(bare, 20)


def test_drops_are_counted_from_the_beginning_of_the_warm_up():
    schedule = Drops(start=1.0, factor=0.5, at_epochs=[5], warmup=Warmup(start=0.0, epochs=1)).resolved(EPOCH)
    assert [schedule.at(step, 80) for step in (0, 4, 8, 39, 40)] == [0.0, 0.5, 1.0, 1.0, 0.5]


def test_per_batch_multiplies_all_but_the_start_of_the_warm_up():
    span = Span(steps=80, epoch_steps=8, global_batch=1024)
    line = Linear(start=0.1, end=0.01, per_batch=256, warmup=Warmup(start=0.1, steps=8)).resolved(span)
    assert (line.start, line.end, line.per_batch) == (0.4, 0.04, None)
    assert line.at(0, 80) == 0.1
    assert line.at(8, 80) == 0.4
    assert line.at(79, 80) == 0.04
    assert Noam(scale=1.0, warmup_steps=4, model_size=4, per_batch=2048).resolved(span).scale == 0.5
    drop = Drops(start=0.1, factor=0.1, at_steps=[40], per_batch=512).resolved(span)
    assert drop.at(0, 80) == 0.2
    assert Linear(start=0.1, end=0.01).resolved(span) == Linear(start=0.1, end=0.01)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            Linear(start=1, end=0, warmup=Warmup(start=0.0, epochs=10)),
            "warmup.epochs: expected fewer than the 80 steps",
        ),
        (Drops(start=1, factor=0.1, at_epochs=[5, 10]), "at_epochs: expected places in the steps 1 to 79"),
        (
            Drops(start=1, factor=0.1, at_steps=[10], warmup=Warmup(start=0.0, epochs=2)),
            "at_steps: expected places in the steps 16 ",
        ),
    ],
)
def test_a_part_that_lies_outside_the_phase_is_refused(schedule, message):
    with refused(message):
        schedule.resolved(EPOCH)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_comes_back_from_the_written_configuration(tmp_path, name):
    words = [f"phases.0.learning_rate={ONE_OF_EACH[name]}", "phases.0.momentum={start: 0.98, end: 0.9}"]
    config = load(DIGITS, words)
    given = config.phases[0].learning_rate
    assert type(given) is SCHEDULES[name]
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    again = load(tmp_path / "config.yaml")
    assert again == config
    assert type(again.phases[0].learning_rate) is SCHEDULES[name]


def test_the_command_line_reaches_into_a_schedule_and_replaces_one():
    words = [f"phases.0.learning_rate={COSINE}", "phases.0.learning_rate.warmup.epochs=2"]
    assert load(DIGITS, words).phases[0].learning_rate.warmup == Warmup(start=0.1, epochs=2)
    replaced = load(
        DIGITS, [*words, "phases.0.learning_rate={schedule: step, start: 1, factor: 0.1, at_steps: [3]}"]
    )
    assert replaced.phases[0].learning_rate == Drops(start=1, factor=0.1, at_steps=[3])


def test_the_momentum_of_a_phase_is_a_number_a_line_or_that_of_the_optimizer():
    optimizer = "optimizer={name: sgd, momentum: 0.8}"
    config = load(DIGITS, [optimizer, "phases.1.momentum={start: 0.98, end: 0.9}"])
    assert [config.momentum_of(phase) for phase in config.phases] == [0.8, MomentumLine(start=0.98, end=0.9)]
    line = config.momentum_of(config.phases[1])
    assert [momentum_at(line, step, 3) for step in range(3)] == [0.98, pytest.approx(0.94), 0.9]
    assert momentum_at(0.8, 2, 3) == 0.8
    none = load(DIGITS, [optimizer, "phases.0.momentum=0"])
    assert none.momentum_of(none.phases[0]) == 0.0


WRONG = {
    "schedule: cosin, start: 1": '.schedule: unknown schedule "cosin" (known: linear, cosine, step, poly',
    "schedule: cosine, strt: 1": '.strt: unknown key, did you mean "start"? (known here: schedule, per_batch',
    "schedule: cosine, start: 1": ".end: missing, expected a value",
    "schedule: polynomial, start: 1, end: 0, power: 0": ".power: expected a number above 0, got 0",
    "start: 1, end: 0, per_batch: 0": ".per_batch: expected a whole number from 1, got 0",
    "start: 1, end: 0, warmup: 3": ".warmup: expected the keys start, got 3",
    "start: 1, end: 0, warmup: {start: 0}": ".warmup: expected one of steps, epochs, got none",
    "schedule: step, start: 1, factor: 0.1": ": expected one of at_epochs, at_steps, at_shares, got none",
    "schedule: step, start: 1, factor: 0.1, at_epochs: [3, 2]": ".at_epochs: expected one place or more",
    "schedule: step, start: 1, factor: 0.1, at_shares: [1.0]": ".at_shares[0]: expected a number in (0, 1)",
    "momentum=true": ": expected a number in [0, 1), or the keys start and end, got True",
    "momentum={start: 1, end: 0}": ".start: expected a number in [0, 1), got 1",
    "momentum={start: 0.5, ed: 0}": '.ed: unknown key, did you mean "end"? (known here: start, end)',
}


@pytest.mark.parametrize("given", WRONG)
def test_a_wrong_schedule_is_one_line_with_key_value_and_what_was_expected(given):
    word = given if given.startswith("momentum=") else f"learning_rate={{{given}}}"
    with refused(f"phases[0].{word.partition('=')[0]}{WRONG[given]}", ConfigurationError):
        load(DIGITS, [f"phases.0.{word}"])
