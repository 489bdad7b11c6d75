"""Fragments and delays with real models: threads, checkpoints, rounds that fail, and whole runs."""

import numpy as np
import pytest

from commlib.trace import ENGINE, Recorder
from commlib.transport import simulated
from tests.extent import more
from tests.gpu.test_training import batch_of
from tests.training.refusal import refused
from tests.training.replicas import Replica, replica_of
from tests.training.small import crash_after, metrics_of, phase, trainer
from tests.training.stored import newest, save_whole
from tests.training.test_local_steps import (  # noqa: F401 - a fixture is used by its name
    RATE,
    _small_model,
    config_of,
    flat,
    noted,
    state_of,
)
from training.checkpoint.folders import Checkpoints
from training.checkpoint.places import Folder
from training.config.config import ConfigurationError
from training.results import ALL_FRAGMENTS, StepHyperparameters

SPARSE = "{name: hitopk, density: 0.1}"
OUTER = "rate: 0.7, momentum: 0.9, nesterov: true"
STREAMED = {
    "local_steps": 6,
    "local": "rank",
    "reducer": SPARSE,
    "outer": f"{{{OUTER}, fragments: 2, delay: 2}}",
}
EAGER = STREAMED | {"outer": f"{{{OUTER}, fragments: 3, delay: 1, update: eager}}"}
ADAMW = "optimizer={name: adamw}"


def pace(only, step, last):
    """Return the hyperparameters of a step, numbered from 1, of which there are ``last``."""
    schedule = only.schedule
    if step == last:
        return StepHyperparameters(RATE, 0.9, schedule.since(step), ALL_FRAGMENTS)
    ends = schedule.since(step) if schedule.arrives(step) else 0
    return StepHyperparameters(RATE, 0.9, ends, schedule.leaving(step))


def take(replica, step, last=1000, *, spoilt=False):
    (only,) = replica.config.phases
    if spoilt:
        bias = replica.variables[-1]
        before = bias.numpy()
        bias.assign(np.full(bias.shape, np.nan, np.float32))
    batch = batch_of(replica.topology.world.rank, step)
    report = replica.step(replica.backward_of(only), batch, pace(only, step, last))[1]
    if spoilt:
        bias.assign(before)
    return report


# ----------------------------------------------------------------------------------- with a thread


def bits(comm, config, last, layout):
    replica, seen = replica_of(comm, config, layout), []
    for step in range(1, last + 1):
        report = take(replica, step, last)
        with replica.common_weights():
            common = flat(replica).tobytes()
        seen.append((flat(replica).tobytes(), common, report.traffic, report.selected, report.finite))
        replica.topology.world.allgather_objects(
            step
        )  # a callback may exchange while a fragment is under way
    state = state_of(replica)
    return replica.gradients.exchange.overlaps, seen, state, report.busy > 0


@pytest.mark.parametrize(
    "keys", [STREAMED | {"local": "node"}, EAGER, *more(STREAMED, EAGER | {"local": "node"})], ids=str
)
def test_exchanges_in_a_thread_have_the_bits_of_those_without_one(keys):
    runs = []
    for overlap in ("true", "false"):
        config = config_of(keys, words=(ADAMW, f"overlap={overlap}"))
        runs.append(simulated.run(lambda comm, config=config: bits(comm, config, 17, [2, 1]), 3))
    for threaded, plain in zip(*runs, strict=True):
        assert (threaded[0], plain[0]) == (True, False)
        assert threaded[1:3] == plain[1:3]
        assert plain[3] is False
    for step in range(17):  # on all ranks the common weights agree; at the end those are the weights
        assert len({rank[1][step][1] for rank in runs[0]}) == 1
    assert len({rank[1][-1][0] for rank in runs[0]}) == 1
    assert len({rank[1][-2][0] for rank in runs[0]}) == (2 if keys["local"] == "node" else 3)


def test_a_fragment_travels_in_the_buckets_that_it_has(tmp_path):
    config = config_of(STREAMED, words=("bucket_mib=0.0002",))

    def body(comm):
        replica, sent = replica_of(comm, config, 1), []
        for step in range(1, 13):
            report = take(replica, step)
            sent.append(
                (report.traffic.sent.inter, [each.steps for each in replica.gradients.exchange.reducers])
            )
        return replica.gradients.buckets, replica.local._fragments, replica.gradients.exchange.slices, sent

    (buckets, fragments, slices, sent), _ = simulated.run(body, 2)
    assert buckets > 2
    assert {each.start for each in fragments} <= {each.start for each in slices}
    assert [step for step, (own, _) in enumerate(sent, 1) if own] == [5, 8, 11]
    second = [each.start >= fragments[1].start for each in slices]  # its fragment leaves first, after step 3
    assert sent[4][1] == [int(each) for each in second]
    assert sent[7][1] == [1] * buckets
    assert sent[10][1] == [1 + each for each in second]


