"""What the README and docs/ show is there: code runs, or is read as what would run it reads it.

Links are followed by tests/test_site.py.
"""

import ast
import doctest
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
import typer.main

import commlib.keras
from benchmarks.draw_reducers import simulate
from benchmarks.emulated import __main__ as cluster
from commlib import CODECS, REDUCERS, SELECTORS
from commlib.reducers import reducer_options
from tests.launching import DIGITS, MPIRUN, ROOT, run, tail
from tests.test_imports import sources
from training.commands.main import app
from training.config.config import load

PAGES = ["README.md", "CONTRIBUTING.md", "datacache/README.md", "benchmarks/README.md"]
PAGES += [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]
PROMPTED = ["docs/linear.md", "docs/reducers.md", "docs/training.md"]
# Programs, also of tests/test_examples.py, torch, jax and training/test_own_parts.py. What horovodrun starts
# trains in training/test_train.py.
PROGRAMS = {"README.md": 5, "datacache/README.md": 1, "docs/training.md": 1, "docs/own_parts.md": 7}
PROGRAMS |= {"docs/from_horovod.md": 1, "docs/from_jax.md": 1, "docs/from_pytorch.md": 1}
PROGRAMS |= {"docs/local_steps.md": 1}
WRITTEN_BY_USERS = ("my.yaml", "my_cluster.yaml", "my.py")
OF_OTHERS = {"git", "docker", "kubectl", "sbatch"}  # of which only the files are checked
COMMANDS = {"cd", "source", "mpirun", "horovodrun", "python", "pytest", "cloudtrain", *OF_OTHERS}
OUTPUT = ""  # blocks without a language are pictures and what commands print


class Block(NamedTuple):
    page: str
    language: str
    text: str


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


BLOCKS = [
    Block(page, language, text)
    for page in PAGES
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)
]
LINES = [
    pytest.param(line, id=f"{block.page}:{line}"[:80])
    for block in BLOCKS
    if block.language == "sh"
    for line in block.text.splitlines()
    if shlex.split(line, comments=True)
]


def of(page: str, language: str) -> list[str]:
    """Return the blocks of a page in a language, without those of prompts."""
    return [block.text for block in BLOCKS if block[:2] == (page, language) and ">>> " not in block.text]


def test_every_block_is_of_a_kind_that_some_test_runs_or_reads():
    assert {block.language for block in BLOCKS} == {"python", "yaml", "toml", "sh", OUTPUT}
    assert {page: len(of(page, "python")) for page in PAGES if of(page, "python")} == PROGRAMS
    assert {block.page for block in BLOCKS if ">>> " in block.text} == {*PROMPTED, "docs/pto.md"}


@pytest.mark.parametrize("page", [*PROMPTED, pytest.param("docs/pto.md", marks=pytest.mark.slow)])
def test_the_examples_print_what_the_page_shows(page):
    examples = doctest.DocTestParser().get_doctest(text_of(page), {}, page, page, 0)
    assert 0 < len(examples.examples) == text_of(page).count("\n>>> ")
    assert doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF).run(examples).failed == 0


