"""Files of a run: there wholly or not at all, and for whom the user's ``umask`` says."""

import os
import secrets
from pathlib import Path

from datacache.folders import sync_folder


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside its place, sync it and rename it; an ``OSError`` leaves nothing behind.

    Others read it as ``umask`` says, unlike files of the cache: results are there to be shown.
    """
    aside = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with aside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
