"""Local steps of real models: replicas of several ranks, one a thread, and whole runs of one rank."""

import keras
import numpy as np
import pytest

from commlib.topology import Traffic
from commlib.transport import simulated
from commlib.tuning.tuner import choose_within
from tests.extent import more
from tests.launching import DIGITS
from tests.training.refusal import refused
from tests.training.replicas import (
    RATE,
    check_same,
    config_of,
    flat,
    replica_of,
    resumed,
    saved,
    seen_of,
    state_of,
    take,
    weights_of,
)
from tests.training.small import phase, records_of, trainer
from training.callbacks.stopping import TrainingDiverged
from training.config.config import ConfigurationError, load_with_warnings
from training.receipt import problems
from training.results import StepHyperparameters
from training.run.model import OtherRun
from training.run.phases import PhaseRun

DILOCO = "{rate: 0.7, momentum: 0.9, nesterov: true}"
SAVED = {"local_steps": 4, "local": "rank", "reducer": "{name: hitopk, density: 0.1}", "outer": DILOCO}
STREAMED = SAVED | {"local_steps": 6, "outer": f"{DILOCO[:-1]}, fragments: 2, delay: 2}}"}
EAGER = SAVED | {"local_steps": 6, "outer": f"{DILOCO[:-1]}, fragments: 3, delay: 1, update: eager}}"}


@pytest.mark.parametrize(("local", "equal_within"), [("node", 2), *more(("rank", 1))])
def test_replicas_differ_within_a_round_and_all_ranks_agree_at_its_end(local, equal_within):
    config = config_of({"local_steps": 3, "local": local, "reducer": "{name: hitopk, density: 0.1}"})

    def body(comm):
        replica, seen = replica_of(comm, config, [2, 1]), []
        for step in range(1, 7):
            report = take(replica, step)
            seen.append((flat(replica).tobytes(), report.traffic.sent, report.selected))
        return seen

    ranks = simulated.run(body, 3)
    if local == "node":  # the last step of a round has both exchanges
        assert all(rank[2][1].intra > rank[1][1].intra > 0 for rank in ranks[:2])
    for step in range(6):
        weights = [rank[step][0] for rank in ranks]
        ends = step in (2, 5)
        assert len(set(weights)) == (1 if ends else 4 - equal_within)
        for rank, (_, sent, selected) in enumerate(each[step] for each in ranks):
            is_first = rank != 1  # of its node, for which it selects and sends
            assert (sent.inter > 0, selected > 0) == (ends and is_first, ends and is_first)
            inside = rank < 2 and (local == "node" or ends)  # ranks 0 and 1 share a node
            assert (sent.intra > 0) == inside


@pytest.mark.parametrize(
    ("optimizer", "keys", "layout", "rtol"),
    [
        ("{name: sgd, momentum: 0}", {"local_steps": 1, "local": "rank"}, None, 1e-5),  # θ − (θ − w) rounds
        ("{name: adamw}", {"local_steps": 4}, 2, 1e-4),  # the replica has all ranks
    ],
)
def test_local_steps_that_are_plain_training_end_where_it_does(optimizer, keys, layout, rtol):
    words = (f"optimizer={optimizer}", "clip_norm=null")
    configs = [config_of(each, words=words) for each in ({}, keys)]

    def body(comm):
        replicas = [replica_of(comm, config, layout) for config in configs]
        for step in range(1, 9):
            for replica in replicas:
                take(replica, step)
        return [flat(replica) for replica in replicas]

    for one, other in simulated.run(body, 2):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=1e-5)


def test_the_gradient_of_a_replica_is_clipped_and_no_exchange_begins_before_the_round_ends():
    words = ("optimizer={name: sgd, momentum: 0}", "clip_norm=0.001")
    config = config_of({"local_steps": 2, "local": "rank"}, words=words)

    def body(comm):
        replica = replica_of(comm, config)
        before = flat(replica)
        report = take(replica, 1)
        return np.linalg.norm(flat(replica).astype(np.float64) - before), report.traffic

    for moved, traffic in simulated.run(body, 2):
        assert moved == pytest.approx(RATE * 0.001, rel=1e-3)
        assert traffic == Traffic()