def test_the_program_of_the_readme_sends_what_it_says():
    (program,) = (text for text in of("README.md", "python") if "transport.simulated.run" in text)
    # (m − 1)·ρ·d/n = 5 entries of 8 bytes between nodes; 500 values and at most 10 entries inside
    result = run(sys.executable, "-c", program)
    assert result.returncode == 0, tail(result)
    assert re.fullmatch(r"\(\d+, LinkBytes\(intra=20\d\d, inter=40\)\)\n", result.stdout)


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
    (program,) = of("docs/training.md", "python")
    (tmp_path / "configs").mkdir()
    brief = re.sub(r"epochs: \d+", "epochs: 1", Path(DIGITS).read_text())
    brief = brief.replace(": auto", ": null").replace("resnet8", "vgg_tiny")
    (tmp_path / "configs" / "digits.yaml").write_text(brief)
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    assert re.fullmatch(r"0\.\d+ \[.*\]", capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.launch
def test_the_program_for_users_of_horovod_trains_saves_and_goes_on_on_two_ranks(tmp_path):
    (program,) = of("docs/from_horovod.md", "python")
    (tmp_path / "my.py").write_text(program)
    result = run(*MPIRUN, "2", sys.executable, "my.py", cwd=tmp_path)
    assert result.returncode == 0, tail(result)
    first, second = re.findall(r"rank \d: (\d+) steps, (\d) epochs, loss (\S+)", result.stdout)
    assert first == second
    steps, epochs, loss = first
    assert int(steps) == 36 * int(epochs) + 40
    assert float(loss) < 1  # the targets' variance is 8
    assert not (tmp_path / "backup").exists()


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
    if "digits" in words:
        assert load(DIGITS, [word for word in words if re.match(r"[a-z_.]+=", word)]).name == "digits"


def accept(words: list[str]) -> None:
    """Let ``cloudtrain`` read these words; an option that it does not know is an error."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        name, *words = words
        assert name in command.commands, name
        command = command.commands[name]
    command.make_context("cloudtrain", words)


def test_the_error_shown_is_the_error_printed():
    command, line = re.search(r"^\$ cloudtrain (launch .*)\n(.*), …\)$", text_of("README.md"), re.M).groups()
    result = run("cloudtrain", *command.split())
    assert result.returncode == 2
    assert result.stderr.startswith(line)


# ------------------------------------------------------------- names, tables and pictures


def section(page: str, title: str) -> str:
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text_of(page), re.MULTILINE | re.DOTALL)[1]


@pytest.mark.parametrize(
    ("page", "title", "table"),
    [
        ("README.md", "Reducers", REDUCERS),
        ("docs/reducers.md", "Selectors", SELECTORS),
        ("docs/reducers.md", "Codecs", CODECS),
    ],
)
def test_a_table_has_what_the_code_has(page, title, table):
    rows = re.findall(r"^\| (`.*?) \|", section(page, title), re.MULTILINE)
    assert re.findall(r"`(\w+)`", "".join(rows)) == list(table)


@pytest.mark.parametrize("name", REDUCERS)
def test_a_section_names_the_options_of_the_code_and_their_defaults(name):
    text = section("docs/reducers.md", f"`{name}`")
    (options,) = re.findall(r"^- \*\*Options:\*\* (.*?)\n(?=- |\n)", text, re.MULTILINE | re.DOTALL)
    named = {option: ast.literal_eval(default) for option, default in re.findall(r"`(\w+)=(.+?)`", options)}
    assert named == reducer_options(name)


def texts(picture: Path) -> list[str]:
    """Return the texts of an SVG."""
    return [element.text for element in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("name", REDUCERS)
def test_the_picture_is_of_the_code_as_it_is(name):
    # The caption holds the bytes and the time. To draw it again: python -m benchmarks.draw_reducers
    assert simulate(name).caption in texts(ROOT / "docs" / "reducers" / f"{name}.svg")


def test_every_name_for_users_of_horovod_is_there():
    page = text_of("docs/from_horovod.md")
    shown = set(re.findall(r"^\| `.*?` \| `(\w+)\(.*` \|$", page, re.MULTILINE))
    assert len(shown) >= 5
    assert shown <= set(commlib.keras.__all__) <= set(re.findall(r"`(\w+)", page))


def test_every_reference_in_a_docstring_leads_to_a_name_of_ours():
    modules = {part for name in sources() for part in name.split(".")}
    nodes = [node for tree in sources().values() for node in ast.walk(tree)]
    defined = {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    assigned = {node.id for node in nodes if isinstance(node, ast.Name)}
    broken = []
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            for name in re.findall(
                r":(?:class|mod|func|meth|data|exc|attr):`~?([^`]+)`", ast.get_docstring(node) or ""
            ):
                broken += {*name.split(".")} - modules - defined - assigned
    assert broken == []
