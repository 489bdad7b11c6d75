"""The configurations that ship with the package, found by name: ``digits`` wherever a file may be named."""

import os.path  # whose questions are answered by no for a name too long for a file
from pathlib import Path

from commlib.errors import UnknownName, look_up
from training.config.schema import ConfigurationError

_PACKAGE = Path(__file__).parents[1]
_INSTALLED, _IN_A_CLONE = _PACKAGE / "configs", _PACKAGE.parent / "configs"  # see setup.py
FOLDER = _INSTALLED if _INSTALLED.is_dir() else _IN_A_CLONE


def located(given: str | Path) -> Path:
    """Return the file of a path or a name: an existing file, else the configuration of that name.

    Raises ``ConfigurationError`` for an unknown name. What looks like a path is returned unchanged.
    """
    path = Path(given)
    if path.suffix or len(path.parts) != 1 or (os.path.exists(path) and not os.path.isdir(path)):
        return path
    try:
        return look_up(
            {each.stem: each for each in sorted(FOLDER.glob("*.yaml"))}, "configuration", str(path)
        )
    except UnknownName as error:
        raise ConfigurationError(f"expected a YAML file or the name of one that ships: {error}") from None


def included(path: Path, name: str) -> Path:
    """Return the file that ``include: NAME`` in ``path`` means: next to it, else one that ships."""
    own = path.parent / name
    shipped = FOLDER / name
    return shipped if os.path.isfile(shipped) and not os.path.exists(own) else own
