"""A file is what it includes with its own keys on top, or one line says which file cannot be read."""

from pathlib import Path

import pytest

from tests.launching import DIGITS
from tests.training.refusal import refused
from tests.training.test_config import assert_read_back
from training.config.config import ConfigurationError, load
from training.config.reading import Given, parsed_file, read, read_given, resolve


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
