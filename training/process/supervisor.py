"""Decide whether, when and on which hosts a failed job is started again, from its newest checkpoint.

:mod:`training.process.launch` starts the jobs, and reports here how each one ended.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.config.run_files import CHECKPOINTS, METRICS, last_checkpoint, last_record
from training.process.hosts import Ranks
from training.process.job import INTERRUPTED, PREEMPTED, USAGE_ERROR

FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS = 1, 60
HOST_FAILURES = 2  # after which a host is left out
FAILURES_OF_A_STEP = 3  # after which it is hopeless
# Exit statuses that no restart can help: of the user's errors and interrupts, of a program that cannot start.
HOPELESS = {USAGE_ERROR: "a usage error", INTERRUPTED: "an interrupt"} | dict.fromkeys(
    (126, 127), "a program that cannot be started"
)

# What ranks, mpirun and hosts.py print of a rank or host by which a job has failed.
RANK_ENDED = re.compile(r"\brank (?P<rank>\d+) of \d+ on (?P<host>\S+) (?P<how>failed|has ended)")
RANK_KILLED = re.compile(
    r"process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) exited on\s+(?P<how>signal \d+)"
)
RANKS_MISSING = re.compile(r"\branks \[(?P<rank>\d+)[\d, ]*\] (?P<how>have not come)")
HOST_LOST = re.compile(r"Remote daemon: .* on node (?P<host>\S+)")
HOST_UNREACHABLE = re.compile(r"ssh not successful for host (?P<host>[^\s:]+)")
# Printed by a rank that was connected with the one that was killed, before mpirun hears of it, if it does.
PEER_LOST = re.compile(
    r"peer process has unexpectedly (?P<how>disconnected)\..*?Peer host:\s+(?P<host>\S+)", re.DOTALL
)
CAUSES = (HOST_UNREACHABLE, HOST_LOST, RANKS_MISSING, RANK_KILLED, RANK_ENDED, PEER_LOST)  # the first wins
# Another process still has the run's lock, such as a rank on a host that is not reached any more.
IS_ALIVE = "expected a run that has stopped"


@dataclass(frozen=True)
class Ended:
    """How a job has ended: its exit status, the last it has printed, and the folder of its run, if any."""

    status: int
    said: str = ""
    folder: Path | None = None


def cause_of(said: str, ranks: Ranks) -> tuple[str, str | None]:
    """Return who has ended a job of ``ranks``, and how, from what the job has printed; and the host.

    >>> cause_of("rank 2 of 4 on b.cluster failed", Ranks(4, "a:2,b:2"))
    ('rank 2 on b: failed', 'b')
    """
    found = next(filter(None, (pattern.search(said) for pattern in CAUSES)), None)
    if found is None:
        return "", None
    parts: dict[str, str] = {"how": "not reached", **found.groupdict()}
    rank, host = parts.get("rank"), parts.get("host")
    if rank is not None:
        host = ranks.host_of(int(rank)) or host  # the name by which it was given
    who = " on ".join(filter(None, (rank and f"rank {rank}", host)))
    return f"{who}: {parts['how']}", host


@dataclass(frozen=True)
class Progress:
    """How far a run is: the newest checkpoint, and the step that was last recorded, with its epoch."""

    checkpoint: int | None
    step: tuple[int, int] | None

    @classmethod
    def of(cls, folder: Path | None) -> "Progress | None":
        """Return that of the run in a folder; ``None`` where it is not known."""
        if folder is None or not folder.is_dir():
            return None
        steps = [int(path.name.split("-")[1]) for path in (folder / CHECKPOINTS).glob("step-*")]
        # elsewhere, the newest is the one of which the records know
        newest = max(steps) if steps else last_checkpoint(folder / METRICS)
        record = last_record(folder / METRICS, "step")
        try:
            step = None if record is None else (int(record["epoch"]), int(record["step"]))
        except (ValueError, KeyError, TypeError):
            step = None
        return cls(newest, step)

    def __str__(self) -> str:
        if self.step is None:
            return "its beginning"
        return f"epoch {self.step[0] + 1}, step {self.step[1]} of its phase"


@dataclass(frozen=True)
class Decision:
    """What follows a job: ``line`` to print, if any; a restart on ``ranks`` after some seconds, or none."""

    line: str | None = None
    ranks: Ranks | None = None
    delay_seconds: float = 0


class Supervisor:
    """Decides what follows when a job of ``ranks`` has ended; it is started again at most ``restarts`` times.

    A host that was the cause of ``host_failures`` failures is left out. A job that fails three times in a row
    at the same step is given up, and so is one whose failure no restart can mend. A job that was pre-empted
    after it had made progress is started again at once, which does not count as a restart.
    """

    def __init__(self, ranks: Ranks, restarts: int, host_failures: int = HOST_FAILURES) -> None:
        self._all = self.ranks = ranks
        self._restarts, self._made = restarts, 0
        self._host_failures = host_failures
        self._failures_of: Counter[str] = Counter()  # hosts
        self._at: Progress | None = None  # when it last ended
        self._failures_here = self._failures_in_a_row = 0

    def after(self, ended: Ended) -> Decision:
        """Return what to do after a job that has ended."""
        if ended.status == 0 or self._restarts == 0:
            return Decision()
        is_alive = self._made > 0 and ended.status == USAGE_ERROR and IS_ALIVE in ended.said
        if ended.status in HOPELESS and not is_alive:
            return Decision(f"not started again after {HOPELESS[ended.status]} (status {ended.status})")
        before, self._at = self._at, Progress.of(ended.folder)
        if ended.status == PREEMPTED and self._at is not None and self._at != before:
            line = f"the job was pre-empted at {self._at}: starting it again"
            return Decision(line, self.ranks)
        return self._after_failure(ended, before)

    def _after_failure(self, ended: Ended, before: Progress | None) -> Decision:
        at, (cause, host) = self._at, cause_of(ended.said, self.ranks)
        is_same = at is not None and at == before
        has_checkpoint = at is not None and (before is None or at.checkpoint != before.checkpoint)
        self._failures_here = self._failures_here + 1 if is_same else 1
        self._failures_in_a_row = 1 if has_checkpoint else self._failures_in_a_row + 1
        why = f"the job has failed with status {ended.status}{f' ({cause})' if cause else ''}"
        where = "" if at is None else f" at {at}"
        if self._failures_here == FAILURES_OF_A_STEP:
            return Decision(f"{why}{where}: given up after {FAILURES_OF_A_STEP} failures there")
        if self._made == self._restarts:
            return Decision(f"{why}{where}: given up after {self._made} restarts")
        if host is not None and self._all.hosts is not None:
            self._failures_of[host] += 1
        left_out = [each for each, failures in self._failures_of.items() if failures >= self._host_failures]
        ranks = self._all.without(left_out)
        if ranks is None:
            lost = f"no host is left that has not failed {self._host_failures} times"
            return Decision(f"{why}{where}: given up, {lost}")
        self.ranks = ranks
        self._made += 1
        again = self._failures_in_a_row - 1  # 0 after a new checkpoint; then it waits twice as long each time
        delay = min(FIRST_DELAY_SECONDS * 2 ** (again - 1), LONGEST_DELAY_SECONDS) if again else 0
        when = f"in {delay} s" if delay else "now"
        line = f"{why}{where}: restart {self._made} of {self._restarts} {when}"
        if host is not None and self._failures_of[host] == self._host_failures:
            which = f"{host}, which has failed {self._host_failures} times"
            line += f", with {ranks.count} ranks, without {which}"
        return Decision(line, ranks, delay)


def check_restarts(restarts: int, config: Any, *, is_dry: bool) -> None:
    """Raise ``ValueError`` where a run of this configuration could not go on after a restart."""
    if restarts and is_dry:
        raise ValueError(f"--restarts: expected 0 for a dry run, got {restarts}")
    if restarts and getattr(config, "checkpoints", None) is None:
        raise ValueError(
            f"--restarts: expected 0 where there are no checkpoints, got {restarts}; with checkpoints, which "
            "task: linear does not have: checkpoints={every_epochs: 1}"
        )


def resumed(command: Sequence[str], folder: Path | None) -> list[str]:
    """Return the command of ``cloudtrain train`` that goes on with the run in a folder, once there is one.

    >>> resumed(["train"], Path("/runs/a: b"))
    ['train', 'resume="/runs/a: b"']
    """
    return [*command, *([] if folder is None else [f"resume={json.dumps(str(folder), ensure_ascii=False)}"])]
