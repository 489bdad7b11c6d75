"""Compiled kernels in the user's cache folder; damaged files count as missing."""

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from commlib.errors import InvalidArgument
from commlib.folders import user_cache

DIGEST_BYTES = hashlib.sha256().digest_size


def path_of(key: bytes) -> Path | None:
    """Return the file for this key; ``None`` if the user has no cache folder."""
    try:
        return user_cache() / "kernels" / f"{hashlib.sha256(key).hexdigest()}.cubin"
    except InvalidArgument:  # no home
        return None


def read(path: Path | None) -> bytes | None:
    """Return what ``write`` wrote, or ``None`` if it is missing or damaged."""
    if path is None:
        return None
    try:
        digest, content = (whole := path.read_bytes())[:DIGEST_BYTES], whole[DIGEST_BYTES:]
    except OSError:
        return None
    return content if digest == hashlib.sha256(content).digest() else None


def write(path: Path | None, content: bytes) -> None:
    """Store it atomically: other processes see all of it or nothing. Errors of the disk are ignored."""
    if path is None:
        return
    with suppress(OSError):  # compiling again next time costs seconds
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(part, path)
        except OSError:
            os.unlink(part)