@pytest.mark.parametrize(
    ("keys", "precision", "local", "clip_norm"),
    [
        (SAVED, "float16", "node", "null"),
        (STREAMED, "float32", "node", "null"),
        (STREAMED, "float32", "rank", "null"),
        (STREAMED, "float32", "rank", "1.0"),  # the norm tells what is not finite
        *more(
            (EAGER, "float16", "node", "null"),
            (SAVED, "float32", "node", "null"),
            (SAVED, "float16", "rank", "null"),
            (EAGER, "float16", "rank", "null"),
            (SAVED, "float32", "rank", "null"),
            (EAGER, "float16", "rank", "1.0"),
        ),
    ],
)
def test_a_round_with_a_step_that_is_not_finite_leaves_every_rank_as_it_was(
    keys, precision, local, clip_norm
):
    words = ("optimizer={name: adamw}", f"precision={precision}", f"clip_norm={clip_norm}")
    config = config_of(keys | {"local": local}, words=words)

    def body(comm):
        replica, seen = replica_of(comm, config, [2, 1]), {}
        if replica.scale is not None:
            replica.scale.scale.assign(16.0)  # that of the beginning is too large
        for step in range(1, 13):
            fails, delay = (comm.rank, step) == (1, 7), config.phases[0].schedule.delay
            if fails and not delay:  # its forward pass, too, has no number
                first = replica.variables[0]
                first.assign(np.full(first.shape, np.nan, np.float32))
            report = take(replica, step, spoilt=fails and delay > 0)
            with replica.common_weights():
                common = flat(replica).tobytes()
            velocity = replica.local.rounds.outer.velocity
            kept = common, state_of(replica), None if velocity is None else velocity.tobytes()
            scale = replica.scale and float(replica.scale.scale.numpy())
            seen[step] = report.finite, flat(replica).tobytes(), kept, scale
            for statistics in replica.model.non_trainable_weights:
                assert np.isfinite(statistics.numpy()).all()
        return seen

    ranks = simulated.run(body, 3)
    keras.config.set_dtype_policy("float32")
    schedule = config.phases[0].schedule
    arrivals = [step for step in range(1, 13) if schedule.arrives(step)]
    # the failed step is 7: what leaves after it, or later, is the next to arrive and is skipped
    skipped = next(step for step in arrivals if step - schedule.delay >= 7)
    before = max(step for step in arrivals if step < skipped)
    if schedule.delay and not schedule.arrives(7):
        assert ranks[1][7][1] == ranks[1][6][1]  # its weights at once
    for seen in ranks:
        assert [step for step in seen if not seen[step][0]] == [skipped]
        assert seen[skipped][1] == seen[skipped][2][0] == ranks[0][skipped][1]  # the common weights
        assert seen[skipped][2] == seen[before][2]
        assert seen[12][2][0] == ranks[0][12][2][0]
        assert seen[before][3] is None or seen[skipped][3] == seen[before][3] / 2


def test_a_round_in_which_a_rank_has_failed_is_resumed_as_one(tmp_path, adamw):
    """The checkpoint is of step 6, in the middle of a round of four, in which rank 1 had no gradient."""

    def train(comm):
        replica = replica_of(comm, adamw)
        for step in range(1, 7):
            take(replica, step, spoilt=(comm.rank, step) == (1, 6))
            if step == 4:
                before = seen_of(replica)
        replica.save(tmp_path, 6)
        return before

    before = simulated.run(train, 2)
    again = simulated.run(lambda comm: resumed(comm, adamw, tmp_path, 8), 2)
    assert [seen[8] for _, seen, *_ in again] == before
    assert not any(finite for *_, finite, _ in again)


def test_a_test_within_a_round_sees_common_weights_and_leaves_the_replica_its_own():
    config = config_of({"local_steps": 3})

    def body(comm):
        replica = replica_of(comm, config)
        common = flat(replica)
        for step in (1, 2):
            take(replica, step)
        own = flat(replica)
        with replica.common_weights():
            tested = flat(replica)
        assert tested.tobytes() == common.tobytes() != own.tobytes()
        return own.tobytes() == flat(replica).tobytes()

    assert simulated.run(body, 1) == [True]


