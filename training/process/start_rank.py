"""Start the program of one rank, on its node, with the standard library only.

usage: python -I start_rank.py COMMAND      (a JSON list: so no launcher interprets its arguments)
"""

import ctypes
import json
import os
import signal
import sys
import time

ON_ONE_MACHINE = "CLOUDTRAIN_ON_ONE_MACHINE"  # set by cloudtrain launch
COMMAND_NOT_FOUND = 127
FIRST_SPEAKS_WITHIN_SECONDS = 10.0
PR_SET_PDEATHSIG = 1
PRELOAD, PRELOADED = "LD_PRELOAD", "cloudtrain-loopback.so"  # see launch.py
ASKS_TO_END = signal.SIGUSR1  # what cloudtrain launch makes of SIGTERM: see launch.py
BTL = "OMPI_MCA_btl"  # Open MPI's transports


def end_with_parent(number: signal.Signals) -> None:
    """Let the kernel send this process a signal when its parent ends, in any way; exec preserves that."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def main() -> None:
    """Replace this process by the program."""
    end_with_parent(signal.SIGKILL)  # of mpirun, or its daemon on this node: who would end this rank is gone
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec would preserve that
    signal.signal(ASKS_TO_END, signal.SIG_DFL)  # mpirun may have been started with it ignored
    if os.environ.get(ON_ONE_MACHINE):
        os.environ[BTL] = "self,sm"  # its TCP listens on all interfaces, used or not
        libraries = os.environ.pop(PRELOAD, "").split(":")
        if others := [each for each in libraries if os.path.basename(each) not in ("", PRELOADED)]:
            os.environ[PRELOAD] = ":".join(others)
    command = json.loads(sys.argv[1])
    try:
        os.execvp(command[0], command)
    except OSError as error:
        if os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0") != "0":
            # the exit of rank 0 ends this rank: its output comes first
            time.sleep(FIRST_SPEAKS_WITHIN_SECONDS)
        problem = f"{command[0]}: {error.strerror} on {os.uname().nodename}"
        sys.stderr.write(f"cloudtrain: {problem}; expected a command, such as: python my.py\n")
        sys.exit(COMMAND_NOT_FOUND)


if __name__ == "__main__":
    main()
