"""What the README says is what is there."""

import re
import shlex
import sys

import pytest

from commlib import REDUCERS
from tests.launching import DIGITS, ROOT, run, tail
from training.config.config import load

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    shlex.split(line, comments=True)
    for language, block in BLOCKS
    if language == "sh"
    for line in block.splitlines()
]


def test_the_table_of_reducers_is_the_table_of_the_code():
    section = README.split("## Reducers")[1]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(REDUCERS)


def python_block(word):
    (block,) = [block for language, block in BLOCKS if language == "python" and word in block]
    return block


def test_the_python_example_runs():
    example = python_block("transport.simulated.run")
    # (m − 1)·ρ·d/n = 5 entries of 8 bytes between nodes; 500 values and at most 10 entries inside
    result = run(sys.executable, "-c", example)
    assert result.returncode == 0, tail(result)
    assert re.fullmatch(r"\(\d+, LinkBytes\(intra=20\d\d, inter=40\)\)\n", result.stdout)


def test_every_command_names_files_and_keys_that_are_there():
    trained = 0
    for words in COMMANDS:
        for word in words:
            if word.startswith(("./scripts/", "configs/")):
                assert (ROOT / word).is_file(), word
        if "digits" in words:
            overrides = [word for word in words if re.match(r"[a-z_.]+=", word)]
            assert load(DIGITS, overrides).name == "digits"
            trained += 1
    assert trained == 10


def test_the_error_shown_is_the_error_printed():
    shown = re.search(r"^\$ cloudtrain (launch .*)\n(.*), …\)$", README, re.MULTILINE)
    assert shown is not None
    result = run("cloudtrain", *shown[1].split())
    assert result.returncode == 2
    assert result.stderr.startswith(shown[2])


@pytest.mark.slow
@pytest.mark.launch
def test_the_horovodrun_command_trains(tmp_path):
    (command,) = [words for words in COMMANDS if words[:1] == ["horovodrun"]]
    brief = [f"output={tmp_path}", "phases.0.epochs=1", "phases.1.epochs=1"]
    result = run(*command, *brief)
    assert result.returncode == 0, tail(result)
    assert "test accuracy" in result.stdout
