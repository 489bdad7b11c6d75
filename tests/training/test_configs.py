"""What ships in ``configs/`` loads, is what its sources say, and fits the ranks that it is meant for."""

import math
import re
import shlex
from pathlib import Path

import pytest

from tests.training.test_config import assert_read_back
from training.config.config import Config, ConfigurationError, load, load_with_warnings
from training.config.schedules import Span
from training.models import IMAGES, MODELS

FOLDER = Path(__file__).parents[2] / "configs"
CONFIGS = {
    path.stem: path for path in sorted(FOLDER.glob("*.yaml")) if "task: linear" not in path.read_text()
}
NEED_A_PATH = [name for name in CONFIGS if name.startswith(("imagenet", "cifar10", "ptb", "bert", "wmt17"))]
TEXT = [name for name, path in CONFIGS.items() if "\ntask: " in path.read_text()]
PICTURES = [name for name in CONFIGS if name not in TEXT]
PICTURES_AT_A_PATH = [name for name in PICTURES if name in NEED_A_PATH]
TRAINING_SAMPLES = {"digits": 1437, "mnist5k": 4000, "cifar10": 50_000, "imagenet": 1_281_167}


def load_shipped(name: str, *words: str) -> Config:
    """Load a shipped configuration; the path is looked at only when the data set is made."""
    path = ["dataset.path=somewhere"] if name in NEED_A_PATH else []
    return load(CONFIGS[name], [*path, *words])


def training_samples(config: Config) -> int:
    name = config.dataset.name
    samples: int = config.dataset.options["samples"] if name == "synthetic" else TRAINING_SAMPLES[name]
    return samples


def rates(config: Config, world_size: int) -> list[list[float]]:
    found = []
    for phase in config.phases:
        global_batch = phase.batch_size * world_size
        epoch_steps = training_samples(config) // global_batch
        steps = phase.steps or epoch_steps * phase.epochs
        rate = phase.learning_rate.resolved(Span(steps, epoch_steps, global_batch))
        found.append([rate.at(step, steps) for step in range(steps)])
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_each_loads_without_warnings_under_its_own_name_and_is_read_back_equal(name, tmp_path):
    path = ["dataset.path=somewhere"] if name in NEED_A_PATH else []
    loaded = load_with_warnings(CONFIGS[name], path)
    assert (loaded.config.name, loaded.warnings) == (name, [])
    assert_read_back(loaded.config, tmp_path)


@pytest.mark.parametrize("name", NEED_A_PATH)
def test_without_a_path_one_line_says_that_it_is_missing(name):
    with pytest.raises(ConfigurationError) as caught:
        load(CONFIGS[name])
    dataset = {"wmt17_transformer": "parallel_text"}.get(name, "text" if name in TEXT else name.split("_")[0])
    expected = f"dataset: dataset {dataset}: path: expected a folder or URL, got none"
    assert str(caught.value) == f"{CONFIGS[name]}: {expected}"


def test_the_page_on_training_names_each():
    page = (FOLDER.parent / "docs" / "training.md").read_text()
    named = re.findall(r"^\| \[`(\w+)`\]\(\.\./configs/(\w+)\.yaml\) \|", page, re.MULTILINE)
    assert sorted(named) == [(path.stem, path.stem) for path in sorted(FOLDER.glob("*.yaml"))]


@pytest.mark.parametrize(
    ("name", "world_size"), [*((name, 8) for name in PICTURES), *((name, 128) for name in PICTURES_AT_A_PATH)]
)
def test_schedules_resolve_and_batches_fit(name, world_size):
    config = load_shipped(name)
    batches = [phase.batch_size * world_size for phase in config.phases]
    assert max(batches) <= training_samples(config)
    assert all(batch % config.cache.shards == 0 for batch in batches)
    for of_phase in rates(config, world_size):
        assert min(of_phase) >= 0
        assert max(of_phase) > 0


