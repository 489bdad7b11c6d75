"""What a job prints, as ``cloudtrain launch`` shows it: without mpirun's tags, banners and other noise."""

import json
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from commlib.tf_logging import NOISE
from training.process import guard
from training.process.progress import FOLDER_MARK, LIVE_MARK, Screen

RANK_TAG = re.compile(r"(?:^|\0)\[\d+,\d+\]<std(?:out|err)>: ?")  # NUL: see Output.forward_errors
SIGNALLED = re.compile(r"prterun noticed that process")
KNOWN_ALREADY = re.compile(
    r"MPI_ABORT was invoked|prterun (has exited due to|detected that one or more) process"
)
# printed occasionally by mpirun when it ends ranks of which one has just exited
PEER_EXITED = re.compile(r"PMIX ERROR: PMIX_ERR_UNREACH in file")
# The job is over. mpirun may then wait for its daemon on a lost host for ever.
IS_ENDING = re.compile(r"Remote daemon: \S+ on node |has waited \d+ s for other ranks at ")
ENDS_WITHIN_SECONDS = 2.5
LAST_LINES = 200  # in which the supervisor looks for the reason of a failure


class Output:
    """Forwards what a job prints; ``said`` holds the last lines.

    ``was_asked`` returns whether the job was asked to end. ``folder``: that of the job's run, once a rank has
    announced it. ``is_ending``: the job has printed that it ends by a failure.
    """

    def __init__(self, was_asked: Callable[[], bool] = bool) -> None:
        self.said: deque[str] = deque(maxlen=LAST_LINES)
        self.folder: Path | None = None
        self._was_asked = was_asked
        self._group: int | None = None  # of the job's processes
        self._ending: threading.Timer | None = None
        self.is_ending = False
        self._is_read = threading.Event()

    def follow(self, process: "subprocess.Popen[str]") -> int:
        """Forward until the job ends; return its status."""
        assert process.stdout is not None
        assert process.stderr is not None
        self._group = process.pid
        threading.Thread(target=self._close_late, args=(process,), daemon=True).start()
        errors = threading.Thread(target=self.forward_errors, args=(process.stderr,), daemon=True)
        errors.start()
        self.forward_output(process.stdout)
        errors.join()
        self._is_read.set()
        if self._ending is not None:
            self._ending.cancel()
        process.stdout.close()
        process.stderr.close()
        return process.wait()

    def _for_user(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield lines without their tags; store the announced folder."""
        for tagged in lines:
            line = RANK_TAG.sub("", tagged)
            if line.startswith(FOLDER_MARK):
                self.folder = Path(json.loads(line.removeprefix(FOLDER_MARK)))
                continue
            if not line.startswith(LIVE_MARK):
                self.said.append(line)
            yield line

    def forward_output(self, lines: Iterable[str]) -> None:
        if not sys.stdout.isatty():
            for line in self._for_user(lines):
                print(line, end="", flush=True)
            return
        with Screen() as screen:
            for line in self._for_user(lines):
                stripped = line.rstrip("\n")
                if stripped.startswith(LIVE_MARK):
                    screen.update(stripped.removeprefix(LIVE_MARK))
                else:
                    screen.say(stripped)

    def forward_errors(self, lines: Iterable[str]) -> None:
        # Open MPI ends its last line with a NUL instead of a newline
        untagged = (RANK_TAG.sub("", line).replace("\0", "") for line in lines)
        # noise goes first: such a line of another process can stand anywhere within a banner
        clean = (line for line in self._watched(untagged) if line and not is_noise(line))
        for line in _without_banners(clean, self._is_known):
            sys.stderr.write(line)
            sys.stderr.flush()

    def _watched(self, lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            self.said.append(line)
            if not self.is_ending and IS_ENDING.search(line):
                self.is_ending = True
                self._end_soon()
            yield line

    def _close_late(self, process: "subprocess.Popen[str]") -> None:
        """End the processes that keep the output open after the job has ended."""
        process.wait()
        if not self._is_read.wait(ENDS_WITHIN_SECONDS):
            guard.end_session(process.pid)

    def _end_soon(self) -> None:
        """End the job if it does not end by itself in a while."""
        if self._group is None:
            return
        self._ending = threading.Timer(ENDS_WITHIN_SECONDS, guard.end, (self._group, ENDS_WITHIN_SECONDS))
        self._ending.daemon = True
        self._ending.start()

    def _is_known(self, line: str) -> bool:
        """Return whether the user knows already what a message with this first line says."""
        return bool(KNOWN_ALREADY.match(line) or (self._was_asked() and SIGNALLED.match(line)))


def is_noise(line: str) -> bool:
    """Return whether a line is noise to the user: of a library, or of mpirun at its end."""
    return bool(NOISE.search(line.encode()) or PEER_EXITED.search(line))


def _without_banners(lines: Iterable[str], is_known: Callable[[str], bool]) -> Iterator[str]:
    """Drop Open MPI's message, between two rules, on a rank that exited: the rank has printed the reason."""
    held, is_inside = "", False
    for line in lines:
        is_rule = line.strip("-\n") == "" and len(line) > 70
        if is_inside:
            is_inside = not is_rule
        elif held and is_known(line):
            held, is_inside = "", True
        else:
            yield held
            held = line if is_rule else ""
            yield "" if is_rule else line
    yield held
