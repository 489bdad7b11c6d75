"""A file is what it includes with its own keys on top, or one line says which file cannot be had."""

from pathlib import Path

import pytest

from training.config.config import ConfigurationError, load
from training.config.includes import read
from training.config.references import resolve

DIGITS = Path(__file__).parents[2] / "configs" / "digits.yaml"


@pytest.fixture
def write(tmp_path):
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def content_of(path: Path) -> dict:
    return read(path)


def test_own_keys_come_before_included_ones_and_records_are_merged(write):
    write("base.yaml", "a: 1\nb: {c: 2, d: {e: 3, f: 4}}\n")
    own = write("run.yaml", "include: base.yaml\nb: {d: {e: 30}, g: 5}\n")
    assert content_of(own) == {"a": 1, "b": {"c": 2, "d": {"e": 30, "f": 4}, "g": 5}}


def test_lists_are_replaced_as_a_whole_and_null_replaces_too(write):
    write("base.yaml", "list: [1, 2, 3]\nrecords: [{a: 1, b: 2}]\nvalue: 3\n")
    own = write("run.yaml", "include: base.yaml\nlist: [9]\nrecords: [{a: 5}]\nvalue: null\n")
    assert content_of(own) == {"list": [9], "records": [{"a": 5}], "value": None}


def test_of_several_files_the_later_one_wins(write):
    write("one.yaml", "a: 1\nb: 1\nc: 1\n")
    write("two.yaml", "b: 2\nc: 2\n")
    assert content_of(write("run.yaml", "include: [one.yaml, two.yaml]\nc: 3\n")) == {"a": 1, "b": 2, "c": 3}
    assert content_of(write("run.yaml", "include: [two.yaml, one.yaml]\n")) == {"a": 1, "b": 1, "c": 1}


def test_paths_are_relative_to_the_file_that_names_them(write, monkeypatch, tmp_path):
    write("presets/deep/inner.yaml", "a: inner\nb: inner\n")
    write("presets/outer.yaml", "include: deep/inner.yaml\nb: outer\n")
    own = write("runs/run.yaml", "include: ../presets/outer.yaml\n")
    monkeypatch.chdir(tmp_path / "presets")
    assert content_of(own) == {"a": "inner", "b": "outer"}


def test_two_files_may_include_the_same_third(write):
    write("third.yaml", "a: 3\n")
    write("one.yaml", "include: third.yaml\nb: 1\n")
    write("two.yaml", "include: third.yaml\nc: 2\n")
    assert content_of(write("run.yaml", "include: [one.yaml, two.yaml]\n")) == {"a": 3, "b": 1, "c": 2}


def test_references_are_resolved_in_the_merged_file(write):
    write("base.yaml", "a: 1\nb: ${a}\n")
    merged = read(write("run.yaml", "include: base.yaml\na: 2\n"))
    assert resolve(merged) == {"a": 2, "b": 2}


def test_a_configuration_that_includes_another_takes_words_of_the_command_line(write, tmp_path):
    own = write(
        "run.yaml", f"include: {DIGITS}\nname: mine\nreducer: {{density: 0.05}}\ncache: {{shards: 2}}\n"
    )
    config = load(own, ["reducer.density=0.1", "phases.0.epochs=3", "cache.memory=null"])
    assert (config.name, config.reducer.density, config.phases[0].epochs) == ("mine", 0.1, 3)
    assert (config.cache.disk, config.cache.memory, config.cache.shards) == ("auto", None, 2)
    assert "include" not in config.to_yaml()
    (tmp_path / "written.yaml").write_text(config.to_yaml())
    assert load(tmp_path / "written.yaml") == config


def test_a_file_is_included_in_a_file_only():
    with pytest.raises(ConfigurationError) as caught:
        load(DIGITS, ["include=other.yaml"])
    assert str(caught.value) == (
        "include=other.yaml: expected in a file, whose own keys come before what it includes"
    )


def test_a_file_that_is_not_there_is_named_with_the_one_that_includes_it(write, tmp_path):
    write("middle.yaml", "include: missing.yaml\n")
    with pytest.raises(ConfigurationError) as caught:
        read(write("run.yaml", "include: middle.yaml\n"))
    assert str(caught.value) == (
        f"{tmp_path}/missing.yaml: no such file, expected a YAML configuration "
        f"(included by {tmp_path}/middle.yaml)"
    )


@pytest.mark.parametrize("back", ["run.yaml", "middle.yaml", "folder/../run.yaml", "link.yaml"])
def test_a_file_that_leads_to_itself_is_refused_with_the_way(write, tmp_path, back):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.yaml").symlink_to("run.yaml")
    write("middle.yaml", f"include: {back}\n")
    with pytest.raises(ConfigurationError) as caught:
        read(write("run.yaml", "include: middle.yaml\n"))
    assert str(caught.value) == (
        f"{tmp_path}/middle.yaml: include: expected no file that includes itself, got "
        f"{tmp_path}/run.yaml → {tmp_path}/middle.yaml → {tmp_path}/{back}"
    )


@pytest.mark.parametrize("given", ["3", "null", "[a.yaml, 3]", "{a: b}", "''", "[[a.yaml]]"])
def test_what_is_no_file_name_is_refused(write, given):
    own = write("run.yaml", f"include: {given}\n")
    with pytest.raises(ConfigurationError) as caught:
        read(own)
    assert str(caught.value).startswith(f"{own}: include: expected a file or a list of files, got ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\n b: 2\n", "line 2: not YAML: "),
        ("a: 1\na: 2\n", "line 1: expected every key once, got 'a' twice"),
        ("- a\n", "expected keys and values, got ['a']"),
    ],
)
def test_an_included_file_that_is_no_configuration_is_named(write, tmp_path, text, message):
    write("bad.yaml", text)
    own = write("run.yaml", "include: bad.yaml\n")
    with pytest.raises(ConfigurationError) as caught:
        read(own)
    assert str(caught.value).startswith(f"{tmp_path}/bad.yaml: {message}")
    assert str(caught.value).endswith(f"(included by {own})")
    assert "\n" not in str(caught.value)


def test_an_empty_file_adds_nothing(write):
    write("empty.yaml", "")
    assert content_of(write("run.yaml", "include: empty.yaml\na: 1\n")) == {"a": 1}


def test_a_list_and_a_record_under_the_same_key_take_the_own_one(write):
    write("base.yaml", "a: [1, 2]\nb: {c: 1}\n")
    assert content_of(write("run.yaml", "include: base.yaml\na: {x: 1}\nb: [3]\n")) == {
        "a": {"x": 1},
        "b": [3],
    }
