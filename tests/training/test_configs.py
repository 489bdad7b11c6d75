"""What ships in ``configs/`` loads, is what its sources say, and fits the ranks that it is meant for."""

import inspect
import math
import re
import shlex
from pathlib import Path

import pytest
import yaml

from training.config.config import Config, ConfigurationError, load, load_with_warnings
from training.config.schedules import Span, momentum_at
from training.datasets import DATASETS
from training.models import IMAGES, MODELS

FOLDER = Path(__file__).parents[2] / "configs"
CONFIGS = {
    path.stem: path for path in sorted(FOLDER.glob("*.yaml")) if "task: linear" not in path.read_text()
}
PRESETS = sorted(FOLDER.glob("presets/*.yaml"))
NEED_A_PATH = [name for name in CONFIGS if name.startswith(("imagenet", "cifar10", "ptb", "bert", "wmt17"))]
LOCAL = ["brown_diloco", "brown_sparseloco"]
WINDOWS = ["bert_base", "brown_bert_small", "brown_gpt_small", "brown_lstm", "ptb_lstm", *LOCAL]
TEXT = [*WINDOWS, "ende_transformer", "intents_lstm", "wmt17_transformer"]
OF_PACKAGES = ("brown", "ende", "intents")  # whose files cloudtrain data leaves where they are looked for
PICTURES = [name for name in CONFIGS if name not in TEXT]
PICTURES_AT_A_PATH = [name for name in PICTURES if name in NEED_A_PATH]
IMAGENET = [name for name in CONFIGS if name.startswith("imagenet")]
TRAINING_SAMPLES = {"digits": 1437, "mnist5k": 4000, "cifar10": 50_000, "imagenet": 1_281_167}


def load_shipped(name: str, *words: str) -> Config:
    """Load a shipped configuration; the path is looked at only when the data set is made."""
    path = ["dataset.path=somewhere"] if name in NEED_A_PATH else []
    return load(CONFIGS[name], [*path, *words])


def training_samples(config: Config) -> int:
    name = config.dataset.name
    samples: int = config.dataset.options["samples"] if name == "synthetic" else TRAINING_SAMPLES[name]
    return samples


def spans(config: Config, world_size: int) -> list[Span]:
    """Return what the schedules of each phase run over."""
    found = []
    for phase in config.phases:
        global_batch = phase.batch_size * world_size
        epoch_steps = training_samples(config) // global_batch
        steps = phase.steps or epoch_steps * phase.epochs
        found.append(Span(steps, epoch_steps, global_batch))
    return found


def rates(name: str, world_size: int) -> list[list[float]]:
    """Return the learning rate of every step of every phase."""
    config = load_shipped(name)
    return [
        [rate.at(step, span.steps) for step in range(span.steps)]
        for span, rate in (
            (span, phase.learning_rate.resolved(span))
            for phase, span in zip(config.phases, spans(config, world_size), strict=True)
        )
    ]


def included(path: Path) -> list[Path]:
    """Return the files that a configuration includes, at any depth."""
    given = yaml.safe_load(path.read_text()).get("include", [])
    direct = [(path.parent / name).resolve() for name in ([given] if isinstance(given, str) else given)]
    return [file for each in direct for file in (each, *included(each))]


# -------------------------------------------------------------------------------------- all of them


