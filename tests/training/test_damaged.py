"""Configurations and profiles that are damaged, or made to do harm: one line of bounded length, or valid."""

import json
import os
import random
from pathlib import Path

import pytest

from commlib import InvalidArgument, Link, Network, Topology
from commlib.cost import Speeds
from commlib.errors import LONGEST_LINE
from commlib.transport import simulated
from commlib.tuning.probe import WIRES, Candidate, Profile, Trial, job_of
from tests.extent import ALL
from training.config.config import Config, ConfigurationError, load
from training.run.autotune import choose_reducers

FOLDER = Path(__file__).parents[2] / "configs"
CONFIGS = [path for path in sorted(FOLDER.rglob("*.yaml")) if "task: linear" not in path.read_text()]
DIGITS = next(path for path in CONFIGS if path.name == "digits.yaml")
TRIES = 600 if ALL else 100
TOO_LONG = 2 * LONGEST_LINE  # with what is escaped


def line_of(error: BaseException) -> str:
    """Return the message, of which no terminal sees more than a line."""
    line = str(error)
    assert line.isprintable(), line
    assert len(line) < TOO_LONG
    return line


def refused(path: Path, *words: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(path, words)
    return line_of(caught.value)


def laughs(entry: str, above: str, first: str, levels: int = 12) -> str:
    """Return keys of which each holds the one before ten times."""
    return first + "".join(
        entry.format(name=f"l{level}", ten=", ".join([above.format(name=f"l{level - 1}", level=level)] * 10))
        for level in range(1, levels)
    )


HARMFUL = {
    "a: " + "[" * 100_000: "line 1: expected at most 32 lists and records in each other, got more",
    "{a: " * 10_000: "line 1: expected at most 32 lists and records in each other, got more",
    "- " * 20_000: "line 1: expected at most 32 lists and records in each other, got more",
    "density: "
    + "9" * 400: "density: expected a number of at most 64 bits, got a number of about 400 digits",
    "density: " + "9" * 5000: "not YAML: a value is not of the kind that it is said to be: Exceeds the limit",
    "seed: 0x" + "9" * 9000: "seed: expected a number of at most 64 bits, got a number of about 10836 digits",
    f"include: {DIGITS}\nclip_norm: -1e99999": "clip_norm: expected a number above 0, got -inf",
    "digits": "expected keys and values, got 'digits'",
    "3": "expected keys and values, got 3",
    "name: \0": "not YAML: special characters are not allowed",
    'name: "\\0\\e[31m"': "name: expected no control characters, got '\\x00\\x1b[31m'",
    f"include: {DIGITS}\nmodel: a\u202eb": 'model.name: unknown model "a\\u202eb"',
    "name: " + "x" * 200_000: "line 1: expected at most 10,000 characters, got 200,000",
    "#" * 300_000: "cannot be read: expected at most 262,144 bytes, got more",
    "a: [" + "b, " * 20_000 + "]": "line 1: expected at most 10,000 values, got more",
    laughs(
        "{name}: &{name} [{ten}]\n", "*{name}", "l0: &l0 [1]\n"
    ): "expected at most 10,000 values, got more",
    laughs("{name}: [{ten}]\n", "'${{{name}}}'", "l0: [1]\n"): "l4: expected at most 10,000 values, got more",
    laughs(
        '{name}: "{ten}"\n', "${{{name}}}", "l0: xxxx\n"
    ): "l4: expected at most 10,000 characters, got more",
    "a: &a [*a]": "line 1: expected at most 32 lists and records in each other, got more",
    "a: ${b}\nb: ${a}": "a: expected no reference to what holds it",
    "a: {b: '${a}'}": "a: expected no reference to what holds it",
    "a: ${b": "a: expected ${key}, ${oc.env:NAME} or ${oc.decode:${oc.env:NAME}}, got '${b'",
    "a: ${${b}}": "a: expected ${key}, ${oc.env:NAME} or ${oc.decode:${oc.env:NAME}}, got '${${b}}'",
    "a: ${oc.create:b}": "a: expected ${key}, ${oc.env:NAME} or ${oc.decode:${oc.env:NAME}}, got",
    "a: ${b.c}": "a: expected a reference to a key that is there, got '${b.c}'",
    "a: x${b}\nb: [1]": "a: expected references to text or numbers inside of a text, got ${b}",
    "a: !!int x": "not YAML: a value is not of the kind that it is said to be",
    "a: !!python/name:os.system": "line 1: expected text, a number, true, false, null, a list or a record",
    "a: !!set {b}": "line 1: expected text, a number, true, false, null, a list or a record, got '!!set'",
    "3: 4": "expected keys that are text, got 3",
    "? [a]\n: 1": "line 1: not YAML: found unhashable key",
    "a: 1\na: 2": "line 1: expected every key once, got 'a' twice",
    "include: [" + "a.yaml, " * 100 + "]": "no such file",
    'include: "a\\0b"': "include: expected a file or a list of files, got 'a\\x00b'",
    "include: " + "x/" * 4000: "cannot be read: File name too long",
}


@pytest.mark.parametrize("text", HARMFUL, ids=lambda text: ascii(text[:30]))
def test_a_harmful_configuration_is_refused_in_one_bounded_line(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert HARMFUL[text] in refused(path)


def test_what_is_no_regular_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    assert refused(tmp_path / "pipe.yaml").endswith("cannot be read: expected a regular file")
    (tmp_path / "run.yaml").write_text("include: pipe.yaml")
    assert "cannot be read: expected a regular file (included by" in refused(tmp_path / "run.yaml")
    (tmp_path / "run.yaml").write_text("include: /dev/zero")
    assert "/dev/zero: cannot be read: expected a regular file" in refused(tmp_path / "run.yaml")
    assert 'unknown configuration "a\\x00b"' in refused(Path("a\0b"))


def test_files_that_include_each_other_again_and_again_are_counted(tmp_path):
    for level in range(20):
        (tmp_path / f"{level}.yaml").write_text(f"include: [{level + 1}.yaml, {level + 1}.yaml]\n")
    (tmp_path / "20.yaml").write_text("seed: 1\n")
    assert "include: expected at most 64 files, got more" in refused(tmp_path / "0.yaml")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("dataset=" + "x" * 9000, 'dataset.name: unknown dataset "xxx'),
        ("a" * 100_000, "aaa: expected key=value"),
        ("a." * 10_000 + "b=1", "the configuration has no place a.a.a."),
        ("\x1b[31m=1", "the configuration has no place \\x1b[31m"),
        ("\x1b=1", "\\x1b: unknown key (known here: "),
        ("phases.0.epochs=" + "[" * 5000, "expected a YAML value, got '[[["),
    ],
    ids=lambda text: ascii(text[:20]),
)
def test_values_in_messages_are_short_and_escaped(word, message):
    assert message in refused(DIGITS, word)


