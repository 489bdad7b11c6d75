"""Reducer, model, data set, callback and task from outside the package, as docs/own_parts.md shows them."""

import re
import shutil
import sys

import keras
import numpy as np
import pytest

from commlib import Topology, make_reducer, transport
from tests.launching import ROOT
from tests.training.refusal import refused
from tests.training.small import assert_same_weights, records_of
from training import Trainer
from training.commands.train import train
from training.commands.tune import _cases, _without_exchange
from training.config.config import load, load_with_warnings
from training.run.data import load_data
from training.run.parts import import_parts

CONFIGURATIONS = ("my.yaml", "sparse.yaml", "table.yaml")
PAGE = (ROOT / "docs" / "own_parts.md").read_text()
MODULES = re.findall(r"^# my_package/(\w+)\.py$", PAGE, re.MULTILINE)
MY_MODULES = ("my_package", *(f"my_package.{each}" for each in MODULES))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the working directory, with the package and the configuration of the page."""
    (tmp_path / "my_package").mkdir()
    for name, text in re.findall(r"(?ms)^```python\n# my_package/(\w+\.py)\n(.*?)^```$", PAGE):
        (tmp_path / "my_package" / name).write_text(text)
    for name, text in zip(CONFIGURATIONS, re.findall(r"(?ms)^```yaml\n(.*?)^```$", PAGE), strict=True):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in MY_MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_that_is_read_imports_nothing(folder, name):
    loaded = load_with_warnings(name)
    assert loaded.warnings == []
    assert not set(MY_MODULES) & set(sys.modules)
    (folder / "config.yaml").write_text(loaded.config.to_yaml())
    assert load("config.yaml") == loaded.config


def test_a_run_imports_them_from_the_working_directory_and_writes_their_options_out(folder):
    config = import_parts(load("my.yaml", ["reducer.every=null"]))
    assert config.reducer_config(config.phases[0]) == {"name": "my_package.reducers:EveryOther", "every": 2}
    made = config.task.make().make_model(config, config.make_dataset())
    assert made.output_shape == (None, 2)
    dataset = config.dataset.make()
    assert (len(dataset.manifest("training")), dataset.identity) == (256, "my_package.data:load samples=256")


WRONG = {
    "model=my_package.modles:build": 'model: model "my_package.modles:build": there is no module my_p',
    "model.widht=3": 'model.widht: model my_package.models:build has no such option',
    "model=my_package.data:load": "expected build(channels, classes, *, normalised=False) -> keras.Model",
    "dataset=my_package.reducers:EveryOther": "dataset: topology: dataset my_package.reducers:Ever",
    "reducer=my_package.models:build": 'phases[0].reducer: reducer "my_package.models:build": expected a su',
    "phases.0.reducer.wire=gap": "phases[0].reducer.wire: my_package.reducers:EveryOther has no such option",
}  # fmt: skip

WRONG_IN_SPARSE = {
    "reducer.selector=my_package.sparse:Randon": 'reducer: selector "my_package.sparse:Randon": ',
    "reducer.selector=my_package.sparse:Int8": "expected a subclass of Selector, got",
    "reducer.wire=my_package.sparse:RandomEntries": "expected an index codec, a value codec or one of each",
    "phases.0.reducer.wire=my_package.sparse:Int9": 'phases[0].reducer: codec "my_package.sparse:Int9": ',
    "reducer.wrappers=[{name: 'my_package.sparse:Limits'}]": "expected a subclass of ReducerWrapper, got",
}  # fmt: skip

WRONG_IN_TASK = {
    "task=my_package.tables:build": 'task: task "my_package.tables:build": expected a subclass of Task, got',
    "task={name: 'my_package.tasks:Regression', power: 2}": "task.power: task my_package.tasks:Regression",
    "phases.1.dleta=0.5": 'phases[1].dleta: unknown key, did you mean "delta"? (known here: epochs, steps, ',
    "phases.0.delta=0": "phases[0].delta: expected a number above 0, got 0",
    "normalise={mean: [1], std: [1]}": "normalise: expected none, my_package.tasks:Regression takes none",
    "target={metric: error, at_least: 0.5}": "target: expected at_most, since a lower error is better; got",
    "model=resnet8": "model: expected a model of tables, got resnet8, which is one of images",
}  # fmt: skip

EVERY_WRONG = {"my.yaml": WRONG, "sparse.yaml": WRONG_IN_SPARSE, "table.yaml": WRONG_IN_TASK}


@pytest.mark.parametrize(
    ("name", "word"), [(name, word) for name in EVERY_WRONG for word in EVERY_WRONG[name]]
)
def test_what_is_wrong_with_a_part_is_one_line(folder, name, word):
    config = load(name, [word])
    with refused(EVERY_WRONG[name][word]):
        import_parts(config)


@pytest.mark.usefixtures("folder")
def test_what_is_imported_already_and_no_reducer_is_one_line_too():
    word = "reducer=my_package.models:build"
    import_parts(load("my.yaml"))
    with refused(WRONG[word]):
        import_parts(load("my.yaml", [word]))


def test_parts_of_a_reducer_lose_nothing(folder):
    """What each rank has of the gradients so far is in the means or in the residuals."""
    config = import_parts(load("sparse.yaml"))
    options = config.reducer_config(config.phases[0])
    name = options.pop("name")

    def body(comm):
        reducer = make_reducer(name, Topology(comm), 997, **options)
        random = np.random.default_rng(comm.rank)
        given, total = np.zeros(997), np.zeros(997)
        for _ in range(6):
            gradient = random.standard_normal(997).astype(np.float32)
            given += np.clip(gradient, -0.5, 0.5)
            total += reducer.reduce(gradient)
        assert 0 < reducer.last.applied < 997
        return given, total, reducer.residual.astype(np.float64)

    given, totals, residuals = zip(*transport.simulated.run(body, 3, ranks_per_node=2), strict=True)
    np.testing.assert_allclose(3 * totals[0] + sum(residuals), sum(given), atol=1e-4)


def test_an_entry_point_is_a_name(folder, monkeypatch):
    about = folder / "my_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[cloudtrain.reducers]\nevery_other = my_package.reducers:EveryOther\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    config = load("my.yaml", ["reducer={name: every_other, every: 3}"])
    assert not set(MY_MODULES) & set(sys.modules)
    config = import_parts(config)
    assert config.reducer_config(config.phases[0]) == {"name": "every_other", "every": 3}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_dry_run_builds_them(folder, capfd, name):
    train(name, [], dry_run=True)
    told = capfd.readouterr().out.splitlines()
    assert told[-1] == f"dry run of {name}: all is built, and each phase took a step"
    if name == "table.yaml":
        assert told[-4].startswith("phase 1: 2 epochs of delta 2, 8 samples a rank, dense, sgd: ")


def test_tune_measures_the_gradient_of_the_model(folder):
    config = import_parts(load("my.yaml"))
    (trainer,) = transport.simulated.run(lambda comm: _without_exchange(config, Topology(comm)), 1)
    size = trainer.parts.exchange.gradients.size
    assert size == 9 * 4 + 4 + 4 * 2 + 2
    (cases, _) = transport.simulated.run(lambda comm: _cases(Topology(comm), config, size), 2)
    assert [(case.size, case.density) for case in cases] == [(size, 0.01)]


def test_a_callback_reports_what_it_sees_and_goes_on_after_a_resumption(folder, capsys):
    keras.utils.clear_session()
    words = ["callbacks.0.factor=0.01", "model.width=1", "phases.0.epochs=1"]  # every loss is above that
    Trainer(load("my.yaml", words)).fit()
    spikes = records_of(folder / "runs", "spike")
    assert [line["steps"] for line in spikes] == list(range(2, 17))
    assert f"the loss jumped to {spikes[0]['loss']:.3f} in step 2" in capsys.readouterr().out
    (run_folder,) = (folder / "runs").iterdir()
    shutil.rmtree(run_folder / "checkpoints" / "step-00000016")
    (run_folder / "summary.json").unlink()
    keras.utils.clear_session()
    Trainer(load("my.yaml", [*words, "resume=auto"])).fit()
    assert [line["steps"] for line in records_of(folder / "runs", "spike")][15:] == [16]  # the mean was there


def test_data_that_do_not_fit_a_task_are_one_line(folder):
    config = import_parts(load("table.yaml", ["dataset=digits"]))
    with refused("dataset: expected one of kind Table for the task my_package"):
        config.make_dataset()
    config = import_parts(load("table.yaml", ["phases.1.batch_size=257"]))
    with pytest.raises(ValueError, match=r"phases\[1\]: expected at most the 256 training samples in a step"):
        load_data(config, Topology(transport.mpi.world()))


def fit(*words):
    keras.utils.clear_session()
    run = Trainer(load("table.yaml", ["checkpoints={every_steps: 9, keep: 99}", *words]))
    return run, run.fit()


def test_a_task_reaches_its_target_and_goes_on_to_the_bit(folder, capsys):
    run, summary = fit("target=null")
    assert summary.tested == 50
    errors = [line["error"] for line in records_of(folder / "runs", "epoch")]
    assert errors[-1] == summary.metrics["error"] == summary.best == min(errors) < errors[0]
    test = run.data.dataset.test
    manifest = test.scan()
    rows = np.frombuffer(b"".join(test.read(manifest, np.arange(50))), np.float32).reshape(50, 5)
    mean = np.abs(np.asarray(run.model(rows[:, :4]))[:, 0].astype(np.float64) - rows[:, 4]).mean()
    assert summary.metrics["error"] == pytest.approx(mean, rel=1e-6)
    told = capsys.readouterr().out
    assert f"  mean absolute error {mean:>6.3f}  " in told
    assert " rows/s" in told

    (run_folder,) = (folder / "runs").iterdir()
    for path in (run_folder / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > 40:  # in the second epoch of the first phase
            shutil.rmtree(path)
    (run_folder / "summary.json").unlink()
    resumed, _ = fit("target=null", "resume=auto")
    assert "resumed from step-00000036: step 36, phase 1, epoch 2" in capsys.readouterr().out
    assert_same_weights(resumed, run)

    goal = sorted(errors)[1]
    _, summary = fit(f"target={{metric: error, at_most: {goal!r}}}", "output=others")
    assert summary.reached
    header, *_ = next(folder.glob("others/*/dawnbench.tsv")).read_text().splitlines()
    assert header == "epoch\thours\terror"
