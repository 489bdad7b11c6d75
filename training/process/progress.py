"""The progress output of a run: a live line in a terminal, periodic plain lines elsewhere.

Under MPI, rank 0 writes to a pipe that the launcher reads (or to a pseudo-terminal created by MPI, which
is no better). There ``cloudtrain launch`` has the terminal: it sets ``CLOUDTRAIN_LIVE``, rank 0
marks the lines that may be replaced, and the launcher shows them live.
"""

import json
import os
import statistics
import sys
import time
from collections import deque
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from datacache.escaping import escaped

LIVE_VARIABLE = "CLOUDTRAIN_LIVE"
LIVE_MARK = "\x1fcloudtrain-live\x1f"

# Set by a launcher that needs the run's folder; the mark with which rank 0 prints the folder.
FOLDER_VARIABLE = "CLOUDTRAIN_FOLDER"
FOLDER_MARK = "\x1fcloudtrain-folder\x1f"

PLAIN_SECONDS = 5.0  # between plain lines: the log file of a week-long run stays small
LIVE_SECONDS = 0.5

STEPS_MEASURED = 64  # whose median predicts the time of a step
STEPS_NEEDED = 3  # before a remaining time is shown


def print_line(line: str) -> None:
    """Print one line to standard output; characters that its encoding lacks are escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    print(escaped(line).encode(encoding, "backslashreplace").decode(encoding), flush=True)


def announce_folder(path: Path) -> None:
    """Print the run's folder for a launcher that has asked for it."""
    if os.environ.get(FOLDER_VARIABLE):
        print(f"{FOLDER_MARK}{json.dumps(str(path.absolute()))}", flush=True)


class TimeLeft:
    """Predicts the time of the next steps by the median of the latest: one slow step changes nothing."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=STEPS_MEASURED)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def of(self, steps: int) -> float | None:
        """Return the seconds that so many steps will take; ``None`` before some were measured."""
        return None if len(self._seconds) < STEPS_NEEDED else steps * statistics.median(self._seconds)


class Screen:
    """A terminal with permanent lines and, below them, one that is replaced."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, emoji=False, markup=False, soft_wrap=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def say(self, line: str) -> None:
        self._console.print(line)

    def update(self, line: str) -> None:
        """Replace the live line; an empty one removes it."""
        if not line:
            self._live.stop()
            return
        self._live.start()
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()  # also if the body raises: it restores the cursor


def has_launcher() -> bool:
    """Return whether a launcher started this process; MPI may then have made its terminal."""
    return "OMPI_COMM_WORLD_SIZE" in os.environ or "PMIX_RANK" in os.environ


class Progress:
    """The lines of rank 0; the other ranks make a silent one."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        self._screen = Screen() if not has_launcher() and sys.stdout.isatty() else None
        self._mark = LIVE_MARK if os.environ.get(LIVE_VARIABLE) else ""
        self._seconds = LIVE_SECONDS if self._screen or self._mark else PLAIN_SECONDS
        self._last = time.monotonic()
        self._is_live = False

    def say(self, line: str) -> None:
        if self._silent:
            return
        if self._screen:
            self._screen.say(escaped(line))
        else:
            print_line(line)

    def update(self, line: str) -> None:
        """Show where the run is now, unless it was shown a moment ago."""
        if self._silent or time.monotonic() - self._last < self._seconds:
            return
        self._last = time.monotonic()
        self._is_live = True
        if self._screen:
            self._screen.update(line)
        else:
            print(self._mark + line, flush=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._screen:
            self._screen.__exit__()
        elif self._mark and self._is_live:
            print(self._mark, flush=True)  # clears the launcher's live line at the end
