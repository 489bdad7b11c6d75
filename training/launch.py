"""``cloudtrain launch``: ``horovodrun`` with the flags that Open MPI 5 needs, its output made readable."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from training.config import ConfigurationError, load
from training.job import USAGE_ERROR, complain
from training.progress import LIVE_MARK, LIVE_VARIABLE, Screen
from training.quiet import NOISE

RANK_TAG = re.compile(r"^\[\d+,\d+\]<std(?:out|err)>: ?")
SAID_ALREADY = re.compile('exited with non-zero status|MPI_ABORT was invoked|calling\\s+"abort"')
INTERRUPTED = 130


def command_line(ranks: int, path: str, overrides: Sequence[str], hosts: str | None) -> list[str]:
    """Return the ``horovodrun`` command.

    Horovod writes Open MPI 4's flag for "no binding"; under Open MPI 5 it has to be given anew. On one
    machine there may be more ranks than cores; on several the slots say how many each has.
    """
    mapping = "slot" if hosts else "slot:OVERSUBSCRIBE"
    placement = ["-H", hosts] if hosts else []
    return [
        *("horovodrun", "--mpi", "-np", str(ranks), *placement),
        f"--binding-args=--bind-to none --map-by {mapping}",
        *(str(_beside_python("cloudtrain")), "train", path, *overrides),
    ]


def launch(ranks: int, path: str, overrides: Sequence[str], hosts: str | None) -> int:
    """Train on ``ranks`` ranks and return the exit status of the job.

    The configuration is checked before anything is started.
    """
    try:
        load(path, overrides)
    except ConfigurationError as error:
        complain(str(error))
        return USAGE_ERROR
    command = command_line(ranks, path, overrides, hosts)
    environment = os.environ | {
        "PATH": f"{_beside_python('')}{os.pathsep}{os.environ.get('PATH', '')}",
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
    }
    if sys.stdout.isatty():
        environment[LIVE_VARIABLE] = "1"
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except FileNotFoundError:
        complain("horovodrun is not installed beside this Python: run ./scripts/install.sh")
        return USAGE_ERROR
    assert process.stdout is not None
    assert process.stderr is not None
    errors = threading.Thread(target=_forward_errors, args=(process.stderr,), daemon=True)
    errors.start()
    try:
        _forward_output(process.stdout)
        errors.join()
        return process.wait()
    except KeyboardInterrupt:  # the terminal has sent it to the ranks as well
        process.wait()
        return INTERRUPTED


def _forward_output(lines: Iterable[str]) -> None:
    screen = Screen() if sys.stdout.isatty() else None
    for tagged in lines:
        line = RANK_TAG.sub("", tagged.rstrip("\n"))
        is_live = line.startswith(LIVE_MARK)
        if screen is None:
            print(line, flush=True)
        elif is_live:
            screen.update(line.removeprefix(LIVE_MARK))
        else:
            screen.say(line)
    if screen is not None:
        screen.close()


def _forward_errors(lines: Iterable[str]) -> None:
    for line in _without_banners(RANK_TAG.sub("", line) for line in lines):
        if not NOISE.search(line.encode()):
            sys.stderr.write(line)
            sys.stderr.flush()


def _without_banners(lines: Iterable[str]) -> Iterator[str]:
    """Drop mpirun's account of a rank that ended by itself: that rank has said why. Keep all others."""
    banner: list[str] = []
    for line in lines:
        is_rule = line.strip("-\n") == "" and len(line) > 70
        if banner:
            banner.append(line)
            if is_rule:
                if not SAID_ALREADY.search("".join(banner)):
                    yield from banner
                banner = []
        elif is_rule:
            banner = [line]
        else:
            yield line
    yield from banner


def _beside_python(name: str) -> Path:
    """Return the path of a command of this environment, which need not be activated."""
    return Path(sys.executable).parent / name
