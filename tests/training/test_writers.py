"""What writers give to other tools: the numbers of a run, its configuration without secrets, and no more."""

import json
import random
import re
import socket
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import tensorflow as tf
from prometheus_client.parser import text_string_to_metric_families

from commlib import LinkBytes, Report
from commlib.reducers.report import StageSeconds
from commlib.topology import Traffic
from tests.launching import ROOT
from tests.training.refusal import refusal
from tests.training.small import assert_same_weights, before_steps, crash_after, phase, records_of, trainer
from tests.training.test_summary import epoch
from training.callbacks.writers import Prometheus, numbers_of_epoch, numbers_of_step
from training.config.config import load
from training.config.records import DawnBenchEntry
from training.results import LoopSeconds, StageMeans, Step, StepHyperparameters

PAGE = (ROOT / "docs" / "callbacks.md").read_text()
PHASES = (phase(steps=4), phase(steps=2, batch=32))
SECRET = "hunter2"


def expected_of(folder):
    """The numbers of a run on one rank by steps, as metrics.jsonl has them."""
    found = {}
    ends = [4, 6]
    for line in records_of(folder, "step"):
        steps = line["step"] + (4 if line["epoch"] else 0)
        found[steps] = {"train/loss": line["loss"], "train/learning_rate": line["learning_rate"]}
        found[steps] |= {"train/momentum": line["momentum"], "train/skipped_steps": 0.0}
    for end, line in zip(ends, records_of(folder, "epoch"), strict=True):
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
    assert_same_weights(watched, alone)
    assert not list((tmp_path / "b").glob("*/tensorboard"))


@pytest.fixture
def fakes(monkeypatch):
    """Return packages of the names wandb and mlflow that note every call."""
    wandb, mlflow = Mock(), Mock()
    mlflow.start_run.return_value.info.run_id = "abc123"
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    return SimpleNamespace(wandb=wandb, mlflow=mlflow)


def numbers_by_step(method):
    found = {}
    for each in method.call_args_list:
        found.setdefault(each.kwargs["step"], {}).update(each.args[0])
    return found


WORDS = ["log_every=2", "optimizer={name: sgd, momentum: 0.9}", "checkpoints={every_steps: 2}"]


def crash_and_go_on(folder, callback, package):
    """Train with a callback, with a crash in between; return the folder of the run."""
    run = trainer(folder, f"callbacks=[{callback}]", *WORDS, phases=PHASES)
    entry = DawnBenchEntry(code_url=f"https://me:{SECRET}@host/code")
    run.config = run.config.model_copy(update={"dawnbench": entry})
    assert package.mock_calls == []  # nothing before the run begins
    crash_after(run, 3)
    trainer(folder, f"callbacks=[{callback}]", *WORDS, "resume=auto", phases=PHASES).fit()
    (path,) = folder.iterdir()
    return path


def test_wandb_gets_the_numbers_without_secrets_and_continues_after_a_crash(tmp_path, fakes):
    folder = crash_and_go_on(tmp_path, "{name: wandb, project: mine, mode: offline}", fakes.wandb)
    first, second = (each.kwargs for each in fakes.wandb.init.call_args_list)
    assert (first["project"], first["entity"], first["mode"]) == ("mine", None, "offline")
    assert (first["name"], first["resume"]) == (folder.name, "allow")
    assert first["id"] == second["id"] == json.loads((folder / "run.json").read_text())["identity"]
    assert first["config"]["dawnbench"]["code_url"] == "https://me:***@host/code"
    assert first["settings"]["console"] == "off"
    assert first["settings"]["x_disable_meta"] is True  # it holds the command line
    assert SECRET not in repr(first)
    wandb_run = fakes.wandb.init.return_value
    check(numbers_by_step(wandb_run.log), tmp_path)
    assert wandb_run.finish.call_args_list == [call(exit_code=1), call(exit_code=0)]


def test_mlflow_gets_the_numbers_and_the_parameters_and_continues_after_a_crash(tmp_path, fakes):
    mlflow = fakes.mlflow
    folder = crash_and_go_on(tmp_path, "{name: mlflow, experiment: mine, tracking_uri: 'file:///x'}", mlflow)
    assert mlflow.set_tracking_uri.call_args_list == [call("file:///x")] * 2
    assert mlflow.set_experiment.call_args_list == [call("mine")] * 2
    assert mlflow.start_run.call_args_list == [call(run_name=folder.name), call(run_id="abc123")]
    assert mlflow.end_run.call_args_list == [call("FAILED"), call("FINISHED")]
    ((params,),) = (each.args for each in mlflow.log_params.call_args_list)  # given once
    assert (params["phases.1.batch_size"], params["optimizer.momentum"]) == (32, 0.9)
    assert params["dawnbench.code_url"] == "https://me:***@host/code"
    assert SECRET not in repr(params)
    check(numbers_by_step(mlflow.log_metrics), tmp_path)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_one_line_before_anything_is_written(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match="callback") as caught:
        trainer(tmp_path, f"callbacks=[{name}]")
    line = f"expected the package {name}, which is not installed: pip install {name}"
    assert str(caught.value) == f"callback {name}: {line}"
    assert list(tmp_path.iterdir()) == []
    load("digits", [f"callbacks=[{name}]"])  # nothing is imported for this


def free_port():
    """Return a port that no other process gets where it asks for any: those are from 32768 on."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)  # not by the seed of a run
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def scraped(port):
    """Return what Prometheus reads: the values of gauges by name and by the label ``run``."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert {family.type for family in families} <= {"gauge"}
    return {(each.name, each.labels["run"]): each.value for family in families for each in family.samples}


def test_prometheus_reads_the_newest_numbers_while_the_run_lasts(tmp_path):
    port, found = free_port(), []
    run = trainer(tmp_path, f"metrics_port={port}", "log_every=1", phases=(phase(steps=3),))
    before_steps(run, lambda *_: found.append(scraped(port)))
    run.fit()
    line = records_of(tmp_path, "step")[1]
    expected = {
        "cloudtrain_steps": 2,
        "cloudtrain_train_loss": line["loss"],
        "cloudtrain_train_learning_rate": line["learning_rate"],
        "cloudtrain_train_momentum": 0.9,
        "cloudtrain_train_images_per_second": 64 / line["step_seconds"],
        "cloudtrain_train_skipped_steps": 0,
    }
    assert found[0] == {}
    assert found[2] == {(name, "digits"): value for name, value in expected.items()}
    with pytest.raises(urllib.error.URLError, match="refused"):
        scraped(port)


@pytest.mark.parametrize("end", [Prometheus.on_run_end, lambda served, run: served.on_error(run, OSError())])
def test_names_have_the_letters_that_prometheus_takes_and_the_port_is_free_at_any_end(end):
    port = free_port()
    run = SimpleNamespace(rank=0, folder=object(), config=SimpleNamespace(name='a "b"'))
    for step in (3, 4):  # the second takes the port again
        served = Prometheus(port)
        served.on_build(run)
        served.on_run_begin(run)
        served.write({"test/top-1": 0.5, "test/top_1": 1.0}, step)
        assert scraped(port) == {("cloudtrain_test_top_1", 'a "b"'): 1.0, ("cloudtrain_steps", 'a "b"'): step}
        end(served, run)


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
    line = refusal(*command, "digits", "--metrics-port", "70000")
    assert "metrics_port: expected a port from 1 to 65535, got 70000" in line
