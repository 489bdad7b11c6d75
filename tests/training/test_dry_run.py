"""``--dry-run``: every shipped configuration builds all it needs, and takes a step of each phase."""

import tempfile

import keras
import pytest

from tests.extent import ALL
from tests.launching import DIGITS, run
from tests.training.refusal import refusal
from tests.training.small import LINEAR
from tests.training.test_configs import CONFIGS
from training.commands.train import train
from training.config.config import load_with_warnings
from training.models import IMAGES, MODELS
from training.run.dry_run import generated, tiny


def words_of(model):
    """Return the words with which a configuration is tried: small models of the same kind."""
    family = model.partition("_")[0]
    if ALL:
        return []
    if MODELS[model].signature == IMAGES:
        return [LINEAR]
    if family == "lstm":
        return [f"model={model.removesuffix('_small')}_small"]
    small = f"model={{name: {family}_small, layers: 1, width: 32, heads: 2, hidden: 64}}"
    return [small, "dataset.vocabulary.size=1000"]


# One of each task, and images in several phases. CI also tries each other model, and local steps;
# those that differ from one of these by numbers are left to a run of all.
USUAL = "imagenet_resnet50_dawnbench", "brown_lstm", "brown_bert_small", "intents_lstm", "ende_transformer"
OF_CI = "brown_gpt_small", "brown_muloco", "brown_streaming_diloco", "digits_lars"


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=name, marks=[] if name in USUAL else pytest.mark.slow)
        for name, path in CONFIGS.items()
        if ALL or name in (*USUAL, *OF_CI)
    ],
)
def test_every_shipped_configuration_builds_and_takes_a_step_of_each_phase(
    path, capfd, tmp_path, monkeypatch
):
    config = load_with_warnings(path, [], generated).config
    monkeypatch.chdir(tmp_path)
    train(str(path), ["ranks_per_node=null", *words_of(config.model.name)], dry_run=True)
    keras.config.set_dtype_policy("float32")
    told = capfd.readouterr().out.splitlines()
    ends = [f"phase {number}: " for number in range(1, len(config.phases) + 1)]
    assert all(line.startswith(end) for line, end in zip(told[-len(ends) - 2 :], ends, strict=False))
    assert told[-1] == f"dry run of {path}: all is built, and each phase took a step"
    assert list(tmp_path.iterdir()) == []
    # all is kept but sizes and lengths
    small = tiny(config, ranks=4, output="nowhere")
    same = ("model", "optimizer", "precision", "reducer", "accumulate", "clip_norm", "average", "normalise")
    assert all(getattr(small, name) == getattr(config, name) for name in same)
    for phase, whole in zip(small.phases, config.phases, strict=True):
        assert phase.reducer == whole.reducer
        assert phase.steps == 1
        if config.task.name == "image_classification":
            assert MODELS[config.model.name].smallest_side <= phase.input_size <= whole.input_size
        elif config.task.name != "text_classification":
            assert 1 < phase.sequence_length <= min(8, whole.sequence_length)
        if config.task.name == "translation":
            assert phase.tokens == 4 * config.accumulate * phase.sequence_length
        else:
            assert phase.batch_size == 2 * config.accumulate


# with the digits, which the test above leaves to this one
def test_a_dry_run_ends_with_what_it_checked_and_no_accuracy_or_folder(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(str(DIGITS), ["ranks_per_node=null", LINEAR], dry_run=True)
    told = capfd.readouterr().out
    assert "accuracy" not in told
    assert "files:" not in told
    assert tempfile.gettempdir() not in told.replace(str(tmp_path), "").replace(str(DIGITS), "")
    shown = "sgd: its schedules fit, a tiny step was taken and tested"
    assert told.splitlines()[-4:] == [
        f"phase 1: 12 epochs of 6 px, 16 samples a rank, hitopk, {shown}",
        f"phase 2: 8 epochs of 8 px, 16 samples a rank, dense, {shown}",
        "not looked at: the real samples, and the memory and time that whole batches take",
        f"dry run of {DIGITS}: all is built, and each phase took a step",
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "phases.0.learning_rate={start: 0.1, end: 0.1, warmup: {start: 0.0, epochs: 13}}",
            "phases[0].learning_rate.warmup.epochs: expected fewer than the 1068 steps of the phase",
        ),
        ("phases.1.reducer={name: oktopk, leftovers: onwer}", "phases[1].reducer: leftovers: expected "),
    ],
)
def test_what_would_fail_in_the_run_fails_in_the_dry_run(word, message):
    assert message in refusal("train", DIGITS, word, "--dry-run")


@pytest.mark.large
@pytest.mark.launch
def test_ranks_take_a_dry_run_together(tmp_path):
    result = run("cloudtrain", "launch", "-np", "2", DIGITS, "--dry-run", "ranks_per_node=null", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == f"dry run of {DIGITS}: all is built, and each phase took a step"
    assert list(tmp_path.iterdir()) == []
