"""``cloudtrain install-horovod``: Horovod for this environment, which nothing but ``horovodrun`` needs."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from commlib.errors import InvalidArgument
from commlib.folders import user_cache
from training.process.job import log_error, usage_error

SCRIPT = Path(__file__).parents[1] / "process" / "install_horovod.sh"
ANNOUNCED = 8  # the descriptor on which the script says what takes long


def install() -> int:
    """Compile Horovod, unless a wheel is kept, and install it; return the exit status."""
    try:
        wheels = user_cache() / "wheels"
    except InvalidArgument as error:
        usage_error(f"install-horovod: {error}")
    os.dup2(sys.stderr.fileno(), ANNOUNCED)
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        command = ["bash", str(SCRIPT), sys.executable, str(wheels)]
        status = subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, pass_fds=[ANNOUNCED], check=False
        ).returncode
        log.seek(0)
        said = log.readlines()
    if status == 0:
        print("Horovod is installed: horovodrun starts ranks")
    elif said:  # else the script has said on the descriptor what is missing
        log_error("Horovod is not installed; the end of what its build said:")
        sys.stderr.writelines(said[-20:])
    return status
