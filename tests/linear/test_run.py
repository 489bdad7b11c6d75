"""``cloudtrain train`` of linear models: what it leaves, and one line for what is wrong."""

import json
import resource

import numpy as np
import pytest
import yaml
from sklearn.datasets import dump_svmlight_file

from commlib import Topology
from commlib.transport import simulated
from tests.launching import ROOT, launch, tail
from tests.linear.made import matrix_of, rows_of, settings_of
from training.commands.train import load_any, train
from training.config.config import load as load_other
from training.linear.config import GeneratedData, LibsvmData, load
from training.linear.generated import SHAPES, STRIDE, generate
from training.linear.run import share_right
from training.linear.solvers import SGD
from training.process.supervisor import check_restarts

SHIPPED = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if "task: linear" in path.read_text()]


@pytest.fixture
def config(tmp_path):
    """Return the path of a configuration, with a file to train on and one to test."""
    for number, part in enumerate(("train", "test")):
        matrix, labels = matrix_of(number)
        dump_svmlight_file(matrix, labels, str(tmp_path / part), zero_based=False)
    content = {
        "name": "small",
        "task": "linear",
        "data": {"train": str(tmp_path / "train"), "test": str(tmp_path / "test"), "features": 300},
        "epochs": 3,
        "batch_size": 10,
        "output": str(tmp_path / "runs"),
    }
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_run_leaves_its_configuration_its_passes_and_its_model(config, capfd):
    train(str(config), ["learning_rate.rate=0.5", "loss=hinge"])
    (folder,) = (config.parent / "runs").iterdir()
    assert capfd.readouterr().out.splitlines()[-1] == f"files: {folder}"
    written = load(folder / "config.yaml")
    assert (written.loss, written.learning_rate.rate, written.epochs) == ("hinge", 0.5, 3)
    passes = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(each["kind"], each["number"], each["steps"]) for each in passes] == [
        ("pass", number, 4) for number in (1, 2, 3)
    ]
    model = np.load(folder / "model.npz")
    matrix, labels = matrix_of(1)
    right = (matrix @ model["weights"] + model["intercept"] > 0) == (labels > 0)
    assert passes[-1]["accuracy"] == pytest.approx(right.mean())
    matrix, labels = matrix_of(0)
    losses = np.maximum(0, 1 - labels * (matrix @ model["weights"] + model["intercept"]))
    penalty = 5e-5 * (model["weights"].astype(np.float64) ** 2).sum()
    assert passes[-1]["objective"] == pytest.approx(losses.mean() + penalty, rel=1e-5)


@pytest.mark.slow
@pytest.mark.launch
def test_two_ranks_have_the_model_of_one(config, capfd):
    # one batch a pass: then the rows of a step do not depend on how many ranks share them
    words = ["batch_size=100", "epochs=20", "l2=0.01", "learning_rate={rate: 0.5, schedule: power}"]
    result = launch(2, str(config), *words, "reducer=ssar_split", f"output={config.parent / 'two'}")
    assert result.returncode == 0, tail(result)
    train(str(config), [*words, f"output={config.parent / 'one'}"])
    two, one = (next((config.parent / name).iterdir()) for name in ("two", "one"))
    assert result.stdout.splitlines()[-1] == f"files: {two}"
    assert "40 rows of 300 features, 2 ranks, 1 steps" in result.stdout
    models = [np.load(folder / "model.npz") for folder in (two, one)]
    for name in ("weights", "intercept"):
        np.testing.assert_allclose(*(model[name] for model in models), rtol=1e-5, atol=1e-6)
    assert np.abs(models[1]["weights"]).max() > 0.1
    of_two, of_one = (
        json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1]) for folder in (two, one)
    )
    assert of_two["objective"] == pytest.approx(of_one["objective"], rel=1e-6)
    assert of_two["accuracy"] == of_one["accuracy"]
    assert sum(of_two["sent"].values()) > 0


def test_a_dry_run_leaves_nothing(config, capfd):
    train(str(config), ["data={name: generated, shape: url, rows: 100000}"], dry_run=True)
    end = f"dry run of {config}: all is built, and a step was taken"
    assert capfd.readouterr().out.splitlines()[-1] == end
    assert not (config.parent / "runs").exists()


def test_a_test_file_has_the_features_of_the_one_to_train_on(tmp_path):
    (tmp_path / "train").write_text("1 0:1 4:1\n-1 1:1\n")
    (tmp_path / "test").write_text("1 2:1\n-1 1:1\n")
    data = LibsvmData(train=str(tmp_path / "train"), test=str(tmp_path / "test"), zero_based=True)

    def load_alone():
        return simulated.run(lambda comm: data.load(Topology(comm)), 1)[0]

    rows, test = load_alone()
    assert rows.features == test.features == 5
    assert test.matrix.columns.tolist() == [2, 1]
    (tmp_path / "test").write_text("1 5:1\n")
    with pytest.raises(ValueError, match="test:1: index: expected 0 … 4, got 5$"):
        load_alone()


