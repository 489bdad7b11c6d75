"""``cloudtrain launch`` and ``cloudtrain tune -np``: ``horovodrun`` with the flags that Open MPI 5 needs.

Its output is made readable.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from commlib.quiet import NOISE
from training.job import USAGE_ERROR, complain
from training.progress import LIVE_MARK, LIVE_VARIABLE, Screen

RANK_TAG = re.compile(r"^\[\d+,\d+\]<std(?:out|err)>: ?")
SAID_ALREADY = re.compile(
    r"MPI_ABORT was invoked|prterun (has exited due to|detected that one or more) process"
)
# mpirun, now and then, when it ends ranks of which one has just left
LEFT_ALREADY = re.compile(r"PMIX ERROR: PMIX_ERR_UNREACH in file")
HOSTS = re.compile(r"[\w.-]+:[1-9]\d*(,[\w.-]+:[1-9]\d*)*")
INTERRUPTED = 130
PATIENCE_SECONDS = 10


@dataclass(frozen=True)
class Ranks:
    """What to start: ``count`` ranks on ``hosts``, as host:slots,…, joined by a network interface."""

    count: int
    hosts: str | None = None
    interface: str | None = None


def command_line(ranks: Ranks, words: Sequence[str]) -> list[str]:
    """Return the ``horovodrun`` command that runs ``cloudtrain`` with these words on all ranks.

    Horovod writes Open MPI 4's flag for "no binding"; under Open MPI 5 it has to be given anew. On one
    machine there may be more ranks than cores; on several the slots say how many each has.
    """
    mapping = "slot" if ranks.hosts else "slot:OVERSUBSCRIBE"
    return [
        *("horovodrun", "--mpi", "--disable-cache", "-np", str(ranks.count)),
        *(("-H", ranks.hosts) if ranks.hosts else ()),
        *(("--network-interfaces", ranks.interface) if ranks.interface else ()),
        f"--binding-args=--bind-to none --map-by {mapping}",
        *(str(_beside_python("cloudtrain")), *words),
    ]


def check_hosts(hosts: str, ranks: int) -> None:
    """Raise ``ValueError`` where ``hosts`` is no list of host:slots, or has fewer slots than ranks."""
    if not HOSTS.fullmatch(hosts):
        raise ValueError(f"-H: expected host:slots,host:slots,…, got {hosts!r}")
    slots = sum(int(entry.rpartition(":")[2]) for entry in hosts.split(","))
    if slots < ranks:
        raise ValueError(f"-H: expected slots for {ranks} ranks, got {slots} in {hosts}")


def launch(ranks: Ranks, words: Sequence[str], check: Callable[[], object]) -> int:
    """Run ``cloudtrain`` with these words on all ranks and return the exit status of the job.

    ``check`` raises ``ValueError`` where they are wrong, before anything is started. However this process
    ends, the job ends with it.
    """
    try:
        check()
        if ranks.hosts:
            check_hosts(ranks.hosts, ranks.count)
    except ValueError as error:
        complain(str(error))
        return USAGE_ERROR
    signal.signal(signal.SIGTERM, _end)
    command = command_line(ranks, words)
    try:
        # a session of its own, so that all its processes can be ended together
        process = subprocess.Popen(
            command,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except FileNotFoundError:
        complain("horovodrun is not installed beside this Python: run ./scripts/install.sh")
        return USAGE_ERROR
    try:
        return _follow(process)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        _stop(process)


def _environment() -> dict[str, str]:
    environment = os.environ | {
        "PATH": f"{_beside_python('')}{os.pathsep}{os.environ.get('PATH', '')}",
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
    }
    if sys.stdout.isatty():
        environment[LIVE_VARIABLE] = "1"
    return environment


def _follow(process: "subprocess.Popen[str]") -> int:
    """Pass on what the job prints until it ends; return its status."""
    assert process.stdout is not None
    assert process.stderr is not None
    errors = threading.Thread(target=_forward_errors, args=(process.stderr,), daemon=True)
    errors.start()
    _forward_output(process.stdout)
    errors.join()
    return process.wait()


def _stop(process: "subprocess.Popen[str]") -> None:
    """End what still runs of the job: first asked, then forced."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            continue


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _forward_output(lines: Iterable[str]) -> None:
    if not sys.stdout.isatty():
        for line in lines:
            print(RANK_TAG.sub("", line), end="", flush=True)
        return
    with Screen() as screen:
        for tagged in lines:
            line = RANK_TAG.sub("", tagged.rstrip("\n"))
            if line.startswith(LIVE_MARK):
                screen.update(line.removeprefix(LIVE_MARK))
            else:
                screen.say(line)


def _forward_errors(lines: Iterable[str]) -> None:
    # Open MPI ends its last line with a NUL instead of a newline
    untagged = (RANK_TAG.sub("", line).replace("\0", "") for line in lines)
    for line in _without_banners(untagged):
        if line and not NOISE.search(line.encode()) and not LEFT_ALREADY.search(line):
            sys.stderr.write(line)
            sys.stderr.flush()


def _without_banners(lines: Iterable[str]) -> Iterator[str]:
    """Drop Open MPI's account, between two rules, of a rank that ended by itself: that rank has said why."""
    held, is_inside = "", False
    for line in lines:
        is_rule = line.strip("-\n") == "" and len(line) > 70
        if is_inside:
            is_inside = not is_rule
        elif held and SAID_ALREADY.match(line):
            held, is_inside = "", True
        else:
            yield held
            held = line if is_rule else ""
            yield "" if is_rule else line
    yield held


def _beside_python(name: str) -> Path:
    """Return the path of a command of this environment, which need not be activated."""
    return Path(sys.executable).parent / name
