"""The source tree of this process; imports ``commlib`` alone, so that benches of any framework can use it."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from commlib import __version__

TREE = Path(__file__).parents[1]  # the parent of this package: a clone, or site-packages
PATIENCE_SECONDS = 20  # with git


@dataclass(frozen=True)
class Source:
    """The source tree of a process; of a git checkout its ``commit``, and whether a tracked file differs."""

    version: str
    commit: str | None = None
    dirty: bool | None = None


def source(tree: Path = TREE) -> Source:
    """Return the source tree of cloudtrain: its commit if it is a git checkout that git may read."""
    if not (tree / ".git").exists():
        return Source(__version__)
    try:
        commit = _git(tree, "rev-parse", "--verify", "HEAD").strip()
        changed = _git(tree, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):  # no git, no commit, or a tree that others own
        return Source(__version__)
    return Source(__version__, commit, dirty=bool(changed))


def _git(tree: Path, *words: str) -> str:
    # Without the variables that a git hook sets, which name another tree.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        ["git", "--no-optional-locks", "-C", str(tree), *words],  # noqa: S607 - that of the user
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
    ).stdout
