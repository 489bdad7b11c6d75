"""The estimator: scikit-learn's interface, alone and on simulated ranks."""

import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler

from commlib import REDUCERS, Link, Network, SparseVector, Topology
from commlib.transport import simulated
from tests.linear.made import all_rows, matrix_of, value_of
from training.linear import LinearClassifier
from training.linear.config import Settings
from training.linear.solver import choose

SLOW = {"learning_rate": {"rate": 2.0, "schedule": "power"}, "batch_size": 10}


def test_it_comes_near_the_optimum_that_scikit_learn_finds():
    matrix, labels = all_rows()
    settings = Settings(l2=0.01)
    exact = LogisticRegression(C=1 / (0.01 * len(labels)), tol=1e-8, max_iter=1000).fit(matrix, labels)
    least = value_of(settings, matrix, labels, exact.coef_[0], exact.intercept_[0])
    own = LinearClassifier(l2=0.01, epochs=60, **SLOW).fit(matrix, labels)
    found = value_of(settings, matrix, labels, own.coef_[0], own.intercept_[0])
    assert least <= found < least + 2e-3
    assert own.score(matrix, labels) == pytest.approx(exact.score(matrix, labels), abs=0.03)
    margins = matrix @ own.coef_[0] + own.intercept_[0]
    np.testing.assert_allclose(own.decision_function(matrix), margins, rtol=1e-6)
    assert (own.predict(matrix) == np.where(margins > 0, 1, -1)).all()


def test_ranks_that_give_their_rows_get_one_model_and_one_score():
    def body(comm):
        matrix, labels = matrix_of(comm.rank)
        names = np.where(labels > 0, "spam", "ham")
        own = LinearClassifier(epochs=3, reducer="ssar_split", communicator=comm, **SLOW)
        own.fit(matrix, names)
        right = float((own.predict(matrix) == names).mean())
        return own.classes_.tolist(), own.coef_.tobytes(), own.score(matrix, names), right

    seen = simulated.run(body, 3)
    assert {tuple(classes) for classes, *_ in seen} == {("ham", "spam")}
    assert len({coef for _, coef, *_ in seen}) == 1
    assert len({score for _, _, score, _ in seen}) == 1
    assert seen[0][2] == pytest.approx(np.mean([right for *_, right in seen]))


def test_auto_takes_a_sparse_one_where_links_are_slow():
    link = Link.of(microseconds=50, gbit_per_second=1)

    def body(comm):
        indices = np.arange(comm.rank, 100, 9, dtype=np.int32)
        own = SparseVector(1_000_000, indices, np.ones(len(indices), np.float32))
        return choose(Topology(comm), [own] * 3)

    choices = simulated.run(body, 4, [1] * 4, network=Network(intra=link, inter=link), cores=4)
    assert len(set(map(str, choices))) == 1
    assert REDUCERS[choices[0].name].sparse
    assert choices[0].seconds < choices[0].dense_seconds / 3


def test_a_rank_may_have_rows_of_one_class():
    def body(comm):
        matrix, labels = matrix_of(0)
        of_class = labels == (1, -1)[comm.rank]
        given, own = matrix[of_class], labels[of_class]
        model = LinearClassifier(epochs=2, reducer="dense", communicator=comm, **SLOW).fit(given, own)
        assert model.classes_.tolist() == [-1, 1]
        weights = np.arange(len(own)) + 1.0
        asked = np.where(weights < 9, own, -own)
        right = model.predict(given) == asked
        return model.score(given, asked, weights), (weights * right).sum(), weights.sum()

    (score, *_), _ = seen = simulated.run(body, 2)
    assert {each[0] for each in seen} == {score}
    assert score == pytest.approx(sum(each[1] for each in seen) / sum(each[2] for each in seen))


def test_partial_fit_goes_on_with_the_model():
    matrix, labels = all_rows()
    constant = {"learning_rate": {"rate": 0.5, "schedule": "constant"}, "batch_size": 10}
    own = LinearClassifier(l2=0.0, **constant)
    own.partial_fit(matrix[:1], labels[:1], classes=[-1, 1])
    first = own.coef_.copy()
    assert np.count_nonzero(first) == matrix[:1].nnz
    own.partial_fit(matrix, labels)
    again = LinearClassifier(l2=0.0, **constant, epochs=1).fit(matrix, labels)
    assert not np.allclose(own.coef_, again.coef_)
    losses = [own.partial_fit(matrix, labels).losses_[0] for _ in range(5)]
    assert losses == sorted(losses, reverse=True)


