"""A schedule is its closed form at every step, exact at both ends, and comes back from YAML as it was."""

import math
import random
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from commlib.density import exponential
from training.config.config import ConfigurationError, load
from training.config.records import Cache
from training.config.schedules import (
    SCHEDULES,
    Cosine,
    DensityWarmup,
    Drops,
    Linear,
    MomentumLine,
    Noam,
    Polynomial,
    Schedule,
    Span,
    Warmup,
    cosine,
    linear,
    momentum_at,
    polynomial,
)

DIGITS = Path(__file__).parents[2] / "configs" / "digits.yaml"
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
LINES = [linear, cosine, lambda *where: polynomial(*where, power=2.5)]


def rates(schedule: Schedule, steps: int) -> list[float]:
    return [schedule.at(step, steps) for step in range(steps)]


def of_phase(words: str) -> Schedule:
    return load(DIGITS, [f"phases.0.learning_rate={words}"]).phases[0].learning_rate


@pytest.mark.parametrize("line", LINES, ids=["linear", "cosine", "polynomial"])
def test_both_ends_are_exact_and_one_step_is_the_start(line):
    generator = random.Random(7)
    pairs = [*ENDS, *((generator.random(), generator.random()) for _ in range(500))]
    for start, end in pairs:
        steps = generator.randint(2, 1000)
        assert line(0, steps, start, end) == start
        assert line(steps - 1, steps, start, end) == end
        assert line(0, 1, start, end) == start


def test_a_line_without_a_schedule_is_the_formula_it_always_was_to_the_bit():
    start, end, steps = 0.8, 0.1, 977
    schedule = of_phase("{start: 0.8, end: 0.1}")
    assert type(schedule) is Linear
    formula = [start + (end - start) * step / (steps - 1) for step in range(steps)]
    assert rates(schedule, steps)[:-1] == formula[:-1]
    assert schedule.at(steps - 1, steps) == 0.1 != formula[-1]  # which misses it by a rounding


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
    assert rates(Drops(start=1.0, factor=0.5, at_shares=[0.5, 0.75]), 80) == parts


def test_a_share_that_rounding_puts_above_a_step_is_that_step():
    assert 0.07 * 100 > 7
    values = rates(Drops(start=1.0, factor=0.5, at_shares=[0.07]), 100)
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


def test_epochs_of_a_warm_up_are_so_many_steps():
    schedule = Linear(start=1.0, end=0.0, warmup=Warmup(start=0.0, epochs=2.5)).resolved(EPOCH)
    assert schedule.warmup == Warmup(start=0.0, steps=20)
    assert schedule.at(20, 80) == 1.0


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


def test_what_needs_to_be_resolved_gives_no_rate_before():
    for schedule in (
        Linear(start=0.1, end=0.1, per_batch=256),
        Linear(start=0.1, end=0.1, warmup=Warmup(start=0.0, epochs=1)),
        Drops(start=0.1, factor=0.1, at_epochs=[1]),
    ):
        with pytest.raises(AssertionError, match="resolve the schedule first"):
            schedule.at(0, 80)
        assert schedule.resolved(EPOCH).at(79, 80) > 0


@pytest.mark.parametrize("step", [-1, 5])
def test_a_step_outside_the_phase_is_a_mistake_of_the_program(step):
    for schedule in (Linear(start=1.0, end=0.0), Noam(scale=1.0, warmup_steps=1, model_size=1)):
        with pytest.raises(AssertionError, match=f"step {step} of 5"):
            schedule.at(step, 5)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            Linear(start=1.0, end=0.0, warmup=Warmup(start=0.0, epochs=10)),
            "warmup.epochs: expected fewer than the 80 steps of the phase, got 10 (80 steps)",
        ),
        (
            Cosine(start=1.0, end=0.0, warmup=Warmup(start=0.0, steps=80)),
            "warmup.steps: expected fewer than the 80 steps of the phase, got 80 (80 steps)",
        ),
        (
            Drops(start=1.0, factor=0.1, at_epochs=[5, 10]),
            "at_epochs: expected places in the steps 1 to 79 of the phase, got [5.0, 10.0] (steps [40, 80])",
        ),
        (
            Drops(start=1.0, factor=0.1, at_steps=[10], warmup=Warmup(start=0.0, epochs=2)),
            "at_steps: expected places in the steps 16 to 79 of the phase, got [10] (steps [10])",
        ),
        (
            Drops(start=1.0, factor=0.1, at_shares=[0.001]),
            "at_shares: expected places in the steps 1 to 79 of the phase, got [0.001] (steps [0])",
        ),
    ],
)
def test_a_part_that_lies_outside_the_phase_is_refused(schedule, message):
    with pytest.raises(ValueError) as caught:
        schedule.resolved(EPOCH)
    assert str(caught.value) == message


def test_there_is_one_of_each_schedule_here():
    assert list(ONE_OF_EACH) == list(SCHEDULES)


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
    resolved = [each.phases[0].learning_rate.resolved(EPOCH) for each in (config, again)]
    assert rates(resolved[0], 80) == rates(resolved[1], 80)


def test_what_the_file_says_is_what_the_record_holds():
    written = yaml.safe_load(load(DIGITS, [f"phases.0.learning_rate={COSINE}"]).to_yaml())
    assert written["phases"][0]["learning_rate"] == yaml.safe_load(COSINE)