def test_a_trace_shows_the_buckets_of_a_fragment_beside_the_steps_that_hide_them():
    config = config_of(STREAMED)

    def body(comm):
        replica, recorder = replica_of(comm, config, 1), Recorder()
        replica.record(recorder)
        for step in range(1, 10):
            take(replica, step)
        spans = [each.name for each in recorder.spans if each.name.startswith(("bucket", "entries"))]
        return spans, {each.thread for each in recorder.spans if each.name in spans}

    # after the steps 3 and 6; the bound between rows of 8 that is the nearest to half of 242 is 120
    spans = ["bucket 1", "entries 120 to 242", "bucket 0", "entries 0 to 120"]
    assert simulated.run(body, 2) == [(spans, {ENGINE})] * 2


# ------------------------------------------------------------------------------------- checkpoints

LAST = 15


def state_after(replica):
    """Return weights and state of a rank; reducers only where no thread may be about to change them."""
    state, residual = state_of(replica)
    return flat(replica).tobytes(), state, residual if replica.local.rounds.leaving is None else None


def saved(comm, config, folder):
    """Train to the last step, with checkpoints; return weights and state by step."""
    replica, seen = replica_of(comm, config), {}
    for step in range(1, LAST + 1):
        take(replica, step, LAST)
        if step in (7, 8, 9, 10):
            store = Checkpoints(Folder(folder / str(step)), comm)
            shared, own = replica.shared_state(), replica.own_state()
            save_whole(store, step, shared, own)
        seen[step] = state_after(replica)
        if step in (7, 8, 9, 10):
            with replica.common_weights():
                weights = flat(replica)
            velocity = replica.local.rounds.outer.velocity
            residual = replica.gradients.exchange.residual
            seen[f"saved {step}"] = weights, shared["local_steps"]["under_way"], velocity.copy(), residual
    return seen


def resumed(comm, config, folder, last=LAST, *, spoilt=0):
    replica, checkpoint = replica_of(comm, config), newest(Checkpoints(Folder(folder), comm))
    lines, seen = replica.restore(checkpoint), {}
    seen[checkpoint.step] = state_after(replica)
    residual = replica.gradients.exchange.residual
    for step in range(checkpoint.step + 1, last + 1):
        report = take(replica, step, last, spoilt=(comm.rank, step) == (1, spoilt))
        seen[step] = state_after(replica)
    return lines, seen, report.finite, residual


