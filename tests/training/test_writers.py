"""What writers give to other tools: the numbers of a run, its configuration without secrets, and no more."""

import json
import re
import socket
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from typer.testing import CliRunner

from commlib import LinkBytes, Report
from commlib.reducers.report import StageSeconds
from commlib.topology import Traffic
from tests.launching import ROOT
from tests.training.small import crash_after, metrics_of, phase, trainer
from tests.training.test_summary import epoch
from training.callbacks.prometheus import exposition
from training.callbacks.writer import numbers_of_epoch, numbers_of_step
from training.commands.main import app
from training.commands.train import train
from training.config.config import ConfigurationError, load
from training.config.records import DawnBenchEntry
from training.results import LoopSeconds, StageMeans, Step, StepHyperparameters

PAGE = (ROOT / "docs" / "callbacks.md").read_text()
PHASES = (phase(steps=4), phase(steps=2, batch=32))
SECRET = "hunter2"


def recorded(folder, kind):
    return [line for line in metrics_of(folder) if line["kind"] == kind]


def expected_of(folder):
    """The numbers of a run on one rank by steps, as metrics.jsonl has them."""
    found = {}
    ends = [4, 6]
    for line in recorded(folder, "step"):
        steps = line["step"] + (4 if line["epoch"] else 0)
        found[steps] = {"train/loss": line["loss"], "train/learning_rate": line["learning_rate"]}
        found[steps] |= {"train/momentum": line["momentum"], "train/skipped_steps": 0.0}
    for end, line in zip(ends, recorded(folder, "epoch"), strict=True):
        found[end] |= {"epoch/loss": line["loss"], "epoch/images_per_second": line["images_per_second"]}
        found[end] |= {"test/top1": line["top1"], "test/top5": line["top5"]}
    return found


def check(written, folder):
    """Compare what was written, by steps, with what was recorded."""
    expected = expected_of(folder)
    assert written.keys() == expected.keys()
    for steps, numbers in expected.items():
        throughput = written[steps].pop("train/images_per_second")
        assert throughput > 0
        assert written[steps] == pytest.approx(numbers, rel=1e-6)


def test_the_page_has_every_number():
    named = {
        name
        for name in re.findall(r"`((?:train|exchange|epoch|test)/\w+)`", PAGE)
        if not name.startswith("test")
    }
    report = Report(True, 5, 9, Traffic(LinkBytes(1, 2), LinkBytes(3, 4)), StageSeconds(), 4.0, 1.0)
    step = Step(0.5, report, 2.0, LoopSeconds(), 64, 0.0, StepHyperparameters(0.1, 0.9))
    run = SimpleNamespace(
        size=4,
        task=SimpleNamespace(unit="images"),
        phases=[SimpleNamespace(result=SimpleNamespace(skipped_steps=count)) for count in (1, 2)],
        gradient_size=100,
    )
    numbers = numbers_of_step(run, step)
    assert numbers == {
        "train/loss": 0.5,
        "train/learning_rate": 0.1,
        "train/momentum": 0.9,
        "train/images_per_second": 128.0,
        "train/skipped_steps": 3.0,
        "exchange/density": 0.05,
        "exchange/sent_intra_bytes": 1.0,
        "exchange/sent_inter_bytes": 2.0,
        "exchange/hidden_share": 0.25,
    }
    nothing = numbers_of_step(run, replace(step, loss=float("nan"), report=replace(report, busy=0.0)))
    assert numbers.keys() - nothing.keys() == {"train/loss", "exchange/hidden_share"}
    result = replace(epoch(), stages=StageMeans(hidden_share=0.5))
    of_epoch = numbers_of_epoch(run, result)
    assert of_epoch["epoch/sent_inter_bytes"] == result.sent_inter_bytes
    assert named == {name for name in {**numbers, **of_epoch} if not name.startswith("test")}


# ------------------------------------------------------------------------------------------ TensorBoard


def scalars_of(folder):
    found = {}
    (file,) = folder.glob("*/tensorboard/events.out.tfevents.*")
    for event in tf.compat.v1.train.summary_iterator(str(file)):
        for value in event.summary.value:
            found.setdefault(event.step, {})[value.tag] = float(tf.make_ndarray(value.tensor))
    return found


