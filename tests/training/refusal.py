"""Errors as a user meets them: one line."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def refused(said: str, error: type[Exception] = ValueError) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of one line, which has this text."""
    with pytest.raises(error, match=re.escape(said)) as caught:
        yield caught
    assert "\n" not in str(caught.value)
