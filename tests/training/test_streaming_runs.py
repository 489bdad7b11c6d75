"""Fragments and delays with real models: threads, checkpoints, rounds that fail, and whole runs."""

import numpy as np
import pytest

from commlib.trace import ENGINE, Recorder
from commlib.transport import simulated
from tests.extent import more
from tests.training.refusal import refused
from tests.training.replicas import check_same, config_of, flat, replica_of, resumed, saved, state_of, take
from tests.training.small import assert_same_weights, crash_after, phase, records_of, trainer
from tests.training.test_local_steps import DILOCO, EAGER, STREAMED, noted
from training.run.checkpointing import states_of

ADAMW = "optimizer={name: adamw}"


def bits(comm, config, last, layout):
    replica, seen = replica_of(comm, config, layout), []
    for step in range(1, last + 1):
        report = take(replica, step, last)
        with replica.common_weights():
            common = flat(replica).tobytes()
        seen.append((flat(replica).tobytes(), common, report.traffic, report.selected, report.finite))
        comm.allgather_objects(step)  # a callback may exchange while a fragment is under way
    return replica.gradients.exchange.overlaps, seen, state_of(replica), report.busy > 0


@pytest.mark.parametrize("keys", [STREAMED | {"local": "node"}, *more(STREAMED, EAGER)], ids=str)
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


LAST = 15


def travelling(replica):
    """Return common weights, what is under way, the outer velocity and the residual of a rank."""
    with replica.common_weights():
        weights = flat(replica)
    under_way = states_of(replica.parts)[0]["local_steps"]["under_way"]
    return weights, under_way, replica.local.rounds.outer.velocity.copy(), replica.gradients.exchange.residual


@pytest.fixture(scope="module", params=["mixed", *more("eager")])
def streamed(request):
    return config_of({"mixed": STREAMED, "eager": EAGER}[request.param], words=(ADAMW,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("streaming")


@pytest.fixture(scope="module")
def whole(folder, streamed):
    return simulated.run(lambda comm: saved(comm, streamed, folder, LAST, (7, 8, 9, 10), note=travelling), 2)


@pytest.mark.parametrize("at", [8, 9, 10, *more(7)])
def test_ranks_go_on_to_the_bit_while_a_fragment_is_under_way(whole, folder, streamed, at):
    again = simulated.run(lambda comm: resumed(comm, streamed, folder / str(at), LAST), 2)
    check_same(whole, again, at, LAST)
    schedule = streamed.phases[0].schedule
    left = [schedule.leaving(at - later) is not None for later in range(schedule.delay)]
    assert (whole[0][at, "noted"][1] is not None) == any(left)
    assert whole[0][at][0] != whole[1][at][0]
    assert whole[0][LAST][0] == whole[1][LAST][0]


@pytest.mark.parametrize("world_size", [1, 3])
def test_other_ranks_begin_with_what_was_under_way(whole, folder, streamed, world_size):
    again = simulated.run(lambda comm: resumed(comm, streamed, folder / "10", 12), world_size)
    weights, under_way, velocity, _ = whole[0][10, "noted"]
    part, mean = slice(*under_way["entries"]), under_way["mean"]
    assert mean.any()
    expected = weights.astype(np.float64)
    expected[part] -= 0.7 * (mean + 0.9 * (0.9 * velocity[part] + mean))
    held_back = sum(rank[10, "noted"][3].astype(np.float64) for rank in whole)
    residual = sum(rank[3].astype(np.float64) for rank in again)
    np.testing.assert_allclose(residual, held_back, atol=1e-6)  # one float32 sum
    for lines, seen, finite, _ in again:
        np.testing.assert_allclose(np.frombuffer(seen[10][0], np.float32), expected, rtol=1e-5, atol=1e-6)
        assert seen[10][0] == again[0][1][10][0]
        assert "local steps: the mean of the fragment that was under way is applied" in lines
        assert finite
        assert seen[12][0] == again[0][1][12][0]


LINEAR = phase(epochs=2, local_steps=6, outer=f"{DILOCO[:-1]}, fragments: 2, delay: 2}}")
EPOCH_STEPS = 1437 // 64


def test_a_run_tests_common_weights_and_goes_on_to_the_bit(tmp_path):
    words = ("checkpoints={every_steps: 5}", "resume=auto", "digest_every=4", ADAMW)
    whole = trainer(tmp_path / "whole", *words, phases=(LINEAR,))
    _, tested = noted(whole)
    whole.fit()
    assert tested[1] == flat(whole.parts.model).tobytes() != tested[0]
    (line,) = [line["reason"] for line in records_of(tmp_path / "whole", "local_steps")]
    rounds = "6 local steps of each node to an exchange, one of 2 fragments after every 3, for which 2 more"
    assert line == f"phase 1: {rounds} have time"
    # fragments arrive after the steps 5, 8, 11, …
    digests = [each["steps"] for each in records_of(tmp_path / "whole", "digest")]
    assert digests == [5, 8, 14, 17, 20, 26, 29, 32, 38, 41, 44]
    # after the checkpoint of step 25, and before step 27, after which a fragment leaves
    crash_after(trainer(tmp_path / "crashed", *words, phases=(LINEAR,)), 27)
    again = trainer(tmp_path / "crashed", *words, phases=(LINEAR,))
    again.fit()
    assert_same_weights(again, whole)
    assert again.summary.metrics == whole.summary.metrics


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