@pytest.fixture(scope="module", params=["mixed", *more("eager")])
def streamed(request):
    return config_of({"mixed": STREAMED, "eager": EAGER}[request.param], words=(ADAMW,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("streaming")


@pytest.fixture(scope="module")
def whole(folder, streamed):
    return simulated.run(lambda comm: saved(comm, streamed, folder), 2)


@pytest.mark.parametrize("at", [8, 9, 10, *more(7)])
def test_ranks_go_on_to_the_bit_while_a_fragment_is_under_way(whole, folder, streamed, at):
    again = simulated.run(lambda comm: resumed(comm, streamed, folder / str(at)), 2)
    for expected, (lines, seen, *_) in zip(whole, again, strict=True):
        assert seen == {step: expected[step] for step in range(at, LAST + 1)}
        assert lines == []
    schedule = streamed.phases[0].schedule
    left = [schedule.leaving(at - later) is not None for later in range(schedule.delay)]
    assert (whole[0][f"saved {at}"][1] is not None) == any(left)
    assert whole[0][at][0] != whole[1][at][0]
    assert whole[0][LAST][0] == whole[1][LAST][0]


@pytest.mark.parametrize("world_size", [1, 3])
def test_other_ranks_begin_with_what_was_under_way(whole, folder, streamed, world_size):
    again = simulated.run(lambda comm: resumed(comm, streamed, folder / "10", 12), world_size)
    weights, under_way, velocity, _ = whole[0]["saved 10"]
    part, mean = slice(*under_way["entries"]), under_way["mean"]
    assert mean.any()
    expected = weights.astype(np.float64)
    expected[part] -= 0.7 * (mean + 0.9 * (0.9 * velocity[part] + mean))
    held_back = sum(rank["saved 10"][3].astype(np.float64) for rank in whole)
    residual = sum(rank[3].astype(np.float64) for rank in again)
    np.testing.assert_allclose(residual, held_back, atol=1e-6)  # one float32 sum
    for lines, seen, finite, _ in again:
        np.testing.assert_allclose(np.frombuffer(seen[10][0], np.float32), expected, rtol=1e-5, atol=1e-6)
        assert seen[10][0] == again[0][1][10][0]
        assert "local steps: the mean of the fragment that was under way is applied" in lines
        assert finite
        assert seen[12][0] == again[0][1][12][0]


# -------------------------------------------------------------------------------- rounds that fail


@pytest.mark.parametrize("keys", [STREAMED | {"local": "node"}, *more(STREAMED, EAGER)], ids=str)
def test_a_round_that_fails_leaves_all_that_a_step_changes_as_at_its_begin(keys):
    config = config_of(keys, words=(ADAMW,))

    def body(comm):
        replica, seen = replica_of(comm, config, [2, 1]), {}
        for step in range(1, 13):
            report = take(replica, step, spoilt=(comm.rank, step) == (1, 8))
            seen[step] = report.finite, state_of(replica), flat(replica).tobytes()
        with replica.common_weights():
            return seen, flat(replica).tobytes()

    schedule = config.phases[0].schedule
    arrivals = [step for step in range(1, 13) if schedule.arrives(step)]
    # the failed step is 8: what left after it, or after step 9, is skipped
    skipped = next(step for step in arrivals if step - schedule.delay >= 8)
    before = max(step for step in arrivals if step < skipped)
    ranks = simulated.run(body, 3)
    for seen, common in ranks:
        assert [step for step in seen if not seen[step][0]] == [skipped]
        assert seen[skipped][1] == seen[before][1]
        assert seen[skipped][2] == ranks[0][0][skipped][2]
        assert common == ranks[0][1]


# --------------------------------------------------------------------------------------- whole runs

LINEAR = phase(epochs=2, local_steps=6, outer=f"{{{OUTER}, fragments: 2, delay: 2}}")
EPOCH_STEPS = 1437 // 64


def test_a_run_tests_common_weights_and_goes_on_to_the_bit(tmp_path):
    words = ("checkpoints={every_steps: 5}", "resume=auto", "digest_every=4", ADAMW)
    whole = trainer(tmp_path / "whole", *words, phases=(LINEAR,))
    _, tested = noted(whole)
    whole.fit()
    final = flat(Replica.of(whole.parts)).tobytes()
    assert tested[1] == final != tested[0]
    lines = metrics_of(tmp_path / "whole")
    (line,) = [line["reason"] for line in lines if line["kind"] == "local_steps"]
    rounds = "6 local steps of each node to an exchange, one of 2 fragments after every 3, for which 2 more"
    assert line == f"phase 1: {rounds} have time"
    # fragments arrive after the steps 5, 8, 11, …
    assert [each["steps"] for each in lines if each["kind"] == "digest"] == [
        5,
        8,
        14,
        17,
        20,
        26,
        29,
        32,
        38,
        41,
        44,
    ]
    for steps in (21, 27):  # the checkpoints of step 20, and of 25, after which step 27 leaves
        place = tmp_path / str(steps)
        crash_after(trainer(place, *words, phases=(LINEAR,)), steps)
        again = trainer(place, *words, phases=(LINEAR,))
        again.fit()
        assert flat(Replica.of(again.parts)).tobytes() == final
        assert again.summary.metrics == whole.summary.metrics


def test_a_run_that_ends_while_a_fragment_is_under_way_has_the_weights_that_were_tested(tmp_path):
    outer = f"{{{OUTER}, fragments: 2, delay: 2}}"
    words = ("target={metric: top1, at_least: 0.01}",)
    run = trainer(tmp_path, *words, phases=(phase(epochs=2, local_steps=6, outer=outer),))
    after, tested = noted(run)
    run.fit()
    assert len(after) == EPOCH_STEPS  # 22: the second fragment left after step 21
    assert tested == [flat(Replica.of(run.parts)).tobytes()]


# ----------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("outer", "expected"),
    [
        ("{fragments: 4}", "phases[0].outer.fragments: expected a divisor of the 6 local steps, got 4"),
        ("{fragments: 0}", "phases[0].outer.fragments: expected a whole number from 1, got 0"),
        ("{fragments: 2, delay: 3}", "phases[0].outer.delay: expected fewer steps than the 3 "),
        ("{delay: 6}", "phases[0].outer.delay: expected fewer steps than the 6 "),
        ("{mixing: 0.5}", "phases[0].outer.mixing: expected none where delay is 0, got 0.5"),
        ("{delay: 1, mixing: 1}", "phases[0].outer.mixing: expected a number in [0, 1), got 1"),
        (
            "{delay: 1, update: eager, mixing: 0.5}",
            "phases[0].outer.mixing: expected none where update is eager",
        ),
        ("{update: eager}", "phases[0].outer.update: expected mixed where delay is 0, got eager"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(outer, expected):
    with refused(expected, ConfigurationError):
        config_of({"local_steps": 6, "outer": outer})


def test_more_fragments_than_variables_are_refused_in_one_line(tmp_path):
    with refused(
        "phases[0].outer.fragments: expected at most the 2 variables of the model, got 3", ValueError
    ):
        trainer(tmp_path, phases=(phase(steps=6, local_steps=3, outer="{fragments: 3}"),))


def test_local_steps_for_a_budget_are_as_many_as_fragments_and_delay_allow():
    given = "{fragments: 4, delay: 2}"
    budget = "{mbit_per_second: 1, step_seconds: 1}"
    (only,) = config_of({"reducer": "{name: auto, density: 0.1}", "budget": budget, "outer": given}).phases
    found = {steps: only.with_local_steps(steps).schedule.steps for steps in (1, 12, 13, 16, 17)}
    assert found == {1: 12, 12: 12, 13: 16, 16: 16, 17: 20}
