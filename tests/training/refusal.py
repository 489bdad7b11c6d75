"""Errors as a user meets them: one line."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from click.testing import Result
from typer.testing import CliRunner

from training.commands.main import app


@contextmanager
def refused(said: str, error: type[Exception] = ValueError) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of one line, which has this text."""
    with pytest.raises(error, match=re.escape(said)) as caught:
        yield caught
    assert "\n" not in str(caught.value)


def invoke(*words: object) -> Result:
    """Run ``cloudtrain`` in this process."""
    return CliRunner().invoke(app, list(map(str, words)))


def refusal(*words: object) -> str:
    """Return the line with which the command refuses words; its status is then 2."""
    result = invoke(*words)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = result.stderr.splitlines()
    return line.removeprefix("cloudtrain: ")