def test_the_outer_velocity_goes_on_in_the_next_phase():
    config = config_of(*({"local_steps": steps, "outer": DILOCO} for steps in (1, 2)))

    def body(comm):
        replica = replica_of(comm, config)
        take(replica, 1)
        before = replica.local.rounds.outer.velocity.copy()
        replica.begin(config.phases[1])
        return before.any() and before.tobytes() == replica.local.rounds.outer.velocity.tobytes()

    assert simulated.run(body, 1) == [True]


def test_between_gradients_and_differences_what_is_held_back_is_applied_as_what_it_is():
    sparse = {"reducer": "{name: hitopk, density: 0.1}"}
    local = {**sparse, "local_steps": 2, "local": "rank", "outer": "{rate: 0.5}"}
    config = config_of(sparse, local, sparse, words=("optimizer={name: sgd, momentum: 0}",))
    pace = StepHyperparameters(RATE, None)

    def body(comm):
        replica, seen = replica_of(comm, config, [2, 1]), []
        for number, each in enumerate(config.phases):
            if number:
                before, residual = flat(replica), replica.gradients.exchange.residual
                sent = replica.settle(pace).sent
                replica.begin(each)
                seen.append((before, residual, flat(replica), sent))
                assert not replica.gradients.exchange.residual.any()
            for step in (1, 2):
                assert take(replica, step, number=number).finite
        return seen

    ranks = simulated.run(body, 3)
    for number, rate in enumerate((RATE, 0.5)):  # gradients by the optimizer, differences by the outer one
        mean = np.mean([rank[number][1] for rank in ranks], axis=0, dtype=np.float64)
        assert mean.any()
        assert sum(rank[number][-1].inter for rank in ranks) > 0
        for before, _, after, _ in (rank[number] for rank in ranks):
            np.testing.assert_allclose(before - after, rate * mean, rtol=1e-4, atol=1e-6)
            assert after.tobytes() == ranks[0][number][2].tobytes()


def test_after_local_steps_all_ranks_have_the_mean_of_their_optimizers_states():
    config = config_of({"local_steps": 2, "local": "rank"}, {}, words=("optimizer={name: adamw}",))

    def slots(replica):
        return np.concatenate([slot.numpy().ravel() for slots in replica.optimizer.slots for slot in slots])

    def body(comm):
        replica = replica_of(comm, config)
        for step in (1, 2):
            take(replica, step)
        before = slots(replica)
        replica.settle(StepHyperparameters(RATE, None))
        replica.begin(config.phases[1])
        after = slots(replica)
        for step in (3, 4):
            take(replica, step, number=1)
        return before, after, flat(replica).tobytes()

    ranks = simulated.run(body, 2)
    expected = np.mean([before for before, *_ in ranks], axis=0, dtype=np.float64)
    assert np.abs(ranks[0][0] - expected).max() > 1e-6
    for _, after, weights in ranks:
        np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-9)
        assert weights == ranks[0][-1]


LAST = 10


