"""Where a user's files go, and what is said where there is no place for them."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from commlib.errors import InvalidArgument
from commlib.folders import expanded, user_cache


@pytest.mark.parametrize("home", [None, "", "relative"])
def test_a_missing_home_is_one_line_that_names_it(monkeypatch: pytest.MonkeyPatch, home: str | None) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    unknown = RuntimeError("Could not determine home directory.")  # to the system
    monkeypatch.setattr(Path, "home", Mock(side_effect=unknown))
    if home is not None:
        monkeypatch.setenv("HOME", home)
    for call in (user_cache, lambda: expanded("~/samples")):
        with pytest.raises(InvalidArgument, match="HOME: expected the path of the user's home") as raised:
            call()
        assert "\n" not in str(raised.value)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert user_cache() == Path("/somewhere/cloudtrain")


def test_a_relative_cache_home_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", "/home/me")
    assert user_cache() == Path("/home/me/.cache/cloudtrain")
    assert expanded("~/a/b") == Path("/home/me/a/b")
    assert expanded("~") == Path("/home/me")
    assert expanded("/a/~") == Path("/a/~")
