"""The files that ship with the package, found by name: ``digits`` wherever a configuration may be named."""

import os.path  # whose questions are answered by no for a name too long for a file
from pathlib import Path

from commlib.errors import UnknownName, look_up
from training.config.schema import ConfigurationError

_PACKAGE = Path(__file__).parents[1]


def folder_of(name: str) -> Path:
    """Return a folder of files that ship: in the package where it is installed, else in the clone."""
    installed, in_a_clone = _PACKAGE / name, _PACKAGE.parent / name  # see setup.py
    return installed if installed.is_dir() else in_a_clone


FOLDER = folder_of("configs")


def located(given: str | Path, kind: str = "configuration", folder: Path = FOLDER) -> Path:
    """Return the file of a path or a name: an existing file, else the one of that name in ``folder``.

    Raises ``ConfigurationError`` for an unknown name. What looks like a path is returned unchanged.
    """
    path = Path(given)
    if path.suffix or len(path.parts) != 1 or (os.path.exists(path) and not os.path.isdir(path)):
        return path
    try:
        return look_up({each.stem: each for each in sorted(folder.glob("*.yaml"))}, kind, str(path))
    except UnknownName as error:
        raise ConfigurationError(f"expected a YAML file or the name of one that ships: {error}") from None


def included(path: Path, name: str) -> Path:
    """Return the file that ``include: NAME`` in ``path`` means: next to it, else one that ships."""
    own = path.parent / name
    shipped = FOLDER / name
    return shipped if os.path.isfile(shipped) and not os.path.exists(own) else own
