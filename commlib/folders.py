"""The user's cache folder, for files that can be made again at any time."""

import os
from pathlib import Path

from commlib.errors import InvalidArgument


def user_cache() -> Path:
    """Return this program's folder in the user's cache, below ``$XDG_CACHE_HOME`` or ``~/.cache``.

    Raises :class:`InvalidArgument` where there is neither.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))  # whose relative paths are to be ignored
    return (given if given.is_absolute() else _home("~/.cache") / ".cache") / "cloudtrain"


def expanded(path: str) -> Path:
    """Return a path with ``~`` replaced; raises :class:`InvalidArgument` where there is no home folder."""
    if path == "~" or path.startswith("~/"):
        return _home(path) / path[2:]
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InvalidArgument(f"{path}: expected a path, got one of a user who has no home folder") from error


def _home(wanted: str) -> Path:
    given = os.environ.get("HOME")
    try:
        home = Path.home() if given is None else Path(given)
    except RuntimeError:  # HOME is not set, and the system does not know the user
        home = Path()
    if not home.is_absolute():
        raise InvalidArgument(
            f"{wanted}: HOME: expected the path of the user's home folder, got {given or 'nothing'}: "
            "set HOME or XDG_CACHE_HOME, or name a folder"
        )
    return home
