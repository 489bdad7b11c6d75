"""Terminate a job whose launcher has ended in any way; a separate process, which outlives the launcher.

usage: python -I guard.py GROUP FOLDER…

GROUP: the job's process group. FOLDERs: its temporary ones, which are removed. Standard input: a pipe that
the launcher holds.
"""

import os
import shutil
import signal
import sys
import time
from contextlib import suppress

PATIENCE_SECONDS = 10.0
LOOK_SECONDS = 0.1


def end(group: int, patience_seconds: float = PATIENCE_SECONDS) -> None:
    """End a process group: SIGTERM first, so that mpirun ends ranks on other machines, then SIGKILL."""
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(group, number)
            until = time.monotonic() + patience_seconds
            while time.monotonic() < until:
                os.killpg(group, 0)  # raises where nothing of it is left
                time.sleep(LOOK_SECONDS)
    except ProcessLookupError:
        return


def end_session(session: int) -> None:
    """Kill what is left of a session: mpirun's ssh, in another group, may wait for a host that is lost."""
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(ProcessLookupError):
            if os.getsid(int(entry)) == session:
                os.kill(int(entry), signal.SIGKILL)


if __name__ == "__main__":
    if not sys.stdin.buffer.read(1):  # the launcher writes when the job has ended; end of file: it died
        end(int(sys.argv[1]))
    for folder in sys.argv[2:]:  # mpirun leaves them where it is killed
        shutil.rmtree(folder, ignore_errors=True)
