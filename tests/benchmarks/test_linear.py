"""Linear models: the same models, sparse against dense, and one rank against scikit-learn."""

import json

import pytest

from benchmarks import linear as linear_bench
from benchmarks.jobs import record_of
from benchmarks.linear import MOST_PASSES, LinearCase, measure_alone, measure_ranks, of_one_rank, of_ranks
from commlib.transport import simulated
from training.bench.record import WrongResult

SMALL = LinearCase("url", "logistic", "sgd", steps=2, passes=2, batch_size=20)


def records(reducers, case=SMALL):
    seen = simulated.run(lambda comm: list(measure_ranks(comm, case, reducers)), 4, 2)
    return [record_of(json.loads(each.line())) for each in seen[0]]


def test_what_stays_sparse_is_against_the_fastest_dense_one():
    torus, dense, sparse = records(["torus2d", "dense", "hitopk gap"])
    fastest = min((torus, dense), key=lambda each: each.seconds.median)
    assert (torus.peer, dense.peer, sparse.peer) == (None, None, fastest.subject)
    assert sparse.ratio == pytest.approx(fastest.seconds.median / sparse.seconds.median)
    of_exchanges = [each.more["communication"]["median"] for each in (fastest, sparse)]
    assert sparse.more["communication_ratio"] == pytest.approx(of_exchanges[0] / of_exchanges[1])
    # by the α-β model what has a tenth of the entries is many times as fast
    assert sparse.more["communication_ratio"] > 20
    assert sparse.case["rows"] == 2 * 20 * 4
    assert (
        sparse.more["entries"]["given"]
        < sparse.more["entries"]["applied"]
        < 20 * 115 * 4
        < dense.case["features"]
    )
    assert len(sparse.more["objectives"]) == 2
    assert sparse.more["accuracy"] == dense.more["accuracy"]
    assert (
        "url, logistic, sgd: 160 rows, 20 of a rank in a step, 2 × 2 ranks"
        in of_ranks([dense, sparse]).markdown()
    )


def test_another_objective_is_an_error(monkeypatch):
    wrong = {"loss": "squared_hinge"}
    given = linear_bench.checked

    def checked(keys):
        return given(keys | wrong if keys["reducer"] == "torus2d" else keys)

    monkeypatch.setattr(linear_bench, "checked", checked)
    with pytest.raises(WrongResult, match="^torus2d: expected the objective of dense after pass 1, "):
        records(["dense", "torus2d"])


def test_one_rank_is_against_scikit_learn(monkeypatch):
    monkeypatch.setattr("benchmarks.linear.RUNS", 1)
    case = LinearCase("url", "logistic", "sgd", steps=1, passes=3)
    same, sgd, liblinear = simulated.run(lambda comm: list(measure_alone(comm, case, rows=300)), 1)[0]
    assert [each.peer for each in (same, sgd, liblinear)] == ["SGDClassifier", "SGDClassifier", "LIBLINEAR"]
    assert same.case["passes"] == 3
    assert same.more["objective"] == pytest.approx(same.more["peer_objective"], rel=0.05)
    assert sgd.more["objective"] <= sgd.more["peer_objective"]
    for each in (sgd, liblinear):
        is_reached = each.more["objective"] <= each.more["peer_objective"]
        assert 1 <= each.case["passes"] <= MOST_PASSES
        assert is_reached or each.case["passes"] == MOST_PASSES
        assert ("not reached" in of_one_rank([each], "objective").markdown()) == (not is_reached)
    assert "to the peer's objective" in of_one_rank([sgd], "objective").markdown()