ENTRY = "optimizer.name=lars optimizer.trust=0.0008 optimizer.weight_decay=0.0001 optimizer.nesterov=true"
LEVELS = "'normalise={mean: [123.675, 116.28, 103.53], std: [58.395, 57.12, 57.375]}'"  # of ImageNet
WARMUP = "'phases.0.density_warmup={start: 0.25, epochs: 4}' optimizer.momentum=0.9"  # gTop-k
SETTINGS = {
    "imagenet_resnet50_dawnbench": (
        f"model.name=resnet50 precision=float16 {ENTRY} {LEVELS} 'target={{metric: top5, at_least: 0.93}}'"
    ),
    "imagenet_resnet50_90epochs": (
        f"phases.0.epochs=90 phases.0.input_size=224 {LEVELS} optimizer.name=sgd optimizer.momentum=0.9 "
        "optimizer.nesterov=true optimizer.weight_decay=0.0001"
    ),
    "imagenet_vgg19": (
        f"model.name=vgg19 {ENTRY} {LEVELS} phases.0.epochs=90 phases.0.input_size=224 "
        "phases.0.batch_size=256 reducer.name=hitopk reducer.density=0.01"
    ),
    "cifar10_vgg16": (  # Ok-Topk, on 16 ranks
        "model.name=vgg16_cifar reducer.name=oktopk reducer.density=0.02 phases.0.epochs=160 "
        "phases.0.input_size=32 phases.0.batch_size=16"
    ),
    "cifar10_resnet20": (
        f"model.name=resnet20 reducer.name=gtopk reducer.density=0.001 phases.0.epochs=140 {WARMUP} "
        "phases.0.input_size=32 phases.0.batch_size=128"
    ),
    "wmt17_transformer": (
        "model.name=transformer precision=float16 optimizer.beta_2=0.98 optimizer.epsilon=1e-9 "
        "phases.0.steps=22000 phases.0.label_smoothing=0.1 reducer.name=hitopk reducer.density=0.01"
    ),
    # SparCML, for ATIS: two of 512
    "intents_lstm": "reducer.name=ssar_split reducer.selector=bucketed reducer.density=0.00390625",
    "ptb_lstm": (
        f"model.name=lstm_lm reducer.name=gtopk reducer.density=0.005 phases.0.epochs=40 {WARMUP} "
        "task.streams=true phases.0.batch_size=100"
    ),
    "bert_base": "optimizer.name=lamb phases.0.sequence_length=128 reducer.name=oktopk reducer.density=0.01",
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_words_of_a_paper_change_nothing_in_its_configuration(name):
    assert load_shipped(name, *shlex.split(SETTINGS[name])) == load_shipped(name)


EPOCH_OF_PTB = math.ceil(929_589 / 400 / 35)
RATES = {  # steps or places in epochs, and the rate there
    "imagenet_resnet50_90epochs": (
        Span(90 * 156, 156, 8192),
        {0: 0.1, 5: 3.2, 29.9: 3.2, 30: 0.32, 60: 0.032, 80: 0.0032, 89.9: 0.0032},
    ),
    "imagenet_vgg19": (Span(90 * 39, 39, 32_768), {90 - 1 / 39: 0}),
    "cifar10_vgg16": (Span(160 * 195, 195, 256), {0: 0.1, 160 - 1 / 195: 0.001}),
    "cifar10_resnet20": (Span(140 * 97, 97, 512), {0: 0.01, 4: 0.1, 69: 0.1, 70: 0.01, 105: 0.001}),
    "ptb_lstm": (Span(40 * EPOCH_OF_PTB, EPOCH_OF_PTB, 400), {0: 0.1, 4: 1, 24: 1, 25: 0.1, 35: 0.01}),
    "wmt17_transformer": (
        Span(22_000, 1, 4096 * 128),
        {0: 512**-0.5 * 4000**-1.5, 3999: 512**-0.5 * 4000**-0.5, 15_999: 512**-0.5 * 16_000**-0.5},
    ),
    # LAMB, table 4, for 512
    "bert_base": (Span(400_000, 1, 512), {1250: 5 / (2**3 * 10**3), 399_999: 0}),
}


@pytest.mark.parametrize("name", RATES)
def test_a_configuration_has_the_rates_of_its_paper(name):
    (span, expected), (phase,) = RATES[name], load_shipped(name).phases
    assert phase.steps in (None, span.steps)
    rate = phase.learning_rate.resolved(span)
    found = [rate.at(round(place * span.epoch_steps), span.steps) for place in expected]
    assert found == pytest.approx(list(expected.values()), rel=1e-12)


def test_dawnbench_has_the_phases_of_the_record():
    config = load_shipped("imagenet_resnet50_dawnbench")
    shape = [
        (phase.epochs, phase.input_size, phase.batch_size, phase.reducer.name) for phase in config.phases
    ]
    assert shape == [
        (13, 96, 256, "hitopk"),
        (11, 128, 256, "torus2d"),
        (3, 224, 256, "torus2d"),
        (1, 288, 128, "torus2d"),
    ]
    assert [phase.reducer.density for phase in config.phases] == [0.01, None, None, None]
    assert [phase.label_smoothing for phase in config.phases] == [0.1] * 4
    assert [phase.augmentation.area[0] for phase in config.phases] == [0.11, 0.11, 0.11, 0.5]


@pytest.mark.parametrize("world_size", [1, 8, 128])
def test_dawnbench_rises_for_13_epochs_and_falls_in_one_line_for_15(world_size):
    config = load_shipped("imagenet_resnet50_dawnbench")
    first, *falling = config.phases
    start, peak, last = (each * world_size / 128 for each in (0.2, 25, 0.2))
    found = rates(config, world_size)
    assert [found[0][0], found[0][-1]] == pytest.approx([start, peak], rel=1e-12)
    epoch, momentum = 0, (config.momentum_of(first).start, config.momentum_of(first).end)
    assert momentum == (0.98, 0.90)
    for phase, of_phase in zip(falling, found[1:], strict=True):
        for end, step in (("start", 0), ("end", -1)):
            line = peak + (last - peak) * epoch / 15
            assert of_phase[step] == pytest.approx(line, rel=1e-4)  # the file has five digits
            assert getattr(phase.momentum, end) == pytest.approx(0.90 + 0.08 * epoch / 15, abs=5e-5)
            epoch += phase.epochs if end == "start" else 0
    assert epoch == 15


def test_with_the_words_of_its_comment_vgg16_has_the_settings_of_gtopk():
    lines = CONFIGS["cifar10_vgg16"].read_text().splitlines()
    commented = " ".join(line.removeprefix("#   ") for line in lines if line.startswith("#   "))
    phases = load_shipped("cifar10_vgg16", *shlex.split(commented)).phases
    assert phases == load_shipped("cifar10_resnet20").phases


@pytest.mark.parametrize("name", ["brown_lstm", "ende_transformer", "intents_lstm"])
def test_text_of_packages_is_looked_for_where_the_command_leaves_it(name, monkeypatch):
    folder = name.split("_")[0]
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert load_shipped(name).dataset.path == f"/data/cloudtrain/{folder}"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert load_shipped(name).dataset.path == f"~/.local/share/cloudtrain/{folder}"


def test_synthetic_generates_what_the_phase_takes_at_any_size():
    assert load_shipped("synthetic").dataset.options["side"] == 96
    config = load_shipped(
        "synthetic", "model=vgg16_cifar", "phases.0.input_size=32", "dataset.classes=10", "dataset.samples=64"
    )
    dataset = config.make_dataset()
    assert dataset.classes == 10
    assert dataset.manifest("training").shape == (32, 32, 3)
    assert len(dataset.manifest("training")) == 64


@pytest.mark.parametrize("name", [name for name, each in MODELS.items() if each.signature == IMAGES])
def test_synthetic_takes_every_model(name):
    assert load_shipped("synthetic", f"model={name}").model.name == name  # whose smallest side is checked
