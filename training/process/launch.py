"""``cloudtrain launch`` and ``cloudtrain tune -np``: ``horovodrun`` with the flags that Open MPI 5 needs.

Its output is cleaned up, and when this process ends, in any way, its ranks end with it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from commlib.tf_logging import NOISE
from training.process import guard as guarding
from training.process import start_rank
from training.process.job import INTERRUPTED, USAGE_ERROR, log_error
from training.process.loopback import preloading
from training.process.progress import LIVE_MARK, LIVE_VARIABLE, Screen

RANK_TAG = re.compile(r"^\[\d+,\d+\]<std(?:out|err)>: ?")
ENDED = r"prterun (has exited due to|detected that one or more) process"
SAID_ALREADY = re.compile(rf"MPI_ABORT was invoked|{ENDED}")
# printed occasionally by mpirun when it ends ranks of which one has just exited
LEFT_ALREADY = re.compile(r"PMIX ERROR: PMIX_ERR_UNREACH in file")
HOSTS = re.compile(r"[\w.-]+:[1-9]\d*(,[\w.-]+:[1-9]\d*)*")
PATIENCE_SECONDS = 10


@dataclass(frozen=True)
class Ranks:
    """The ranks to start: ``count`` on ``hosts``, as host:slots,…, connected by a network interface."""

    count: int
    hosts: str | None = None
    interface: str | None = None


def cloudtrain(*arguments: str) -> list[str]:
    """Return the command that runs ``cloudtrain`` of this environment."""
    return [str(_beside_python("cloudtrain")), *arguments]


def command_line(ranks: Ranks, command: Sequence[str]) -> list[str]:
    """Return the ``horovodrun`` command that runs this one on all ranks.

    Horovod writes Open MPI 4's flag for "no binding"; under Open MPI 5 it has to be given again. On one
    machine there may be more ranks than cores; on several the slots say how many each has.
    """
    mapping = "slot" if ranks.hosts else "slot:OVERSUBSCRIBE"
    return [
        *("horovodrun", "--mpi", "--disable-cache", "-np", str(ranks.count)),
        *(("-H", ranks.hosts) if ranks.hosts else ()),
        *(("--network-interfaces", ranks.interface) if ranks.interface else ()),
        f"--binding-args=--bind-to none --map-by {mapping}",
        *(sys.executable, "-I", start_rank.__file__, json.dumps(command)),
    ]


def check_hosts(hosts: str, ranks: int) -> None:
    """Raise ``ValueError`` where ``hosts`` is no list of host:slots, or has fewer slots than ranks."""
    if not HOSTS.fullmatch(hosts):
        raise ValueError(f"-H: expected host:slots,host:slots,…, got {hosts!r}")
    slots = sum(int(entry.rpartition(":")[2]) for entry in hosts.split(","))
    if slots < ranks:
        raise ValueError(f"-H: expected slots for {ranks} ranks, got {slots} in {hosts}")


def launch(ranks: Ranks, command: Sequence[str], check: Callable[[], object]) -> int:
    """Run a command on all ranks, its arguments unchanged, and return the exit status of the job.

    ``check`` raises ``ValueError`` if they are invalid, before anything is started. When this process ends,
    in any way, the job ends with it. An interrupt (Ctrl-C) is one line and status 130.
    """
    try:
        check()
        if ranks.hosts:
            check_hosts(ranks.hosts, ranks.count)
        signal.signal(signal.SIGTERM, _end)
        return _run(command_line(ranks, command), environment_of(ranks))
    except ValueError as error:
        log_error(str(error))
    except FileNotFoundError:
        log_error("horovodrun is not installed beside this Python: run ./scripts/install.sh")
    except KeyboardInterrupt:
        log_error("interrupted")
        return INTERRUPTED
    return USAGE_ERROR


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    launcher = os.getpid()

    def end_with_launcher() -> None:
        start_rank.end_with_parent(signal.SIGTERM)  # until the guard runs
        if os.getppid() != launcher:  # it has ended just before
            os._exit(INTERRUPTED)

    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # so that all its processes can be ended as a group
        preexec_fn=end_with_launcher,
    )
    # its own, so that killing this process or its group spares it
    guard = subprocess.Popen(
        [sys.executable, "-I", guarding.__file__, str(process.pid)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        return _follow(process)
    finally:
        _stop(process)
        guard.communicate(b"over")


def environment_of(ranks: Ranks) -> dict[str, str]:
    """Return the environment of ``horovodrun``: that of this process, with additions for the ranks."""
    environment = os.environ | {
        "PATH": f"{_beside_python('')}{os.pathsep}{os.environ.get('PATH', '')}",
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
    }
    if sys.stdout.isatty():
        environment[LIVE_VARIABLE] = "1"
    if not ranks.hosts:
        environment[start_rank.ON_ONE_MACHINE] = "1"
        try:
            environment |= preloading(environment)
        except OSError as error:
            log_error(f"warning: mpirun listens on all interfaces of this machine: {error}")
    return environment


def _follow(process: "subprocess.Popen[str]") -> int:
    """Forward the output of the job until it ends; return its status."""
    assert process.stdout is not None
    assert process.stderr is not None
    errors = threading.Thread(target=_forward_errors, args=(process.stderr,), daemon=True)
    errors.start()
    _forward_output(process.stdout)
    errors.join()
    return process.wait()


def _stop(process: "subprocess.Popen[str]") -> None:
    """End the remaining processes of the job: SIGTERM, then SIGKILL; a second Ctrl-C has no effect."""
    if process.poll() is None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
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
    """Drop Open MPI's message, between two rules, on a rank that exited: the rank has printed the reason."""
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