def test_all_that_were_promised_are_there():
    assert list(CONFIGS) == [
        *("bert_base", "brown_bert_small", "brown_diloco", "brown_gpt_small", "brown_lstm"),
        "brown_sparseloco",
        *("cifar10_resnet20", "cifar10_vgg16", "digits", "digits_lars", "ende_transformer"),
        *("imagenet_resnet50_90epochs", "imagenet_resnet50_dawnbench", "imagenet_vgg19"),
        *("intents_lstm", "mnist5k", "ptb_lstm", "synthetic", "wmt17_transformer"),
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_each_loads_without_warnings_under_its_own_name(name):
    path = ["dataset.path=somewhere"] if name in NEED_A_PATH else []
    loaded = load_with_warnings(CONFIGS[name], path)
    assert loaded.config.name == name
    assert loaded.warnings == []


@pytest.mark.parametrize("name", CONFIGS)
def test_each_is_read_back_equal_from_its_resolved_form(name, tmp_path):
    config = load_shipped(name)
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert load(tmp_path / "config.yaml") == config


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_is_used(path):
    assert path.resolve() in {file for config in CONFIGS.values() for file in included(config)}


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


@pytest.mark.parametrize("name", CONFIGS)
def test_a_path_is_needed_where_the_data_set_takes_one(name):
    takes_path = "path" in inspect.signature(DATASETS[load_shipped(name).dataset.name]).parameters
    assert takes_path == (name in NEED_A_PATH or name.startswith(OF_PACKAGES))


@pytest.mark.parametrize(
    ("name", "world_size"),
    [*((name, 8) for name in PICTURES), *((name, 128) for name in PICTURES_AT_A_PATH)],
)
def test_schedules_resolve_and_batches_fit(name, world_size):
    config = load_shipped(name)
    batches = [phase.batch_size * world_size for phase in config.phases]
    assert max(batches) <= training_samples(config)
    assert all(batch % config.cache.shards == 0 for batch in batches)
    for of_phase in rates(name, world_size):
        assert min(of_phase) >= 0
        assert max(of_phase) > 0


@pytest.mark.parametrize("world_size", [8, 128])
@pytest.mark.parametrize("name", PICTURES_AT_A_PATH)
def test_the_largest_rate_grows_with_the_ranks(name, world_size):
    largest = {
        "imagenet_resnet50_dawnbench": 25 / 128,
        "imagenet_resnet50_90epochs": 0.1 * 64 / 256,
        "imagenet_vgg19": 10 / 128,
        "cifar10_vgg16": 0.1 / 16,
        "cifar10_resnet20": 0.1 / 4,
    }
    found = max(rate for of_phase in rates(name, world_size) for rate in of_phase)
    assert found == pytest.approx(largest[name] * world_size, rel=1e-12)


# ---------------------------------------------------------------------------------------- DAWNBench


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
    assert (config.model.name, config.precision, config.optimizer.name) == ("resnet50", "float16", "lars")
    assert (config.target.metric, config.target.at_least) == ("top5", 0.93)


@pytest.mark.parametrize("world_size", [1, 8, 128])
def test_dawnbench_rises_for_13_epochs_and_falls_in_one_line_for_15(world_size):
    config = load_shipped("imagenet_resnet50_dawnbench")
    first, *falling = config.phases
    start, peak, last = (each * world_size / 128 for each in (0.2, 25, 0.2))
    found = rates("imagenet_resnet50_dawnbench", world_size)
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


def test_dawnbench_hands_the_rate_and_the_momentum_on_from_phase_to_phase():
    config, found = load_shipped("imagenet_resnet50_dawnbench"), rates("imagenet_resnet50_dawnbench", 128)
    for number in range(3):
        before, after = config.phases[number], config.phases[number + 1]
        assert found[number][-1] == found[number + 1][0]
        assert momentum_at(before.momentum, 9, 10) == momentum_at(after.momentum, 0, 10)


def test_lars_is_the_entrys():
    for name in ("imagenet_resnet50_dawnbench", "imagenet_vgg19"):
        optimizer = load_shipped(name).optimizer
        assert (optimizer.name, optimizer.trust, optimizer.weight_decay) == ("lars", 0.0008, 0.0001)
        assert optimizer.nesterov


@pytest.mark.parametrize("name", IMAGENET)
def test_imagenet_is_normalised_by_its_levels(name):
    config = load_shipped(name)
    assert config.normalise.mean == pytest.approx([255 * mean for mean in (0.485, 0.456, 0.406)])
    assert config.normalise.std == pytest.approx([255 * std for std in (0.229, 0.224, 0.225)])


# --------------------------------------------------------------------------------- the papers' others


def test_90_epochs_warm_up_from_the_rate_of_256_and_drop_by_ten_three_times():
    config = load_shipped("imagenet_resnet50_90epochs")
    (phase,) = config.phases
    assert (phase.epochs, phase.input_size, config.optimizer.name) == (90, 224, "sgd")
    assert (config.optimizer.momentum, config.optimizer.nesterov) == (0.9, True)
    assert config.optimizer.weight_decay == 0.0001
    ((span,), (found,)) = spans(config, 128), rates("imagenet_resnet50_90epochs", 128)
    assert span.global_batch == 8192
    assert found[0] == 0.1
    at_epochs = [found[round(epoch * span.epoch_steps)] for epoch in (5, 29.9, 30, 60, 80, 89.9)]
    assert at_epochs == pytest.approx([3.2, 3.2, 0.32, 0.032, 0.0032, 0.0032], rel=1e-12)


def test_vgg19_is_sparse_for_90_epochs_and_dense_on_request():
    config = load_shipped("imagenet_vgg19")
    (phase,) = config.phases
    assert (config.model.name, phase.epochs, phase.input_size, phase.batch_size) == ("vgg19", 90, 224, 256)
    assert (phase.reducer.name, phase.reducer.density) == ("hitopk", 0.01)
    assert rates("imagenet_vgg19", 128)[0][-1] == 0
    dense = load_shipped("imagenet_vgg19", "reducer=torus2d")
    assert (dense.phases[0].reducer.name, dense.phases[0].reducer.density) == ("torus2d", None)


def test_vgg16_has_the_settings_of_oktopk():
    config = load_shipped("cifar10_vgg16")
    (phase,) = config.phases
    assert (config.model.name, phase.reducer.name, phase.reducer.density) == ("vgg16_cifar", "oktopk", 0.02)
    assert (phase.epochs, phase.input_size, phase.batch_size * 16) == (160, 32, 256)
    found = rates("cifar10_vgg16", 16)[0]
    assert [found[0], found[-1]] == pytest.approx([0.1, 0.001])


def test_vgg16_takes_the_settings_of_gtopk_that_its_comment_names():
    lines = CONFIGS["cifar10_vgg16"].read_text().splitlines()
    commented = " ".join(line.removeprefix("#   ") for line in lines if line.startswith("#   "))
    (phase,) = load_shipped("cifar10_vgg16", *shlex.split(commented)).phases
    assert (phase.reducer.name, phase.reducer.density) == ("gtopk", 0.001)
    assert (phase.epochs, phase.batch_size) == (140, 128)
    assert phase.density_warmup.epochs == 4
    span = Span(140 * 97, 97, 512)
    rate = phase.learning_rate.resolved(span)
    assert [rate.at(step, span.steps) for step in (0, 4 * 97)] == [0.01, 0.1]


def test_resnet20_has_the_settings_of_gtopk():
    config = load_shipped("cifar10_resnet20")
    (phase,) = config.phases
    assert (config.model.name, phase.reducer.name, phase.reducer.density) == ("resnet20", "gtopk", 0.001)
    assert (phase.epochs, phase.input_size, phase.batch_size) == (140, 32, 128)
    assert config.optimizer.momentum == 0.9
    densities = phase.density_warmup.densities(phase.reducer.density)
    assert len(densities) == 4
    assert densities[0] == 0.25
    ((span,), (found,)) = spans(config, 4), rates("cifar10_resnet20", 4)
    at_epochs = [found[epoch * span.epoch_steps] for epoch in (0, 4, 69, 70, 105)]
    assert at_epochs == pytest.approx([0.01, 0.1, 0.1, 0.01, 0.001], rel=1e-12)


# ---------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize("name", TEXT)
def test_models_of_text_are_of_their_task_and_take_its_sequences(name):
    config = load_shipped(name)
    assert MODELS[config.model.name].kind == config.task.make().signature.kind
    longest = getattr(MODELS[config.model.name].checked(config.model.options), "longest", math.inf)
    assert all(getattr(phase, "sequence_length", 0) <= longest for phase in config.phases)


def test_wmt17_has_the_settings_of_its_papers():
    config = load_shipped("wmt17_transformer")
    (phase,) = config.phases
    assert (config.model.name, config.precision, phase.steps) == ("transformer", "float16", 22_000)
    assert (phase.reducer.name, phase.reducer.density) == ("hitopk", 0.01)
    assert (config.optimizer.beta_2, config.optimizer.epsilon, phase.label_smoothing) == (0.98, 1e-9, 0.1)
    rate = phase.learning_rate.resolved(Span(22_000, 260, 4096 * 128))
    rates = [rate.at(step, 22_000) for step in (0, 3999, 15_999)]
    assert rates == pytest.approx([512**-0.5 * 4000**-1.5, 512**-0.5 * 4000**-0.5, 512**-0.5 * 16_000**-0.5])


def test_intents_have_the_density_of_sparcml_for_atis():
    phase = load_shipped("intents_lstm").phases[0]
    assert (phase.reducer.name, phase.reducer.selector) == ("ssar_split", "bucketed")
    assert phase.reducer.density * 512 == 2


def test_ptb_has_the_settings_of_gtopk():
    config = load_shipped("ptb_lstm")
    (phase,) = config.phases
    assert (config.model.name, phase.reducer.name, phase.reducer.density) == ("lstm_lm", "gtopk", 0.005)
    assert (phase.epochs, phase.batch_size, config.optimizer.momentum) == (40, 100, 0.9)
    assert config.task.make().streams
    densities = phase.density_warmup.densities(phase.reducer.density)
    assert (len(densities), densities[0]) == (4, 0.25)
    epoch = math.ceil(929_589 / 400 / 35)
    rate = phase.learning_rate.resolved(Span(40 * epoch, epoch, 400))
    assert [rate.at(step * epoch, 40 * epoch) for step in (0, 4, 24, 25, 35)] == pytest.approx(
        [0.1, 1, 1, 0.1, 0.01]
    )


def test_bert_has_the_steps_and_density_of_oktopk_and_the_rates_of_lamb():
    config = load_shipped("bert_base")
    (phase,) = config.phases
    assert (phase.reducer.name, phase.reducer.density, phase.sequence_length) == ("oktopk", 0.01, 128)
    assert config.optimizer.name == "lamb"
    rate = phase.learning_rate.resolved(Span(phase.steps, 1000, 512))
    assert rate.at(1250, phase.steps) == 5 / (2**3 * 10**3)  # table 4, for 512
    assert rate.at(phase.steps - 1, phase.steps) == 0
    assert phase.learning_rate.warmup.steps * 320 == phase.steps


@pytest.mark.parametrize("name", ["brown_lstm", "ende_transformer", "intents_lstm"])
def test_text_of_packages_is_looked_for_where_the_command_leaves_it(name, monkeypatch):
    folder = name.split("_")[0]
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert load_shipped(name).dataset.path == f"/data/cloudtrain/{folder}"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert load_shipped(name).dataset.path == f"~/.local/share/cloudtrain/{folder}"


# ------------------------------------------------------------------------------------- the small ones


def test_mnist5k_has_dawnbenchs_shape():
    sparse, dense = load_shipped("mnist5k").phases
    assert (sparse.reducer.name, dense.reducer.name) == ("hitopk", "dense")
    assert sparse.input_size < dense.input_size == 28
    assert sparse.learning_rate.start < sparse.learning_rate.end == dense.learning_rate.start == 0.1
    assert dense.learning_rate.end == 0
    assert not sparse.augmentation.mirror
    assert not dense.augmentation.mirror


def test_synthetic_generates_what_the_phase_takes_at_any_size():
    assert load_shipped("synthetic").dataset.options["side"] == 96
    config = load_shipped(
        "synthetic", "model=vgg16_cifar", "phases.0.input_size=32", "dataset.classes=10", "dataset.samples=64"
    )
    dataset = config.make_dataset()
    assert dataset.classes == 10
    assert dataset.manifest("training").shape == (32, 32, 3)
    assert len(dataset.manifest("training")) == 64


@pytest.mark.parametrize("name", [name for name, each in MODELS.items() if each.kind == IMAGES.kind])
def test_synthetic_takes_every_model(name):
    assert load_shipped("synthetic", f"model={name}").model.name == name  # whose smallest side is checked
