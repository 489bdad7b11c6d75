"""``--help`` of every command: no types of Python, no sentence that is cut, at any width."""

import re

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from training.commands.main import app

ROOT = get_command(app)


def commands(command=ROOT, words=()):
    yield words
    if hasattr(command, "commands"):
        for name, each in command.commands.items():
            yield from commands(each, (*words, name))


def help_of(words, columns: int) -> str:
    """Return the help, its lines joined: a word may stand on any of them."""
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("columns", [60, 200])
@pytest.mark.parametrize("words", list(commands()), ids=lambda words: " ".join(words) or "cloudtrain")
def test_help_shows_no_types_of_python_and_cuts_no_sentence(words, columns):
    text = help_of(words, columns)
    assert not re.search(r"<(list|int|str|float|bool)", text)
    assert "[[" not in text
    assert not re.search(r"\w\.\.\.(\s|$)", text), text
    for line in text.splitlines():
        assert not line.endswith("…")