def test_it_is_an_estimator_of_scikit_learn():
    matrix, labels = all_rows()
    own = LinearClassifier("hinge", l1=1e-4, epochs=2)
    assert clone(own).get_params() == own.get_params()
    assert set(own.get_params()) - {"communicator"} == set(Settings.model_fields)
    defaults = {
        name: value for name, value in LinearClassifier().get_params().items() if name != "communicator"
    }
    assert Settings.model_validate(defaults) == Settings()
    pipeline = make_pipeline(MaxAbsScaler(), LinearClassifier(epochs=20, **SLOW)).fit(matrix, labels)
    assert pipeline.score(matrix, labels) > 0.85
    dense = LinearClassifier(epochs=2, **SLOW).fit(matrix.toarray(), labels)
    np.testing.assert_array_equal(dense.coef_, LinearClassifier(epochs=2, **SLOW).fit(matrix, labels).coef_)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": "squared"}, '^loss: unknown loss "squared".*squared_hinge'),
        ({"loss": "hinge", "solver": "coordinate"}, "^loss: expected logistic or squared_hinge with coord"),
        ({"l2": -1}, "^l2: expected a number from 0, got -1$"),
        ({"learning_rate": 0}, "^learning_rate.rate: expected a number above 0, got 0$"),
        ({"learning_rate": 20, "l2": 0.05}, "^learning_rate.rate: expected less than 20 with l2 = 0.05"),
        ({"reducer": {"name": "hitopk", "density": 0.1}}, "^reducer.density: expected none, as all entries"),
        ({"reducer": {"name": "hitopk", "wire": "gap+fp16"}}, "^reducer.wire: expected one without loss"),
        ({"reducer": {"name": "auto", "wire": "gap"}}, "^reducer: expected none with auto, got wire$"),
    ],
    ids=str,
)
def test_parameters_that_are_wrong_are_named_in_one_line(given, message):
    with pytest.raises(ValueError, match=message) as error:
        LinearClassifier(**given).fit(*all_rows())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda matrix, labels: (matrix, np.ones_like(labels)), "^y: expected two classes, got 1: 1$"),
        (lambda matrix, labels: (matrix, np.arange(80) % 3), "^y: expected two classes, got 3: 0, 1, 2$"),
        (lambda matrix, labels: (matrix, labels[1:]), "^y: expected a label for each of 80 rows, got an "),
        (lambda matrix, labels: (labels, labels), r"^X: expected rows and columns, .* shape \(80,\)$"),
        (lambda matrix, labels: (changed(matrix, np.nan), labels), "^X: expected finite .*, got nan$"),
        (lambda matrix, labels: (changed(matrix, 1e39), labels), r"^X: .* of float32, got 1e\+39$"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        LinearClassifier(epochs=1).fit(*change(*all_rows()))


def changed(matrix, value):
    given = matrix.toarray().astype(np.float64)
    given[3, 4] = value
    return sparse.csr_array(given)


def test_data_that_does_not_fit_the_model_is_refused():
    matrix, labels = all_rows()
    own = LinearClassifier(epochs=1)
    with pytest.raises(NotFittedError):
        own.predict(matrix)
    own.fit(matrix, labels)
    for call in (own.score, own.partial_fit):
        with pytest.raises(ValueError, match="^X: expected 300 features, got 299$"):
            call(matrix[:, :299], labels)
    with pytest.raises(ValueError, match="^y: expected -1 or 1, got 2$"):
        own.partial_fit(matrix, labels + 1)


def test_a_search_may_take_its_values_from_arrays():
    grid = {"l2": np.logspace(-4, -1, 2), "epochs": np.arange(2, 4), "intercept": np.array([True, False])}
    search = GridSearchCV(LinearClassifier(**SLOW), grid, cv=2, error_score="raise").fit(*all_rows())
    assert search.best_score_ > 0.5


def test_a_matrix_whose_columns_are_out_of_order_is_not_modified():
    matrix, labels = all_rows()
    parts = [part.copy() for part in (matrix.data[::-1], matrix.indices[::-1], matrix.indptr)]
    for part in parts:
        part.flags.writeable = False  # as joblib gives the matrices of a search to its workers
    for solver in ("sgd", "coordinate"):
        LinearClassifier(solver=solver, epochs=1).fit(sparse.csr_array(tuple(parts)), labels)


def test_rows_may_be_lists():
    own = LinearClassifier(epochs=50).fit([[1, 0], [0, 1]], ["a", "b"])
    assert own.predict([[2, 1], [1, 3]]).tolist() == ["a", "b"]
    assert own.score([[1, 0], [0, 1]], ["a", "b"]) == 1
