"""A configuration is what its file, what that includes and the command line say, or one line says why not."""

from pathlib import Path

import pytest

from commlib import REDUCERS
from tests.launching import DIGITS
from tests.training.refusal import refused
from training.config.config import ConfigurationError, load, load_with_warnings
from training.config.reading import Given, parsed_file, read, read_given, resolve


def assert_read_back(config, folder):
    """Expect a configuration to be read back equal from its resolved form."""
    (folder / "config.yaml").write_text(config.to_yaml())
    assert load(folder / "config.yaml") == config


def test_phases_take_what_they_do_not_name_from_the_configuration():
    config = load(DIGITS, ["reducer.density=0.05", "reducer.selector=exact"])
    first, second = config.phases
    assert config.reducer_config(first) == {
        "name": "hitopk",
        "density": 0.05,
        "selector": "exact",
        "wire": "fp32",
        "decay": 1.0,
        "hierarchical": True,
    }
    assert config.reducer_config(second) == {"name": "dense", "values": "fp32"}


@pytest.mark.parametrize("name", REDUCERS)
def test_the_reducer_of_the_command_line_replaces_the_default_of_the_file(name):
    assert [phase.reducer.name for phase in load(DIGITS, [f"reducer={name}"]).phases] == [name, "dense"]


OKTOPK = {"repartition_every": 64, "reevaluate_every": 32, "leftovers": "sender", "selector": "reused"}
RECORDS = {
    "a record beside the defaults of the file": (
        ["phases.1.reducer={name: oktopk, density: 0.05, repartition_every: 32, leftovers: owner}"],
        {"density": 0.05, "repartition_every": 32, "leftovers": "owner"},
    ),
    "an option below a name": (
        ["phases.1.reducer=oktopk", "phases.1.reducer.reevaluate_every=16"],
        {"reevaluate_every": 16},
    ),
    "an option below the configuration's name, from there": (
        ["reducer=oktopk", "reducer.leftovers=owner", "phases.1.reducer=null"],
        {"leftovers": "owner"},
    ),
    "an option of a phase that names no reducer": (
        ["reducer={name: oktopk, leftovers: owner}", "phases.1.reducer={reevaluate_every: 16}"],
        {"leftovers": "owner", "reevaluate_every": 16},
    ),
    "options of another reducer are inherited where this one takes them": (
        ["reducer={name: hioktopk, leftovers: owner}", "phases.1.reducer={name: oktopk, selector: exact}"],
        {"leftovers": "owner", "selector": "exact"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("words", "expected"), RECORDS.values(), ids=RECORDS)
def test_a_reducer_takes_all_options_of_its_signature(tmp_path, words, expected):
    config = load(DIGITS, words)
    given = (
        {"name": "oktopk", "density": 0.01, "wire": "fp32", "decay": 1.0, "hierarchical": False}
        | OKTOPK
        | expected
    )
    assert config.reducer_config(config.phases[1]) == given
    assert_read_back(config, tmp_path)


WRAPPERS = "wrappers: [{name: momentum_correction, momentum: 0.9}, {name: local_clipping, norm: 1.0}]"


def test_wrappers_are_inherited_by_sparse_reducers_alone(tmp_path):
    words = [f"reducer={{name: hitopk, {WRAPPERS}}}", "phases.0.momentum=0"]
    config = load(DIGITS, words)
    first, second = map(config.reducer_config, config.phases)
    assert first["wrappers"] == [
        {"name": "momentum_correction", "momentum": 0.9},
        {"name": "local_clipping", "norm": 1.0},
    ]
    assert second == {"name": "dense", "values": "fp32"}
    assert_read_back(config, tmp_path)
    without = load(DIGITS, [*words, "phases.0.reducer={wrappers: []}"])
    assert without.reducer_config(without.phases[0]) == load(DIGITS).reducer_config(config.phases[0]) | {
        name: value for name, value in first.items() if name != "wrappers"
    }


def test_codecs_are_joined_by_a_plus_and_a_selector_may_have_options(tmp_path):
    chunks = {"name": "bucketed", "bucket": 4096}
    config = load(
        DIGITS,
        ["reducer={name: hitopk, wire: gap+qsgd8, selector: {name: bucketed, bucket: 4096}, decay: 0.9}"],
    )
    options = config.reducer_config(config.phases[0])
    assert (options["wire"], options["selector"], options["decay"]) == ("gap+qsgd8", chunks, 0.9)
    assert_read_back(config, tmp_path)


def test_a_learning_rate_may_be_a_number_of_a_phase_or_of_the_configuration(tmp_path):
    words = ["learning_rate=0.05", "phases.0.learning_rate=null", "phases.1.learning_rate=1"]
    config = load(DIGITS, words)
    first, second = (phase.learning_rate for phase in config.phases)
    assert [first.at(step, 3) for step in range(3)] == [0.05] * 3
    assert [second.at(step, 7) for step in range(7)] == [1.0] * 7
    assert_read_back(config, tmp_path)


def test_a_word_below_a_name_keeps_the_name():
    config = load(DIGITS, ["optimizer=adam", "optimizer.beta_2=0.99"])
    assert (config.optimizer.name, config.optimizer.beta_2) == ("adam", 0.99)


OWN = "has no effect: every phase names its own"
WARNINGS = [
    (["reducer=dense", "phases.0.reducer=dense"], [f"reducer=dense {OWN}"]),
    (["phases.0.reducer.density=0.1"], ["reducer.density=0.01 has no effect: no phase takes it from here"]),
    (
        ["reducer={name: dsar_split, sums: qsgd4}", "phases.0.reducer=oktopk"],
        ["reducer.sums=qsgd4 has no effect: no phase takes it from here", f"reducer=dsar_split {OWN}"],
    ),
    (["learning_rate=0.05"], [f"learning_rate {OWN}"]),
    (["optimizer.momentum=0.5", "phases.0.momentum=0.9"], []),
    (
        ["optimizer.momentum=0.5", "phases.0.momentum=0.9", "phases.1.momentum=0.8"],
        [f"optimizer.momentum=0.5 {OWN}"],
    ),
    (["profile=mine.json"], ["profile=mine.json has no effect: no phase has reducer=auto"]),
    (["profile=mine.json", "reducer=auto"], []),
]


@pytest.mark.parametrize(("words", "warnings"), WARNINGS)
def test_a_setting_without_an_effect_is_warned_of(words, warnings):
    assert load_with_warnings(DIGITS, words).warnings == warnings


@pytest.mark.parametrize("reducer", ["hitopk", "auto"])
def test_the_density_of_a_phase_comes_before_that_of_the_configuration(reducer):
    words = [f"reducer={reducer}", "reducer.density=0.05", "phases.0.reducer.density=0.02"]
    config = load(DIGITS, [*words, f"phases.1.reducer={reducer}"])
    assert [config.density_of(phase) for phase in config.phases] == [0.02, 0.05]


def test_what_auto_picks_may_be_given_for_the_other_phases():
    loaded = load_with_warnings(
        DIGITS, ["reducer.wire=gap", "phases.0.reducer=auto", "phases.1.reducer=hitopk"]
    )
    first, second = loaded.config.phases
    assert (first.reducer.wire, second.reducer.wire) == (None, "gap")
    assert loaded.warnings == ["reducer=hitopk has no effect: every phase names its own"]


EARLY = "callbacks=[{name: early_stopping"
WRONG = {
    "output=/dev/null": "output: expected a folder, or a path that does not exist yet; got /dev/null",
    "density=0.1": "density: expected inside the reducer: reducer: {name: …, density: 0.1}, or reducer.den",
    "phases.1={steps: 1, input_size: 8, batch_size: 8, wire: fp16}": (
        "phases[1].wire: expected inside the reducer: reducer: {name: …, wire: 'fp16'}, or reducer.wire=…"
    ),
    "phases.0.reducer.density=2": "phases[0].reducer.density: expected a number in (0, 1], got 2",
    "reducer={name: oktopk, leftover: owner}": "reducer.leftover: oktopk has no such option (its options: "
    "density, decay, hierarchical, selector, wire, repartition_every, reevaluate_every, leftovers, "
    'wrappers), did you mean "leftovers"?',
    "phases.1.reducer.leftovers=owner": "phases[1].reducer.leftovers: dense has no such option (its options: "
    "values)",
    "phases.0.reducer={name: auto, wire: gap}": "phases[0].reducer.wire: auto picks its own; got 'gap'",
    "include=other.yaml": "include=other.yaml: expected in a file, whose own keys come before",
    "reducer={name: hitopk, wrappers: [{name: momentum}]}": "wrappers[0].name: unknown wrapper",
    "reducer={name: hitopk, wrappers: [{name: local_clipping, nrm: 0}]}": "wrappers[0].nrm: local_cl",
    "densty=0.1": "densty: unknown key (known here: name, ",
    "phases.0.densty=0.1": 'phases[0].densty: unknown key, did you mean "density_warmup"?',
    "reducer.density=.nan": "reducer.density: expected a number in (0, 1], got nan",
    "reducer=hitopkk": 'reducer.name: unknown reducer "hitopkk" (known: dense, torus2d, ',
    "reducer.selector=exat": 'reducer.selector: unknown selector "exat" (known: exact, mstopk, ',
    "reducer.selector={name: bucketed, bucket: 0}": "reducer.selector: bucket: expected a whole number of",
    "reducer.wire=fp33": 'reducer.wire: unknown codec "fp33" (known: raw32, gap, bitmap, fp32, ',
    "model=resnet9": 'model.name: unknown model "resnet9" (known: resnet8, resnet20, ',
    "dataset={name: text, path: /x, vocabulary: {type: words}}": 'unknown vocabulary.type "words"',
    "dataset=digit": 'dataset.name: unknown dataset "digit" (known: digits, mnist5k, cifar10, ',
    "phases.0.epochs=0": "phases[0].epochs: expected a whole number from 1, got 0",
    "phases.0.learning_rate=-1": "phases[0].learning_rate: expected a number from 0, or the keys start and",
    "optimizer={name: adam, momentum: 0.9}": "optimizer.momentum: unknown key (known here: name, ",
    "seed=4294967296": "seed: expected a whole number from 0 to 2³¹ − 1, got 4294967296",
    "optimizer.momentum=1": "optimizer.momentum: expected a number in [0, 1), got 1",
    "optimizer=lasr": 'optimizer.name: unknown optimizer "lasr" (known: sgd, adam, adamw, lars, lamb, ',
    "optimizer.exclude=(bias": "optimizer.exclude: expected a regular expression, got '(bias'",
    "optimizer={name: muon, adamw: 3}": "optimizer.adamw: expected a regular expression, got 3",
    "optimizer={name: muon, scale: max}": "optimizer.scale: expected 'rms' or 'spectral', got 'max'",
    "optimizer={name: muon, newton_schulz: all}": "optimizer.newton_schulz: expected 'auto', 'parts'",
    "optimizer={name: muon, momentum: 1}": "optimizer.momentum: expected a number in [0, 1), got 1",
    "optimizer={name: lamb, sharded: 1}": "optimizer.sharded: expected a valid boolean, got 1",
    "phases.0.steps=3": "phases[0]: expected one of epochs, steps, got epochs and steps",
    "phases.1.density_warmup={start: 0.25, epochs: 1}": "phases[1].density_warmup: expected none, the",
    "accumulate=3": "accumulate: expected a divisor of phases[0].batch_size = 16, got 3",
    "trace=0": "trace: expected a whole number from 1, got 0",
    "clip_norm=0": "clip_norm: expected a number above 0, got 0",
    "precision=float64": "precision: expected 'float32', 'float16' or 'bfloat16', got 'float64'",
    "model=vgg16_cifar": "phases[0].input_size: expected at least the 32 pixels that vgg16_cifar needs",
    "resume=auto": "resume: expected never where there are no checkpoints, got auto",
    "checkpoints.keep=0": "checkpoints.keep: expected a whole number from 1, got 0",
    "cache.exchange=0.5": "cache.exchange: expected 0 where shards is 1, got 0.5",
    "normalise={mean: [1, 2], std: [1]}": "normalise.std: expected as many as the 2 of mean, got 1",
    "ranks_per_node=[]": "ranks_per_node: expected a number of ranks, or a list of them, one a node, got []",
    "phases=[]": "phases: expected a list of one phase or more, got []",
    "name=a/b": "name: expected letters, digits, '_', '.' and '-', got 'a/b'",
    "seed": "seed: expected key=value",
    "seed=[1": "seed=[1: expected a YAML value, got '[1'",
    "phases.7.epochs=1": "phases.7.epochs=1: the configuration has no place phases.7.epochs",
    "task=image_clasification": 'task.name: unknown task "image_clasification"',
    "task={name: image_classification, labels: 3}": "task.labels: task image_classification has no such",
    "target={metric: bleu, at_least: 0.5}": "target.metric: expected one of top1, top5, the metr",
    "target={metric: top1, at_most: 0.5}": "target: expected at_least, since a higher top1 is better;",
    "target={metric: top1, at_least: 93}": "target.at_least: expected a number in (0, 1], got 93",
    "target={metric: top1}": "target: expected one of at_least, at_most, got none",
    "phases.0.sequence_length=8": "phases[0].sequence_length: unknown key (known here: epochs, steps, ",
    "callbacks=tensorboard": "callbacks: expected a valid list",
    "callbacks=[tensorbord]": 'callbacks[0].name: unknown callback "tensorbord"',
    EARLY + "}]": "callbacks[0]: metric: callback early_stopping needs this option",
    EARLY + ", metric: top1, patient: 3}]": "callbacks[0].patient: ",
    EARLY + ", metric: top1, patience: 0}]": "callbacks[0].patience: expected a whole number from 1, got 0",
    EARLY + ", metric: top1, min_delta: -1}]": "callbacks[0].min_delta: expected a number from 0, got -1",
    "callbacks=[{name: wandb, mode: 'on'}]": "callbacks[0].mode: expected online or offline",
    "digest_every=-1": "digest_every: expected a whole number from 0, got -1",
    "checkpoints={path: 'memory://x'}": "checkpoints.path: expected a folder, or the URL of a storage",
    "checkpoints={per_node: true}": "checkpoints.path: expected a folder on each node's disk",
    "checkpoints={path: /x, storage: {attempts: 2}}": "checkpoints.storage: expected none where path is",
    "checkpoints={path: 's3://x', storage: {attemts: 2}}": "checkpoints.storage.attemts: ",
    "dataset={name: cifar10, path: x, storage: {attemts: 2}}": "dataset.storage.attemts: ",
    "task=3": "task: expected a name, or the key name and options, got 3",
    "bucket_mib=0": "bucket_mib: expected a number above 0, got 0",
}


WRAPPED = f"phases.0.reducer={{{WRAPPERS}}}"
WRONG_TOGETHER = {
    ("reducer=auto", "reducer.wire=gap"): "reducer.wire: auto picks its own; got 'gap'",
    ("reducer=auto", "profile=3"): "profile: expected a valid string, got 3",
    (WRAPPED,): "optimizer.momentum: expected an optimizer without momentum, which momentum_corr",
    (WRAPPED, "phases.0.momentum=0.5"): "phases[0].momentum: expected an optimizer without momentum, which",
    ("optimizer=lamb", "phases.0.momentum=0.5"): "phases[0].momentum: expected none, lamb has no ",
    ("optimizer.sharded=true", "phases.1.reducer=hitopk"): "optimizer.sharded: expected false where no phase",
}


@pytest.mark.parametrize("words", [*((word,) for word in WRONG), *WRONG_TOGETHER])
def test_wrong_words_are_one_line_with_key_value_and_what_was_expected(words):
    with refused({**{(word,): line for word, line in WRONG.items()}, **WRONG_TOGETHER}[words]):
        load(DIGITS, words)


def test_an_error_has_its_key_as_a_value():
    with pytest.raises(ConfigurationError) as caught:
        load(DIGITS, ["phases.0.reducer.density=2"])
    assert caught.value.key == "phases[0].reducer.density"
    assert str(caught.value) == f"{DIGITS}: {caught.value.key}: {caught.value.text}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file, expected a YAML configuration"),
        ("", "name: missing, expected a value (and 3 more)"),
        ("- a\n- b\n", "expected keys and values, got ['a', 'b']"),
        ("a: 1\n b: 2\n", "line 2: not YAML"),
        (b"\xff\xfe\xa0", "cannot be read"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path, content, message):
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with refused(message, ConfigurationError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")


# what a file includes, and references


@pytest.fixture
def write(tmp_path):
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def test_own_keys_and_lists_come_before_those_of_an_included_file_and_records_are_merged(write):
    write("base.yaml", "a: 1\nb: {c: 2, d: {e: 3, f: 4}}\nlist: [1, 2]\nrecords: [{a: 1, b: 2}]\nvalue: 3\n")
    own = "include: base.yaml\nb: {d: {e: 30}, g: 5}\nlist: [9]\nrecords: [{a: 5}]\nvalue: null\n"
    merged = {"c": 2, "d": {"e": 30, "f": 4}, "g": 5}
    expected = {"a": 1, "b": merged, "list": [9], "records": [{"a": 5}], "value": None}
    assert read(write("run.yaml", own)) == expected


def test_of_several_files_the_later_one_wins_and_two_may_include_the_same_third(write):
    write("third.yaml", "a: 3\nb: 3\n")
    write("one.yaml", "include: third.yaml\nb: 1\nc: 1\n")
    write("two.yaml", "include: third.yaml\nb: 2\nc: 2\n")
    assert read(write("run.yaml", "include: [one.yaml, two.yaml]\nc: 3\n")) == {"a": 3, "b": 2, "c": 3}
    assert read(write("run.yaml", "include: [two.yaml, one.yaml]\n")) == {"a": 3, "b": 1, "c": 1}


def test_paths_are_relative_to_the_file_that_names_them(write, monkeypatch, tmp_path):
    write("presets/deep/inner.yaml", "a: inner\nb: inner\n")
    write("presets/outer.yaml", "include: deep/inner.yaml\nb: outer\n")
    own = write("runs/run.yaml", "include: ../presets/outer.yaml\n")
    monkeypatch.chdir(tmp_path / "presets")
    assert read(own) == {"a": "inner", "b": "outer"}


def test_a_configuration_that_includes_another_takes_words_of_the_command_line(write, tmp_path):
    own = write(
        "run.yaml", f"include: {DIGITS}\nname: mine\nreducer: {{density: 0.05}}\ncache: {{shards: 2}}\n"
    )
    config = load(own, ["reducer.density=0.1", "phases.0.epochs=3", "cache.memory=null"])
    assert (config.name, config.reducer.density, config.phases[0].epochs) == ("mine", 0.1, 3)
    assert (config.cache.disk, config.cache.memory, config.cache.shards) == ("auto", None, 2)
    assert "include" not in config.to_yaml()
    assert_read_back(config, tmp_path)


@pytest.mark.parametrize("back", ["run.yaml", "link.yaml"])
def test_a_file_that_leads_to_itself_is_refused_with_the_way(write, tmp_path, back):
    (tmp_path / "link.yaml").symlink_to("run.yaml")
    write("middle.yaml", f"include: {back}\n")
    with pytest.raises(ConfigurationError) as caught:
        read(write("run.yaml", "include: middle.yaml\n"))
    assert str(caught.value) == (
        f"{tmp_path}/middle.yaml: include: expected no file that includes itself, got "
        f"{tmp_path}/run.yaml → {tmp_path}/middle.yaml → {tmp_path}/{back}"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file, expected a YAML configuration"),
        ("a: 1\na: 2\n", "line 1: not YAML: expected every key once, got 'a' twice"),
    ],
)
def test_an_included_file_that_is_no_configuration_is_named(write, tmp_path, text, message):
    if text is not None:
        write("bad.yaml", text)
    own = write("run.yaml", "include: bad.yaml\n")
    with refused(f"{tmp_path}/bad.yaml: {message}") as caught:
        read(own)
    assert str(caught.value).endswith(f"(included by {own})")


def test_values_are_those_of_yaml_but_for_exponents_and_dates(write):
    text = "a: 1e-3\nb: 2020-01-01\nc: 12e4x\nd: yes\ne: '1e3'\nf: ~\ng: 0x10\nh: [1.5, .nan]\n"
    values = parsed_file(write("run.yaml", text))
    assert str(values.pop("h")) == "[1.5, nan]"
    assert values == {"a": 0.001, "b": "2020-01-01", "c": "12e4x", "d": True, "e": "1e3", "f": None, "g": 16}


REFERENCES = {
    "a value": ({"p": [{"e": 3}], "a": "${p[0].e}", "b": "${p.0.e} of ${a}"}, {"a": 3, "b": "3 of 3"}),
    "of the same record": ({"a": {"x": 1, "y": "${.x}", "z": "${..c}"}, "c": 2},
                           {"a": {"x": 1, "y": 1, "z": 2}}),
    "the environment as text": ({"a": "${oc.env:NUMBER}"}, {"a": "1e-3"}),
    "its text as a value": ({"a": "${oc.decode:${oc.env:NUMBER}}"}, {"a": 0.001}),
    "a default": ({"a": "${oc.env:NONE,~/.local/share}/x", "b": "${oc.env:NONE, it's}"},
                  {"a": "~/.local/share/x", "b": "it's"}),
    "a default in quotes, or null": ({"a": "${oc.env:NONE,'x y'}", "b": "${oc.env:NONE,null}"},
                                     {"a": "x y", "b": None}),
}  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), REFERENCES.values(), ids=REFERENCES)
def test_references(monkeypatch, given, expected):
    monkeypatch.setenv("NUMBER", "1e-3")
    monkeypatch.delenv("NONE", raising=False)
    assert resolve(given) == given | expected


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"a": "${b}", "b": "${a}"}, "a"),
        ({"a": "${oc.env:NO_SUCH_VARIABLE}"}, "a"),
        ({"secret": "${oc.decode:${oc.env:HOME}}"}, "secret"),
    ],
)
def test_a_reference_that_is_wrong_is_one_line_with_its_key(given, key):
    with refused(f"{key}: expected ", ConfigurationError) as caught:
        resolve(given)
    assert caught.value.key == key


def test_references_are_resolved_in_the_merged_file_and_a_file_is_read_once(write):
    write("base.yaml", "a: 1\nb: ${a}\n")
    path = write("run.yaml", "include: base.yaml\na: 2\ntask: linear\n")
    given = read_given(path, ["c=${b}"])
    assert given == Given(path, {"a": 2, "b": 2, "c": 2, "task": "linear"})
    assert given.keys["task"] == "linear"
    path.unlink()
    assert read_given(given) is given