# at random, but the same each time

NUMBERS = [
    *("-1", "0", "1e400", ".nan", "9" * 400, "true", "1_000", "0x_", "1e-400", "2147483648", "''", "null")
]
TEXTS = [
    *("${a}", "${seed}", "${phases}", "${.}", "${..}", "\x00", "\x1b[2J", "\ud7ff", "é" * 50, "x" * 5000),
    *("~", "=", "<<"),
]
MARKS = [
    *("[", "]", "{", "}", ": ", "- ", "&a ", "*a", "!!int ", "|", ">", "'", '"', "\n", "\t", "#", ",", "? "),
    *("%", "---\n"),
]


def damaged(text: str, chance: random.Random) -> str:
    """Return a text with one to four of its places changed."""
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(text) + 1)
        until = min(len(text), at + chance.choice([0, 0, 1, 3, 30]))
        piece = chance.choice(
            [
                "",
                chance.choice(NUMBERS),
                chance.choice(TEXTS),
                chance.choice(MARKS),
                chance.choice(MARKS) * 40,
                text[chance.randrange(len(text) + 1) :][: chance.randint(0, 60)],
                chr(chance.randrange(1, 0x2FF)),
            ]
        )
        text = text[:at] + piece + text[until:]
    return text


def test_many_damaged_configurations_are_valid_or_refused_in_one_line(tmp_path):
    chance, valid = random.Random(15), 0
    for number in range(TRIES):
        source = CONFIGS[number % len(CONFIGS)]
        path = source.with_name(source.name)
        text = damaged(path.read_text(), chance)
        (tmp_path / "presets").mkdir(exist_ok=True)
        for preset in (source.parent / "presets").glob("*.yaml"):
            (tmp_path / "presets" / preset.name).write_bytes(preset.read_bytes())
        (tmp_path / "run.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            assert isinstance(load(tmp_path / "run.yaml"), Config)
            valid += 1
        except ConfigurationError as error:
            line_of(error)
    assert 0 < valid < TRIES


def test_many_damaged_words_are_valid_or_refused_in_one_line():
    chance = random.Random(15)
    words = [
        "phases.0.learning_rate={start: 0.1, end: 0}",
        "dataset.path=x",
        "phases[1].epochs=3",
        "reducer.density=0.1",
    ]
    for _ in range(TRIES):
        try:
            assert isinstance(load(DIGITS, [damaged(chance.choice(words), chance)]), Config)
        except ConfigurationError as error:
            line_of(error)


def whole_profile(topology: Topology) -> Profile:
    speeds = Speeds(1e-9, 1e-9, 1e-9, 1e-8, 1e-8, 1e-8, dict.fromkeys(WIRES, 1e-9))
    links = [Link.of(microseconds=5, gbit_per_second=rate) for rate in (100, 1)]
    trials = (Trial(Candidate("hitopk", "fp32"), 1000, 0.01, 0.5), Trial(Candidate("dense"), 1000, 0.01, 0.1))
    return Profile(job_of(topology), Network(*links), speeds, trials)


def changed(content, chance: random.Random):
    """Return a copy of what JSON holds with one value changed, lost or repeated."""
    if isinstance(content, dict) and content and chance.random() < 0.8:
        key = chance.choice(list(content))
        kind = chance.random()
        rest = {name: value for name, value in content.items() if name != key}
        if kind < 0.1:
            return rest
        return {**rest, key if kind < 0.9 else f"{key}\x1b": changed(content[key], chance)}
    if isinstance(content, list) and content and chance.random() < 0.8:
        at = chance.randrange(len(content))
        return [
            *content[:at],
            *chance.choice([[], [changed(content[at], chance)], content]),
            *content[at + 1 :],
        ]
    numbers = (-1, 0, 1e308, 10**400, 5e-324, float("nan"), float("inf"))
    return chance.choice([None, True, "x" * 5000, "\x1b[31m", *numbers, [], {}, [[]]])


def test_a_damaged_profile_is_used_or_refused_in_one_line(tmp_path):
    path = tmp_path / "profile.json"
    chance = random.Random(15)

    def damage(number: int) -> str:
        text = path.read_text()
        if number % 3 == 0:
            return damaged(text, chance)
        content = json.loads(text)
        return json.dumps(changed(content, chance)) if number else "[" * 100_000

    def body(comm):
        topology = Topology(comm, ranks_per_node=1)
        config = load(DIGITS, ["reducer={name: auto, density: 0.01}", f"profile={path}"])
        counts = {"used": 0, "refused": 0}
        whole = whole_profile(topology)
        for number in range(TRIES):
            if comm.rank == 0:
                whole.save(path)
                path.write_bytes(damage(number).encode("utf-8", "surrogatepass"))
            comm.barrier()
            try:
                profile = Profile.load(path)
                profile.check(whole.job)
            except InvalidArgument as error:
                line_of(error)
                profile = None
            comm.barrier()
            if profile is None:
                counts["refused"] += 1
                continue
            try:
                choices = choose_reducers(config, topology, profile, 1000)
            except ValueError as error:
                counts["refused"] += "to measure again" in line_of(error)
            else:
                counts["used"] += len(choices) == 1
        return counts

    counts, other = simulated.run(body, 2)
    assert counts == other
    assert sum(counts.values()) == TRIES
    assert counts["used"] > TRIES / 50
    assert counts["refused"] > TRIES / 2