def test_the_command_line_reaches_into_a_schedule_and_replaces_one():
    words = [f"phases.0.learning_rate={COSINE}", "phases.0.learning_rate.warmup.epochs=2"]
    assert load(DIGITS, words).phases[0].learning_rate.warmup == Warmup(start=0.1, epochs=2)
    replaced = load(
        DIGITS, [*words, "phases.0.learning_rate={schedule: step, start: 1, factor: 0.1, at_steps: [3]}"]
    )
    assert replaced.phases[0].learning_rate == Drops(start=1.0, factor=0.1, at_steps=[3])


def test_the_momentum_of_a_phase_is_a_number_a_line_or_that_of_the_optimizer():
    optimizer = "optimizer={name: sgd, momentum: 0.8}"
    config = load(DIGITS, [optimizer, "phases.1.momentum={start: 0.98, end: 0.9}"])
    assert [config.momentum_of(phase) for phase in config.phases] == [0.8, MomentumLine(start=0.98, end=0.9)]
    line = config.momentum_of(config.phases[1])
    assert [momentum_at(line, step, 3) for step in range(3)] == [0.98, pytest.approx(0.94), 0.9]
    assert momentum_at(0.8, 2, 3) == 0.8
    none = load(DIGITS, [optimizer, "phases.0.momentum=0"])
    assert none.momentum_of(none.phases[0]) == 0.0


def test_a_density_warm_up_gives_the_densities_of_commlib():
    assert DensityWarmup(start=0.25, epochs=4).densities(0.001) == exponential(0.25, 0.001, 4)
    with pytest.raises(ValidationError, match=r"expected a number in \(0, 1\], got 0"):
        DensityWarmup(start=0, epochs=4)


WRONG = [
    ('schedule: cosin, start: 1',
     '.schedule: unknown schedule "cosin" (known: linear, cosine, step, polynomial, noam), '
     'did you mean "cosine"?'),
    ('schedule: [a], start: 1',
     '.schedule: unknown schedule "[\'a\']" (known: linear, cosine, step, polynomial, noam)'),
    ('schedule: cosine, strt: 1',
     '.strt: unknown key, did you mean "start"? (known here: schedule, per_batch, start, warmup, end)'),
    ("schedule: cosine, start: 1", ".end: missing, expected a value"),
    ("schedule: polynomial, start: 1, end: 0", ".power: missing, expected a value"),
    ("schedule: polynomial, start: 1, end: 0, power: 0", ".power: expected a number above 0, got 0"),
    ('start: 1, end: 0, power: 2',
     '.power: unknown key (known here: schedule, per_batch, start, warmup, end)'),
    ("start: 1, end: 0, per_batch: 0", ".per_batch: expected a whole number from 1, got 0"),
    ("start: 1, end: 0, warmup: 3", ".warmup: expected the keys start, got 3"),
    ("start: 1, end: 0, warmup: {start: 0}", ".warmup: expected one of steps, epochs, got none"),
    ('start: 1, end: 0, warmup: {start: 0, steps: 1, epochs: 2}',
     '.warmup: expected one of steps, epochs, got steps and epochs'),
    ('start: 1, end: 0, warmup: {start: 0, epochs: .inf}',
     '.warmup.epochs: expected a number above 0, got inf'),
    ("schedule: step, start: 1, factor: 2, at_steps: [2]", ".factor: expected a number in (0, 1), got 2"),
    ("schedule: step, start: 1, factor: 0.1", ": expected one of at_epochs, at_steps, at_shares, got none"),
    ('schedule: step, start: 1, factor: 0.1, at_epochs: [3, 2]',
     '.at_epochs: expected one place or more, each after the one before, got [3.0, 2.0]'),
    ('schedule: step, start: 1, factor: 0.1, at_steps: []',
     '.at_steps: expected one place or more, each after the one before, got []'),
    ('schedule: step, start: 1, factor: 0.1, at_epochs: [0]',
     '.at_epochs[0]: expected a number above 0, got 0'),
    ("schedule: step, start: 1, factor: 0.1, at_epochs: 2", ".at_epochs: expected a valid list, got 2"),
    ('schedule: step, start: 1, factor: 0.1, at_shares: [1.0]',
     '.at_shares[0]: expected a number in (0, 1), got 1.0'),
    ('schedule: noam, scale: 1, warmup_steps: 0, model_size: 1',
     '.warmup_steps: expected a whole number from 1, got 0'),
    ("momentum=1", ": expected a number in [0, 1), or the keys start and end, got 1"),
    ("momentum=true", ": expected a number in [0, 1), or the keys start and end, got True"),
    ("momentum={start: 1, end: 0}", ".start: expected a number in [0, 1), got 1"),
    ('momentum={start: 0.5, ed: 0}', '.ed: unknown key, did you mean "end"? (known here: start, end)'),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_a_wrong_schedule_is_one_line_with_key_value_and_what_was_expected(given, message):
    word = given if given.startswith("momentum=") else f"learning_rate={{{given}}}"
    with pytest.raises(ConfigurationError) as caught:
        load(DIGITS, [f"phases.0.{word}"])
    assert str(caught.value) == f"{DIGITS}: phases[0].{word.partition('=')[0]}{message}"


def test_every_record_names_its_own_keys():
    keys = ", ".join(Cache.model_fields)
    for word, message in {
        "cache.dsk=auto": f'cache.dsk: unknown key, did you mean "disk"? (known here: {keys})',
        "cache=3": f"cache: expected the keys {keys}, got 3",
    }.items():
        with pytest.raises(ConfigurationError) as caught:
            load(DIGITS, [word])
        assert str(caught.value) == f"{DIGITS}: {message}"