def test_tensorboard_has_the_numbers_of_the_run_and_changes_none(tmp_path):
    words = ["log_every=2", "optimizer={name: sgd, momentum: 0.9}"]
    watched = trainer(tmp_path / "a", "callbacks=[tensorboard]", *words, phases=PHASES)
    watched.fit()
    check(scalars_of(tmp_path / "a"), tmp_path / "a")
    alone = trainer(tmp_path / "b", *words, phases=PHASES)
    alone.fit()
    for found, expected in zip(watched.model.get_weights(), alone.model.get_weights(), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert not list((tmp_path / "b").glob("*/tensorboard"))


# ------------------------------------------------------------------------- Weights & Biases, and MLflow


class Wandb:
    """What our adapter uses of wandb."""

    def __init__(self):
        self.begun, self.logged, self.ends = [], {}, []

    def init(self, **options):
        self.begun.append(options)
        return self

    def log(self, numbers, step):
        self.logged.setdefault(step, {}).update(numbers)

    def finish(self, exit_code=0):
        self.ends.append(exit_code)


class Mlflow:
    """What our adapter uses of mlflow."""

    def __init__(self):
        self.calls, self.params, self.logged = [], {}, {}

    def set_tracking_uri(self, uri):
        self.calls.append(("uri", uri))

    def set_experiment(self, name):
        self.calls.append(("experiment", name))

    def start_run(self, run_id=None, run_name=None):
        self.calls.append(("start", run_id, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "abc123"))

    def log_params(self, params):
        self.params = params

    def log_metrics(self, numbers, step):
        self.logged.setdefault(step, {}).update(numbers)

    def end_run(self, status="FINISHED"):
        self.calls.append(("end", status))


@pytest.fixture
def fakes(monkeypatch):
    found = {"wandb": Wandb(), "mlflow": Mlflow()}
    for name, fake in found.items():
        monkeypatch.setitem(sys.modules, name, fake)
    return SimpleNamespace(**found)


def put_secret_in(run):
    entry = DawnBenchEntry(code_url=f"https://me:{SECRET}@host/code")
    run.config = run.config.model_copy(update={"dawnbench": entry})


def test_wandb_gets_the_numbers_and_the_configuration_without_secrets(tmp_path, fakes):
    words = ["log_every=2", "optimizer={name: sgd, momentum: 0.9}"]
    run = trainer(tmp_path, "callbacks=[{name: wandb, project: mine, mode: offline}]", *words, phases=PHASES)
    put_secret_in(run)
    assert fakes.wandb.begun == []  # nothing before the run begins
    run.fit()
    (begun,) = fakes.wandb.begun
    (folder,) = tmp_path.iterdir()
    assert (begun["project"], begun["entity"], begun["mode"]) == ("mine", None, "offline")
    assert (begun["name"], begun["resume"]) == (folder.name, "allow")
    assert begun["id"] == json.loads((folder / "run.json").read_text())["identity"]
    assert begun["config"]["dawnbench"]["code_url"] == "https://me:***@host/code"
    assert begun["settings"]["console"] == "off"
    assert begun["settings"]["x_disable_meta"] is True  # it holds the command line
    assert SECRET not in repr(begun)
    check(fakes.wandb.logged, tmp_path)
    assert fakes.wandb.ends == [0]


def test_wandb_goes_on_with_the_run_after_a_crash(tmp_path, fakes):
    words = ["callbacks=[wandb]", "checkpoints={every_steps: 2}"]
    crash_after(trainer(tmp_path, *words, phases=PHASES), 3)
    assert fakes.wandb.ends == [1]
    trainer(tmp_path, *words, "resume=auto", phases=PHASES).fit()
    first, second = fakes.wandb.begun
    assert first["id"] == second["id"]
    assert fakes.wandb.ends == [1, 0]


def test_mlflow_gets_the_numbers_and_the_parameters_and_goes_on_after_a_crash(tmp_path, fakes):
    words = [
        *("log_every=2", "optimizer={name: sgd, momentum: 0.9}", "checkpoints={every_steps: 2}"),
        "callbacks=[{name: mlflow, experiment: mine, tracking_uri: 'file:///x'}]",
    ]
    run = trainer(tmp_path, *words, phases=PHASES)
    put_secret_in(run)
    crash_after(run, 3)
    params = fakes.mlflow.params
    assert (params["phases.1.batch_size"], params["optimizer.momentum"]) == (32, 0.9)
    assert params["dawnbench.code_url"] == "https://me:***@host/code"
    assert SECRET not in repr(params)
    fakes.mlflow.params = None
    trainer(tmp_path, *words, "resume=auto", phases=PHASES).fit()
    (folder,) = tmp_path.iterdir()
    begin = [("uri", "file:///x"), ("experiment", "mine")]
    assert fakes.mlflow.calls == [
        *(*begin, ("start", None, folder.name), ("end", "FAILED")),
        *(*begin, ("start", "abc123", None), ("end", "FINISHED")),
    ]
    assert fakes.mlflow.params is None  # given once
    check(fakes.mlflow.logged, tmp_path)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_one_line_before_anything_is_written(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match="callback") as caught:
        trainer(tmp_path, f"callbacks=[{name}]")
    line = f"expected the package {name}, which is not installed: pip install {name}"
    assert str(caught.value) == f"callback {name}: {line}"
    assert list(tmp_path.iterdir()) == []
    load("digits", [f"callbacks=[{name}]"])  # nothing is imported for this


def test_a_dry_run_gives_nothing_away(tmp_path, fakes, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["ranks_per_node=null", "model=mlp", "callbacks=[wandb, mlflow, tensorboard]"]
    train("digits", words, dry_run=True)
    assert (fakes.wandb.begun, fakes.mlflow.calls) == ([], [])


def test_a_mode_that_is_none_is_refused():
    with pytest.raises(ConfigurationError, match=r"callbacks\[0\]\.mode: expected online or offline"):
        load("digits", ["callbacks=[{name: wandb, mode: 'on'}]"])


# ------------------------------------------------------------------------------------------- Prometheus


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def scraped(port, path="/metrics"):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


SAMPLE = re.compile(r"([a-zA-Z_][a-zA-Z0-9_]*)\{run=\"digits\"\} (-?[0-9.e+-]+)")


def test_prometheus_reads_the_newest_numbers_while_the_run_lasts(tmp_path):
    port, texts = free_port(), []
    run = trainer(tmp_path, f"metrics_port={port}", "log_every=1", phases=(phase(steps=3),))
    step = run.parts.step.take

    def look(*arguments):
        texts.append(scraped(port))
        if run.position.steps == 2:
            with pytest.raises(urllib.error.HTTPError, match="404"):
                scraped(port, "/")
        return step(*arguments)

    run.parts.step.take = look
    run.fit()
    assert texts[0] == ("text/plain; version=0.0.4; charset=utf-8", "")
    lines = texts[2][1].splitlines()
    types, samples = lines[::2], [SAMPLE.fullmatch(line).groups() for line in lines[1::2]]
    assert types == [f"# TYPE {name} gauge" for name, _ in samples]
    found = {name: float(value) for name, value in samples}
    line = recorded(tmp_path, "step")[1]
    assert found["cloudtrain_steps"] == 2
    assert found["cloudtrain_train_loss"] == line["loss"]
    assert found["cloudtrain_train_learning_rate"] == line["learning_rate"]
    assert found["cloudtrain_train_images_per_second"] == 64 / line["step_seconds"]
    with pytest.raises(urllib.error.URLError, match="refused"):
        scraped(port)


def test_a_port_in_use_is_one_line_before_anything_is_written(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match="metrics_port") as caught:
            trainer(tmp_path, f"metrics_port={port}")
    line = f"metrics_port: expected a free port of 127.0.0.1, got {port}: Address already in use"
    assert str(caught.value) == line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["train"], ["launch", "-np", "2"]])
def test_the_command_line_takes_the_port(command):
    result = CliRunner().invoke(app, [*command, "digits", "--metrics-port", "70000"])
    assert result.exit_code == 2
    assert "metrics_port: expected a port from 1 to 65535, got 70000" in result.output


def test_names_have_the_letters_that_prometheus_takes():
    assert exposition({"test/top-1": 1.0}, "x") == (
        '# TYPE cloudtrain_test_top_1 gauge\ncloudtrain_test_top_1{run="x"} 1.0\n'
    )