def test_accuracy_is_that_of_the_rows_of_all_ranks():
    def body(comm):
        solver = SGD(Topology(comm), rows_of(comm.rank), settings_of())
        solver.run_pass()
        test = rows_of(5, rows=30 - 9 * comm.rank)
        right = (solver.model.margins(test) > 0) == (test.labels > 0)
        return share_right(solver, test), right.sum(), len(test)

    seen = simulated.run(body, 3)
    expected = sum(each[1] for each in seen) / sum(each[2] for each in seen)
    assert [each[0] for each in seen] == [expected] * 3
    assert expected != seen[0][1] / seen[0][2]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_what_ships_loads(path):
    assert len(SHIPPED) == 3
    assert load(path).name == path.stem
    with pytest.raises(ValueError, match=r"\.yaml: task: linear is for the commands train and launch$"):
        load_other(path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["los=hinge"], 'los: unknown key, did you mean "loss"?'),
        (["data.train=nowhere"], "nowhere: No such file or directory"),
        (["data.features=10"], "train:1: index: expected 1 … 10, got "),
        (["data={name: generated, shape: url, rows: 0}"], "data.rows: expected a whole number from 1, got 0"),
        (
            ["loss=squared_hinge", "learning_rate=1.0e+30", "l2=0"],
            "learning_rate: expected one that converges",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_is_one_line(config, capfd, words, message):
    with pytest.raises(SystemExit) as ended:
        train(str(config), words)
    told = capfd.readouterr().err
    assert ended.value.code in (1, 2)
    assert message in told
    assert told.startswith("cloudtrain: ") and told.count("\n") == 1


@pytest.mark.parametrize(("limit", "file"), [(300, "config.yaml"), (1200, "model.npz")])
def test_no_room(config, capfd, limit, file):
    train(str(config), [])  # compiles the kernels, which takes room, too
    capfd.readouterr()
    _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(SystemExit):
            train(str(config), ["epochs=1"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    told = capfd.readouterr().err
    assert f"{file}: expected room for it" in told
    assert told.startswith("cloudtrain: ") and told.count("\n") == 1


def test_what_cannot_be_launched_is_refused(config):
    kind, loaded = load_any(str(config), [], dry_run=False)
    assert kind == "training.linear.run"
    check_restarts(0, loaded.config, is_dry=False)
    with pytest.raises(ValueError, match="task: linear"):
        check_restarts(2, loaded.config, is_dry=False)


# --------------------------------------------------------------- generated rows


@pytest.mark.parametrize("name", SHAPES)
def test_rows_have_the_shape_that_they_are_named_after(name):
    shape = SHAPES[name]
    rows = generate(shape, 0, 1000, seed=1)
    assert rows.features == shape.features
    assert np.gcd(STRIDE, shape.features) == 1  # or columns would fall together
    lengths = np.diff(rows.matrix.starts)
    assert lengths.mean() == pytest.approx(shape.row_entries, rel=0.02)
    squares = np.add.reduceat(rows.matrix.values.astype(np.float64) ** 2, rows.matrix.starts[:-1])
    np.testing.assert_allclose(squares, 1, rtol=1e-4)
    assert 0.2 < (rows.labels > 0).mean() < 0.8
    # a straight line through the counts of the columns in a log-log plot: that of a power law
    counts = np.sort(np.bincount(rows.matrix.columns))[::-1].astype(np.float64)
    middle = np.geomspace(4 * shape.row_entries, 40 * shape.row_entries, 10).astype(int)
    slope = np.polyfit(np.log(middle), np.log(counts[middle]), 1)[0]
    assert slope == pytest.approx(-shape.exponent, abs=0.15 if name == "webspam" else 0.35)


def test_rows_do_not_depend_on_the_number_of_ranks():
    data = GeneratedData(shape="url", rows=2500, test_rows=700)

    def body(comm):
        return data.load(Topology(comm))

    alone = simulated.run(body, 1)[0]
    for part in (0, 1):
        parts = [rank[part] for rank in simulated.run(body, 3)]
        columns = np.concatenate([each.matrix.columns for each in parts])
        np.testing.assert_array_equal(columns, alone[part].matrix.columns)
        np.testing.assert_array_equal(np.concatenate([each.labels for each in parts]), alone[part].labels)
    assert [len(each) for each in alone] == [2500, 700]
    beyond = generate(SHAPES["url"], 2500, 3200, seed=1)
    np.testing.assert_array_equal(alone[1].matrix.columns, beyond.matrix.columns)

    def few(comm):
        with pytest.raises(ValueError, match="^data.rows: expected one for each of 3 ranks, got 2$"):
            GeneratedData(shape="url", rows=2).load(Topology(comm))

    simulated.run(few, 3)
