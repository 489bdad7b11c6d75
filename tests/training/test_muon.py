"""Muon in runs: local steps on several replicas, work that ranks share, checkpoints, and what is refused."""

import numpy as np
import pytest

from commlib.transport import simulated
from tests.extent import more
from tests.training.refusal import refused
from tests.training.replicas import check_same, config_of, flat, replica_of, resumed, saved, take
from tests.training.small import trainer
from tests.training.test_local_steps import DILOCO, LAST
from training.config.config import ConfigurationError

MUON = "optimizer={name: muon, weight_decay: 0.1}"


def slots_of(replica):
    return {name: array for name, array in replica.optimizer_state().items() if name != "iterations"}


@pytest.mark.parametrize("precision", ["float32", *more("bfloat16")])
def test_replicas_take_muon_s_steps_alone_and_agree_at_the_end_of_a_round(precision):
    two_bits = {"local_steps": 3, "reducer": "{name: torus2d, values: lloyd2}", "outer": DILOCO}
    config = config_of({**two_bits, "local": "rank"}, words=(MUON, f"precision={precision}"))

    def body(comm):
        replica, seen = replica_of(comm, config, [1, 1, 1]), []
        for step in range(1, 7):
            report = take(replica, step)
            seen.append((flat(replica), report.traffic.sent.inter, replica.parts.optimizer.lines()))
        return seen, slots_of(replica)

    ranks = simulated.run(body, 3)
    for step in range(6):
        weights = [seen[step][0].tobytes() for seen, _ in ranks]
        ends = step in (2, 5)
        assert len(set(weights)) == (1 if ends else 3)
        assert all((seen[step][1] > 0) == ends for seen, _ in ranks)  # nothing is shared within a round
    assert ranks[0][0][0][2] == ["matrices are orthogonalised in the graph of each rank"]
    for _, slots in ranks:
        assert slots["hidden/kernel/mean"].any()
        assert not slots["hidden/kernel/square"].any()  # a matrix has a momentum alone
        assert slots["logits/kernel/square"].all()  # of AdamW


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"reducer": "{name: hitopk, density: 0.1}"}, ("optimizer.newton_schulz=parts",)),
        ({"reducer": "dense"}, ("optimizer.sharded=true",)),
    ],
    ids=["in parts", "sharded"],
)
def test_ranks_go_on_to_the_bit(tmp_path, keys, words):
    config = config_of(keys, words=(MUON, *words))
    whole = simulated.run(lambda comm: saved(comm, config, tmp_path, LAST, (6,)), 2)
    again = simulated.run(lambda comm: resumed(comm, config, tmp_path / "6", LAST), 2)
    check_same(whole, again, 6, LAST)


def test_work_that_ranks_share_gives_all_ranks_the_weights_that_each_would_compute():
    def trained(*words):
        config = config_of({"reducer": "dense"}, words=(MUON, *words))

        def body(comm):
            replica = replica_of(comm, config)
            for step in range(1, 5):
                take(replica, step)
            return flat(replica), slots_of(replica), replica.parts.optimizer.lines()

        ranks = simulated.run(body, 2)
        assert len({weights.tobytes() for weights, _, _ in ranks}) == 1
        return ranks[0]

    expected, slots, lines = trained("optimizer.newton_schulz=local")
    assert lines == ["orthogonalisation locally: as asked for"]
    weights, own, lines = trained("optimizer.newton_schulz=parts")
    assert lines == ["orthogonalisation in parts: as asked for"]
    assert weights.tobytes() == expected.tobytes()
    assert all(own[name].tobytes() == slots[name].tobytes() for name in slots)
    weights, own, lines = trained("optimizer.sharded=true")
    assert lines == ["weights are updated in parts in phases [1]"]
    # The products are those of another graph, which TensorFlow may compute in another order.
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-5)
    assert own.keys() == slots.keys()


def test_a_model_without_matrices_is_refused(tmp_path):
    said = (
        "optimizer: adamw: expected a matrix whose path does not match it, for Muon to orthogonalise; "
        "got '(^|/)(embeddings$|logits/)', and none in 2 variables (logits/kernel, …)"
    )
    with refused(said, ConfigurationError):
        trainer(tmp_path, "optimizer=muon")
