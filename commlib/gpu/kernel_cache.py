"""Compiled kernels on disk, below the user's cache: what cannot be read whole is not there."""

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from commlib.errors import InvalidArgument
from commlib.folders import user_cache

DIGEST_BYTES = hashlib.sha256().digest_size


def path_of(key: bytes) -> Path | None:
    """Return where what has this key is kept; ``None`` where a user has no folder to keep anything in."""
    try:
        return user_cache() / "kernels" / f"{hashlib.sha256(key).hexdigest()}.cubin"
    except InvalidArgument:  # no home
        return None


def read(path: Path | None) -> bytes | None:
    """Return what ``write`` wrote, or ``None`` where it is missing or damaged."""
    if path is None:
        return None
    try:
        digest, content = (whole := path.read_bytes())[:DIGEST_BYTES], whole[DIGEST_BYTES:]
    except OSError:
        return None
    return content if digest == hashlib.sha256(content).digest() else None


def write(path: Path | None, content: bytes) -> None:
    """Keep it, so that other processes see it whole or not at all; where that cannot be, do nothing."""
    if path is None:
        return
    with suppress(OSError):  # who compiles again next time loses seconds
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(part, path)
        except OSError:
            os.unlink(part)
