"""``cloudtrain launch`` and ``cloudtrain tune -np``: ``horovodrun`` with the flags that Open MPI 5 needs.

Its output is cleaned up, and when this process ends, in any way, its ranks end with it. A job that fails is
started again if that is asked for (:mod:`training.process.supervisor`).
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from commlib.tf_logging import NOISE
from training.process import guard as guarding
from training.process import start_rank
from training.process.hosts import Ranks, check_hosts
from training.process.job import FAILURE, INTERRUPTED, PREEMPTED, USAGE_ERROR, log_error
from training.process.loopback import preloading
from training.process.progress import FOLDER_MARK, FOLDER_VARIABLE, LIVE_MARK, LIVE_VARIABLE, Screen
from training.process.supervisor import HOST_FAILURES, Ended, GiveUp, Supervisor, resumed

RANK_TAG = re.compile(r"(?:^|\0)\[\d+,\d+\]<std(?:out|err)>: ?")  # NUL: see Output.forward_errors
ENDED = r"prterun (has exited due to|detected that one or more) process"
SIGNALLED = re.compile(r"prterun noticed that process")
SAID_ALREADY = re.compile(rf"MPI_ABORT was invoked|{ENDED}")
# printed occasionally by mpirun when it ends ranks of which one has just exited
LEFT_ALREADY = re.compile(r"PMIX ERROR: PMIX_ERR_UNREACH in file")
# The job is over. mpirun may then wait for its daemon on a host that is lost, for ever.
IS_ENDING = re.compile(r"Remote daemon: \S+ on node |has waited \d+ s for other ranks at ")
ENDS_WITHIN_SECONDS = 2.5
PATIENCE_SECONDS = 10
LINES_SAID = 200  # that are searched for why a job has ended


@dataclass(frozen=True)
class Care:
    """What to do for a job that is about to end. ``restarts``: how often it is started again, if it fails.

    ``grace_seconds``: for the ranks to end by themselves, such as with a checkpoint, after SIGTERM to this
    process. ``goes_on``: it is a run that can go on with its checkpoints; else it begins anew.
    ``host_failures``: with how many a host is left out.
    """

    restarts: int = 0
    grace_seconds: float = 30.0
    goes_on: bool = False
    host_failures: int = HOST_FAILURES


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


def mpirun_of(words: Sequence[str]) -> list[str] | None:
    """Return the ``mpirun`` command that ``horovodrun`` has become, but for the program of the ranks.

    ``words``: those of its process, a shell that runs mpirun, or has become it where ``sh`` does so. ``None``
    for another process.
    """
    if words[1:2] == ["-c"]:
        words = shlex.split(words[2])
    is_mpirun = Path(words[0]).name in ("mpirun", "prterun")  # the former becomes the latter
    return ["mpirun", *words[1:-1]] if is_mpirun else None


def launch(
    ranks: Ranks, command: Sequence[str], check: Callable[[], object], care: Care | None = None
) -> int:
    """Run a command on all ranks, its arguments unchanged, and return the exit status of the job.

    ``check`` raises ``ValueError`` if they are invalid, before anything is started. When this process ends,
    in any way, the job ends with it. An interrupt (Ctrl-C) is one line and status 130. SIGTERM is passed on,
    see :class:`Termination`: the status is 75 if the ranks have made a checkpoint, 0 if they are done, else
    143.
    """
    care = care or Care()
    try:
        check()
        if ranks.hosts:
            check_hosts(ranks.hosts, ranks.count)
        return _supervise(ranks, command, care)
    except ValueError as error:
        log_error(str(error))
    except FileNotFoundError:
        log_error("horovodrun is not installed beside this Python: run ./scripts/install.sh")
    except KeyboardInterrupt:
        log_error("interrupted")
        return INTERRUPTED
    return USAGE_ERROR


def _supervise(ranks: Ranks, command: Sequence[str], care: Care) -> int:
    """Run a job, and start it again as the supervisor decides; return the status of the last."""
    termination = Termination(care.grace_seconds)
    supervisor = Supervisor(ranks, care.restarts, care.host_failures)
    signal.signal(signal.SIGTERM, termination)
    folder: Path | None = None
    mpirun: Sequence[str] | None = None
    while True:
        words = resumed(command, folder)
        start = command_line(supervisor.ranks, words) if mpirun is None else [*mpirun, json.dumps(words)]
        environment = environment_of(supervisor.ranks)
        if care.goes_on and care.restarts:
            environment[FOLDER_VARIABLE] = "1"
        ended = _run(start, environment, termination)
        folder = ended.folder or folder
        if termination.is_received:
            return ended.status if ended.status in (0, PREEMPTED) else 128 + signal.SIGTERM
        decision = supervisor.after(replace(ended, folder=folder))
        if decision.line:
            log_error(decision.line)
        if isinstance(decision, GiveUp):
            return ended.status
        mpirun = decision.mpirun
        time.sleep(decision.delay_seconds)


class Termination:
    """The handler of SIGTERM: ask a job to end, and end it after some seconds; without a job, exit.

    mpirun passes SIGUSR1 on to the ranks of all hosts, and SIGTERM to none: it ends them at once.
    """

    def __init__(self, grace_seconds: float) -> None:
        self.is_received = False
        self.job: subprocess.Popen[str] | None = None
        self._grace_seconds = grace_seconds

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal; a second one, also the timer's, ends the job at once."""
        if self.is_received or self.job is None:
            sys.exit(128 + number)
        self.is_received = True
        with suppress(ProcessLookupError):  # it has just ended
            os.killpg(self.job.pid, start_rank.ASKS_TO_END)
        timer = threading.Timer(self._grace_seconds, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()


def _run(command: Sequence[str], environment: Mapping[str, str], termination: Termination) -> Ended:
    launcher = os.getpid()

    def end_with_launcher() -> None:
        start_rank.end_with_parent(signal.SIGTERM)  # until the guard runs
        # It is for the ranks: horovodrun and the shell around mpirun leave it alone, mpirun passes it on.
        signal.signal(start_rank.ASKS_TO_END, signal.SIG_IGN)
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
    termination.job = process
    output = Output(termination)
    try:
        status = output.follow(process)
    finally:
        termination.job = None
        _stop(process)
        guard.communicate(b"over")
    return Ended(_status(status, output), "".join(output.said), output.folder, output.mpirun)


def _status(status: int, output: "Output") -> int:
    """Return the exit status of a job as a shell has it, for mpirun's, which is 0 when it has lost a host."""
    status = 128 - status if status < 0 else status
    ended_here = status in (0, 128 + signal.SIGTERM, 128 + signal.SIGKILL)
    return FAILURE if output.is_ending and ended_here else status


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


class Output:
    """What a job prints: forwarded, but for what only this process needs. ``said``: the last of it.

    ``folder``: of its run, once it has said so, and ``mpirun``: the command that has started this run.
    ``is_ending``: it has said that it ends by a failure.
    """

    def __init__(self, termination: Termination) -> None:
        self.said: deque[str] = deque(maxlen=LINES_SAID)
        self.folder: Path | None = None
        self.mpirun: list[str] | None = None
        self._termination = termination
        self._group: int | None = None  # of the job's processes
        self._ending: threading.Timer | None = None
        self.is_ending = False
        self._is_read = threading.Event()

    def follow(self, process: "subprocess.Popen[str]") -> int:
        """Forward until the job ends; return its status."""
        assert process.stdout is not None
        assert process.stderr is not None
        self._group = process.pid
        threading.Thread(target=self._let_go, args=(process,), daemon=True).start()
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
        """Yield lines without their tags; take note of the run's folder."""
        for tagged in lines:
            line = RANK_TAG.sub("", tagged)
            if line.startswith(FOLDER_MARK):
                self.folder = Path(json.loads(line.removeprefix(FOLDER_MARK)))
                self.mpirun = None if self._group is None else mpirun_of(words_of(self._group))
                continue
            if not line.startswith(LIVE_MARK):
                self.said.append(line)
            yield line

    def forward_output(self, lines: Iterable[str]) -> None:
        """Forward standard output, without the tags of ranks."""
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
        """Forward standard error, without noise."""
        # Open MPI ends its last line with a NUL instead of a newline
        untagged = (RANK_TAG.sub("", line).replace("\0", "") for line in lines)
        # taken away first: such a line of another process can stand anywhere within a banner
        clean = (line for line in self._noted(untagged) if line and not is_noise(line))
        for line in _without_banners(clean, self._is_known):
            sys.stderr.write(line)
            sys.stderr.flush()

    def _noted(self, lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            self.said.append(line)
            if not self.is_ending and IS_ENDING.search(line):
                self.is_ending = True
                self._end_soon()
            yield line

    def _let_go(self, process: "subprocess.Popen[str]") -> None:
        """When the job has ended, end what keeps its output open."""
        process.wait()
        if not self._is_read.wait(ENDS_WITHIN_SECONDS):
            guarding.end_session(process.pid)

    def _end_soon(self) -> None:
        """End the job if it does not end by itself in a while."""
        if self._group is None:
            return
        self._ending = threading.Timer(ENDS_WITHIN_SECONDS, guarding.end, (self._group, ENDS_WITHIN_SECONDS))
        self._ending.daemon = True
        self._ending.start()

    def _is_known(self, line: str) -> bool:
        """Return whether a message that begins with this line says what the user knows already."""
        asked = self._termination.is_received and SIGNALLED.match(line)
        return bool(asked or SAID_ALREADY.match(line))


def is_noise(line: str) -> bool:
    """Return whether a line of a job says nothing to its user: of a library, or of mpirun at its end."""
    return bool(NOISE.search(line.encode()) or LEFT_ALREADY.search(line))


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


def words_of(process: int) -> list[str]:
    """Return the command line of a process, an empty word for one that has ended."""
    try:
        return os.fsdecode(Path(f"/proc/{process}/cmdline").read_bytes()).rstrip("\0").split("\0")
    except OSError:  # what it has printed may be read later than that
        return [""]


def _beside_python(name: str) -> Path:
    """Return the path of a command of this environment, which need not be activated."""
    return Path(sys.executable).parent / name
