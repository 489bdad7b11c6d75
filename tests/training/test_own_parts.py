"""A reducer, a model and a data set from outside the package, as docs/own_parts.md shows them."""

import re
import shutil
import sys

import pytest

from commlib import Topology, transport
from tests.launching import ROOT, errors, launch, run, tail
from training.commands.train import train
from training.commands.tune import _cases
from training.config.config import load, load_with_warnings
from training.run.parts import import_parts

PAGE = (ROOT / "docs" / "own_parts.md").read_text()
MY_MODULES = ("my_package", "my_package.data", "my_package.models", "my_package.reducers")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the working directory, with the package and the configuration of the page."""
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in MY_MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def write(folder):
    (folder / "my_package").mkdir()
    for name, text in re.findall(
        r"^```python\n# my_package/(\w+\.py)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
    ):
        (folder / "my_package" / name).write_text(text)
    (folder / "my.yaml").write_text(re.search(r"(?ms)^```yaml\n(.*?)^```$", PAGE)[1])


def test_a_configuration_that_is_read_imports_nothing(folder):
    loaded = load_with_warnings("my.yaml")
    assert loaded.warnings == []
    assert not set(MY_MODULES) & set(sys.modules)
    (folder / "config.yaml").write_text(loaded.config.to_yaml())
    assert load("config.yaml") == loaded.config


def test_a_run_imports_them_from_the_working_directory_and_writes_their_options_out(folder):
    config = import_parts(load("my.yaml", ["reducer.every=null"]))
    assert config.reducer_config(config.phases[0]) == {"name": "my_package.reducers:EveryOther", "every": 2}
    made = config.model.make(1, 2)
    assert made.output_shape == (None, 2)
    dataset = config.dataset.make()
    assert (len(dataset.manifest("training")), dataset.identity) == (256, "my_package.data:load samples=256")


WRONG = {
    "model=my_package.modles:build": 'model: model "my_package.modles:build": there is no module my_p',
    "model=my_package.models:biuld": 'my_package.models has no biuld, did you mean "build"?',
    "model.widht=3": 'model: widht: model my_package.models:build has no such option',
    "model={name: 'my_package.models:build', normalised: true}": "model: normalised: expected none",
    "model=my_package.data:load": "expected build(channels, classes, *, normalised=False) -> keras.Model",
    "dataset=my_package.reducers:EveryOther": "dataset: topology: dataset my_package.reducers:Ever",
    "dataset.sampels=3": 'dataset: sampels: dataset my_package.data:load has no such option',
    "dataset.path=x": "dataset: dataset my_package.data:load: path: expected none",
    "reducer=my_package.models:build": 'phases[0].reducer: reducer "my_package.models:build": expected a su',
    "reducer.evry=3": 'reducer.evry: my_package.reducers:EveryOther has no such option (its options: every)',
    "phases.0.wire=gap": "phases[0].wire: expected none, the reducer of this phase (my_package.reducers:",
    "reducer=no_such_package.reducers:Mine": "there is no module no_such_package",
}  # fmt: skip


@pytest.mark.parametrize("word", WRONG)
def test_what_is_wrong_with_a_part_is_one_line(folder, word):
    config = load("my.yaml", [word])
    with pytest.raises(ValueError, match=re.escape(WRONG[word])) as caught:
        import_parts(config)
    assert "\n" not in str(caught.value)


def test_a_wrong_path_ends_the_command_with_one_line_and_status_2(folder):
    result = run("cloudtrain", "train", "my.yaml", "model=my_package.modles:build", cwd=folder)
    assert result.returncode == 2, tail(result)
    assert errors(result).startswith('cloudtrain: model: model "my_package.modles:build": there is no module')
    assert len(errors(result).splitlines()) == 1


def test_a_name_that_is_none_is_refused_when_the_configuration_is_read(folder):
    with pytest.raises(ValueError, match=r"reducer\.name: unknown reducer \"my_package\.reducers\.Mine\""):
        load("my.yaml", ["reducer=my_package.reducers.Mine"])


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


def test_a_dry_run_builds_them(folder, capfd):
    train("my.yaml", [], dry_run=True)
    assert (
        capfd.readouterr().out.splitlines()[-1]
        == "dry run of my.yaml: all is built, and each phase took a step"
    )


def test_tune_measures_the_gradient_of_the_model(folder):
    config = import_parts(load("my.yaml"))
    cases = transport.simulated.run(lambda comm: _cases(Topology(comm), config), 2)[0]
    weights = 9 * 4 + 4 + 4 * 2 + 2
    assert [(case.size, case.density) for case in cases] == [(weights, 0.01)]


@pytest.mark.large
@pytest.mark.launch
def test_ranks_train_with_them_and_a_run_that_was_ended_goes_on_to_the_bit(tmp_path):
    write(tmp_path)
    whole = launch(2, "my.yaml", cwd=tmp_path)
    assert whole.returncode == 0, tail(whole)
    (run_folder,) = (tmp_path / "runs").iterdir()
    weights = (run_folder / "model.weights.h5").read_bytes()
    last = sorted((run_folder / "checkpoints").iterdir())[-1]
    shutil.rmtree(last)
    (run_folder / "summary.json").unlink()
    resumed = launch(2, "my.yaml", "resume=auto", cwd=tmp_path)
    assert resumed.returncode == 0, tail(resumed)
    assert "resumed from step-" in resumed.stdout
    assert (run_folder / "model.weights.h5").read_bytes() == weights
