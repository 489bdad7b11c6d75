"""Start the program of one rank, on the node where it is to run, with the standard library alone.

usage: python -I start_rank.py WORDS      (the program's, as a JSON list: so no launcher reads any of them)
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
PRELOAD, PRELOADED = "LD_PRELOAD", "cloudtrain-loopback.so"  # see loopback.py
BTL = "OMPI_MCA_btl"  # by what Open MPI moves bytes


def end_with_parent(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends, in whatever way; exec keeps that."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def main() -> None:
    """Become the program."""
    end_with_parent(signal.SIGKILL)  # of mpirun, or its daemon on this node: who would end this rank is gone
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec would keep that
    if os.environ.get(ON_ONE_MACHINE):
        os.environ[BTL] = "self,sm"  # its TCP listens on all interfaces, used or not
        libraries = os.environ.pop(PRELOAD, "").split(":")
        if others := [each for each in libraries if os.path.basename(each) not in ("", PRELOADED)]:
            os.environ[PRELOAD] = ":".join(others)
    words = json.loads(sys.argv[1])
    try:
        os.execvp(words[0], words)
    except OSError as error:
        if os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0") != "0":
            time.sleep(FIRST_SPEAKS_WITHIN_SECONDS)  # whose end ends this rank, and must not be cut off
        problem = f"{words[0]}: {error.strerror} on {os.uname().nodename}"
        sys.stderr.write(f"cloudtrain: {problem}; expected a command, such as: python my.py\n")
        sys.exit(COMMAND_NOT_FOUND)


if __name__ == "__main__":
    main()