@pytest.fixture(scope="module")
def adamw():
    return config_of(SAVED, words=("optimizer={name: adamw}",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("local_steps")


@pytest.fixture(scope="module")
def whole(folder, adamw):
    """Return what the two ranks of a run that did not stop have after each step; its checkpoints stay."""
    return simulated.run(lambda comm: saved(comm, adamw, folder, LAST, (6, 8)), 2)


@pytest.mark.parametrize("at", [6, *more(8)])
def test_ranks_go_on_to_the_bit(whole, folder, adamw, at):
    again = simulated.run(lambda comm: resumed(comm, adamw, folder / str(at), LAST), 2)
    check_same(whole, again, at, LAST)
    assert whole[0][6][0] != whole[1][6][0]  # within a round
    assert whole[0][8][0] == whole[1][8][0]


@pytest.mark.parametrize(("at", "lost"), [(6, True), *more((8, False))])
@pytest.mark.parametrize("world_size", [1, *more(3)])
def test_other_ranks_begin_with_the_common_weights(whole, folder, adamw, at, lost, world_size):
    again = simulated.run(lambda comm: resumed(comm, adamw, folder / str(at), 12), world_size)
    line = "local steps: all ranks begin with the optimizer state of rank 0"
    line += ", and the local steps of the round that was under way are lost" * lost
    for lines, seen, finite, _ in again:
        assert seen[at][0] == whole[0][at - at % 4][0]
        assert line in lines
        assert finite
        assert seen[12][0] == again[0][1][12][0]


def test_a_checkpoint_of_local_steps_is_no_checkpoint_of_gradients(tmp_path):
    local, plain = config_of({"local_steps": 2}), config_of({})
    simulated.run(lambda comm: replica_of(comm, local).save(tmp_path, 1), 1)
    expected = "^local_steps: the checkpoint is of a phase with local_steps: expected a phase without "
    with pytest.raises(OtherRun, match=expected):
        simulated.run(lambda comm: resumed(comm, plain, tmp_path, 2), 1)


EPOCH_STEPS = 1437 // 64


def noted(run):
    after, tested = [], []
    step, evaluate = run.parts.step.take, run.parts.model.evaluation.evaluate

    def note_step(*arguments):
        result = step(*arguments)
        after.append(weights_of(run.parts.model.variables).tobytes())
        return result

    def note_test(*arguments):
        tested.append(weights_of(run.parts.model.variables).tobytes())
        return evaluate(*arguments)

    run.parts.step.take, run.parts.model.evaluation.evaluate = note_step, note_test
    return after, tested


def test_tests_see_common_weights_and_the_last_round_is_shorter(tmp_path):
    run = trainer(tmp_path, phases=(phase(epochs=2, local_steps=5, outer=DILOCO), phase(steps=3)))
    after, tested = noted(run)
    run.fit()
    assert EPOCH_STEPS == 22
    assert tested == [after[20 - 1], after[44 - 1], after[47 - 1]]
    (line,) = [line["reason"] for line in records_of(tmp_path, "local_steps")]
    assert line == "phase 1: 5 local steps of each node to an exchange; its last round has 4"
    (line,) = [line["reason"] for line in records_of(tmp_path, "settle")]
    assert line.startswith("phase 2 ends local steps: what was held back (norm 0 on rank 0) is applied first")


def test_digests_are_compared_at_the_first_end_of_a_round_from_when_they_are_due(tmp_path):
    trainer(tmp_path, "digest_every=4", phases=(phase(steps=13, local_steps=3),)).fit()
    assert [line["steps"] for line in records_of(tmp_path, "digest")] == [6, 9, 12]
    (folder,) = (path.parent for path in tmp_path.rglob("metrics.jsonl"))
    assert list(problems(folder)) == []


@pytest.mark.parametrize(
    "keys", [{"local_steps": 5}, {"local_steps": 6, "outer": "{fragments: 2, delay: 2}"}]
)
def test_a_run_that_ends_within_a_round_ends_with_the_weights_that_were_tested(tmp_path, keys):
    run = trainer(tmp_path, "target={metric: top1, at_least: 0.01}", phases=(phase(epochs=2, **keys),))
    after, tested = noted(run)
    run.fit()
    assert len(after) == EPOCH_STEPS
    weights = weights_of(run.parts.model.variables).tobytes()
    assert tested == [weights]
    assert weights != after[-1]


def test_a_run_whose_rounds_all_fail_ends(tmp_path):
    run = trainer(tmp_path, phases=(phase(steps=60, local_steps=2),))
    run.model.trainable_variables[0].assign(np.full((4, 10), np.nan))
    with pytest.raises(TrainingDiverged, match="^20 rounds of local steps in a row had a NaN or an infinity"):
        run.fit()
    assert run.position.steps == 40
    assert run.phase.result.skipped_steps == 40


def with_budget(mbit_per_second, **keys):
    budget = f"{{mbit_per_second: {mbit_per_second}, step_seconds: 0.5}}"
    return config_of(
        {"reducer": "{name: auto, density: 0.1}", "budget": budget, **keys},
        words=("optimizer={name: adamw}",),
    )


@pytest.mark.parametrize(
    ("mbit_per_second", "keys"),
    [(2e-4, {"outer": DILOCO, "local": "rank"}), (1.0, {}), (1.0, {"outer": DILOCO})],
)
def test_auto_chooses_for_a_budget_what_is_then_written_out(mbit_per_second, keys):
    config = with_budget(mbit_per_second, **keys)

    def body(comm):
        replica = replica_of(comm, config, 1)
        return replica.config.phases[0], replica.gradients.config, replica.gradients.size

    (phase, reducer, size), other = simulated.run(body, 2)
    assert (phase, reducer, size) == other
    expected = choose_within(mbit_per_second * 1e6 / 8 * 0.5, [[0], [1]], size, 0.1)
    assert (reducer["name"], reducer.get("wire")) == (expected.reducer, expected.options.get("wire"))
    assert (expected.local_steps > 1) == (mbit_per_second < 1)
    assert phase.local_steps == (
        expected.local_steps if keys else None
    )  # one step without outer: plain training
    assert (phase.budget, phase.outer is not None) == (None, bool(keys))


def test_a_phase_that_is_too_short_for_its_budget_is_refused(tmp_path):
    config = with_budget(1e-7)

    def built(comm):
        replica = replica_of(comm, config, 1)
        config_now, choice = replica.config, replica.parts.choices[0]
        PhaseRun(0, config_now.phases[0], config_now, replica.parts.data, None, choice)

    expected = (
        r"^phases\[0\].budget: expected one that allows an exchange within the phase's 100 steps, "
        r"got one that does every \d+$"
    )
    with pytest.raises(ValueError, match=expected):
        simulated.run(built, 2)


WRAPPED = "{name: gtopk, wrappers: [{name: local_clipping, norm: 1.0}]}"
BUDGET = "{mbit_per_second: 2, step_seconds: 0.5}"
SECONDS = "phases[0].round_seconds: expected a number above 0, got "
OUTER = {
    "{fragments: 4}": "fragments: expected a divisor of the 6 local steps, got 4",
    "{fragments: 0}": "fragments: expected a whole number from 1, got 0",
    "{fragments: 2, delay: 3}": "delay: expected fewer steps than the 3 ",
    "{mixing: 0.5}": "mixing: expected none where delay is 0, got 0.5",
    "{delay: 1, mixing: 1}": "mixing: expected a number in [0, 1), got 1",
    "{delay: 1, update: eager, mixing: 0.5}": "mixing: expected none where update is eager",
    "{update: eager}": "update: expected mixed where delay is 0, got eager",
}


@pytest.mark.parametrize(
    ("keys", "words", "expected"),
    [
        ({"outer": "{rate: 0.7}"}, (), "phases[0].outer: expected none without local_steps"),
        ({"local": "rank"}, (), "phases[0].local: expected none without local_steps"),
        ({"budget": BUDGET}, (), "the reducer of this phase is dense, not auto"),
        ({"budget": BUDGET, "reducer": "auto", "local_steps": 5}, (), "phases[0].local_steps: "),
        ({"local_steps": 2, "local": "world"}, (), "phases[0].local: expected 'node' or 'rank'"),
        ({"local_steps": 2, "outer": "{rate: 0}"}, (), "phases[0].outer.rate: expected a number above 0"),
        ({"local_steps": 2, "outer": "{nesterov: true}"}, (), "where momentum is 0"),
        ({"local_steps": 2}, ("optimizer={name: sgd, sharded: true}",), "optimizer.sharded: "),
        ({"local_steps": 2}, ("sparse_tables=true",), "sparse_tables: "),
        ({"local_steps": 2}, ("average=0.9",), "average: expected none, "),
        ({"local_steps": 2, "reducer": WRAPPED}, (), "local_steps=2"),
        *(({"local_steps": 6, "outer": each}, (), f"phases[0].outer.{OUTER[each]}") for each in OUTER),
        ({"round_seconds": 2}, (), "phases[0].round_seconds: expected none without local_steps, got one"),
        *(({"local_steps": 4, "round_seconds": each}, (), SECONDS) for each in (0, -1.5, "soon", ".nan")),
    ],
)
def test_what_does_not_go_with_local_steps_is_refused_in_one_line(keys, words, expected):
    with refused(expected, ConfigurationError) as caught:
        config_of(keys, words=words)
    assert str(caught.value).startswith(f"{DIGITS}: {caught.value.key}: expected ")


def test_an_overlap_that_has_nothing_to_overlap_is_warned_of():
    words = [f"phases=[{phase(steps=3, local_steps=2)}]", "reducer=dense", "overlap=true"]
    (line,) = load_with_warnings(DIGITS, words).warnings
    assert line.startswith("overlap=True has no effect: every phase has local_steps")
