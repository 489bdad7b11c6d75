"""Every block of code in the documents runs in a test, or is read as what would run it reads it."""

import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import typer.main

from benchmarks.emulated import __main__ as cluster
from tests.launching import DIGITS, ROOT, run, tail
from training.commands.main import app
from training.config.config import load

PAGES = ["README.md", "CONTRIBUTING.md", "datacache/README.md", "benchmarks/README.md"]
PAGES += [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]
# Whose >>> are run by tests/test_docs.py and test_docs_pto.py.
PROMPTED = {"docs/linear.md", "docs/pto.md", "docs/reducers.md", "docs/training.md"}
# Programs, by tests/test_readme.py, test_examples.py, test_docs_from_horovod.py, torch, jax and
# training/test_own_parts.py.
RUN_ELSEWHERE = {"README.md": 5, "docs/own_parts.md": 7}
RUN_ELSEWHERE |= {"docs/from_horovod.md": 1, "docs/from_jax.md": 1, "docs/from_pytorch.md": 2}
WRITTEN_BY_USERS = ("my.yaml", "my_cluster.yaml", "my.py")
OF_OTHERS = {"git", "docker", "kubectl", "sbatch"}  # of which only the files are checked
COMMANDS = {"cd", "source", "mpirun", "horovodrun", "python", "pytest", "cloudtrain", *OF_OTHERS}
OUTPUT = ""  # blocks without a language are pictures and what commands print


class Block(NamedTuple):
    page: str
    language: str
    text: str


BLOCKS = [
    Block(page, language, text)
    for page in PAGES
    for language, text in re.findall(
        r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL
    )
]
LINES = [
    pytest.param(line, id=f"{block.page}:{line}"[:80])
    for block in BLOCKS
    if block.language == "sh"
    for line in block.text.splitlines()
    if shlex.split(line, comments=True)
]


def of(page: str, language: str) -> list[str]:
    """Return the blocks of a page in a language."""
    return [block.text for block in BLOCKS if block[:2] == (page, language)]


def test_every_block_is_of_a_kind_that_some_test_runs_or_reads():
    assert {block.language for block in BLOCKS} == {"python", "yaml", "toml", "sh", OUTPUT}
    programs = {}
    for block in BLOCKS:
        if block.language == "python" and ">>> " not in block.text:
            programs[block.page] = programs.get(block.page, 0) + 1
        elif block.language == "python":
            assert block.page in PROMPTED
    assert programs == RUN_ELSEWHERE | {"docs/training.md": 1, "datacache/README.md": 1}


@pytest.mark.slow
def test_the_program_of_datacache_reads_no_sample_from_storage_twice():
    (program,) = of("datacache/README.md", "python")
    result = run(sys.executable, "-c", program)
    assert result.returncode == 0, tail(result)
    *batches, counts = result.stdout.splitlines()
    assert [line.split(" [")[0] for line in batches] == [f"{epoch} (8, 96, 96, 3)" for epoch in (0, 0, 1, 1)]
    storage, memory = (int(re.search(rf"\b{name}=(\d+)", counts)[1]) for name in ("storage", "memory"))
    assert storage <= 24  # of its shard
    assert storage + memory == 2 * 2 * 8


@pytest.mark.slow
def test_the_program_of_training_trains(tmp_path, monkeypatch, capsys):
    (program,) = (text for text in of("docs/training.md", "python") if ">>> " not in text)
    (tmp_path / "configs").mkdir()
    brief = re.sub(r"epochs: \d+", "epochs: 1", Path(DIGITS).read_text()).replace("disk: auto", "disk: null")
    (tmp_path / "configs" / "digits.yaml").write_text(brief.replace("memory: auto", "memory: null"))
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    assert re.fullmatch(r"0\.\d+ \[.*\]", capsys.readouterr().out.splitlines()[-1])


def test_the_configuration_of_training_is_one_beside_the_folder_of_configurations(tmp_path):
    (text,) = of("docs/training.md", "yaml")
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "my.yaml").write_text(text)
    config = load(tmp_path / "my.yaml")
    assert (config.name, len(config.phases), config.cache.shards) == ("my_run", 2, 16)


@pytest.mark.parametrize(
    "page", ["datacache/README.md", "docs/callbacks.md", "docs/pto.md", "docs/security.md"]
)
def test_keys_that_are_shown_alone_belong_to_a_configuration(page, tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "a secret")
    for number, text in enumerate(of(page, "yaml")):
        shutil.copy(DIGITS, tmp_path)
        (tmp_path / f"{number}.yaml").write_text(f"include: digits.yaml\n{text}")
        assert load(tmp_path / f"{number}.yaml").name == "digits"


@pytest.mark.parametrize("line", LINES)
def test_a_command_exists_and_takes_what_it_is_given(line):
    words = shlex.split(line, comments=True)
    first = words[0].removeprefix("./")
    if "|" in words:
        words = words[: words.index("|")]
    if first.startswith("scripts/"):
        assert (ROOT / first).is_file()
    else:
        assert first in COMMANDS
    for word in words:
        if word.endswith((".py", ".sh", ".yaml")) and word not in WRITTEN_BY_USERS:
            assert (ROOT / word).is_file(), word
    if words[:3] == ["python", "-m", "benchmarks.emulated"]:
        cluster._parser().parse_args(words[3:])
    if "cloudtrain" in words and first not in OF_OTHERS:
        accept(words[len(words) - words[::-1].index("cloudtrain") :])


def accept(words: list[str]) -> None:
    """Let ``cloudtrain`` read these words; an option that it does not know is an error."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        name, *words = words
        assert name in command.commands, name
        command = command.commands[name]
    command.make_context("cloudtrain", words)
