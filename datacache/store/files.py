"""Files and folders of a cache: private to their user, checked when opened, written atomically.

Another user may have created a folder below ``/dev/shm`` or ``/tmp``, with symbolic links to files of this
user, or with wrong samples. So every file is opened without following links, and its owner and mode are
checked before it is read or written.
"""

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from datacache.errors import Untrusted

FOLDER_MODE, FILE_MODE = 0o700, 0o600
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_OF_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_ROOT = 0  # may change any file anyway


def check_folder(path: Path) -> None:
    """Raise :class:`Untrusted` if ``path`` exists and is a link, another user's, or writable by others."""
    with suppress(FileNotFoundError, NotADirectoryError):
        _check(path, os.lstat(path), "a folder")


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents with mode 0700; an existing folder is checked."""
    if not path.parent.exists():
        make_folder(path.parent)
    with suppress(FileExistsError):
        os.mkdir(path, FOLDER_MODE)
        if stat.S_IMODE(os.lstat(path).st_mode) != FOLDER_MODE:  # an unusual umask
            os.chmod(path, FOLDER_MODE)
    check_folder(path)
    if not path.is_dir():
        raise NotADirectoryError(f"{path}: expected a folder, found a file")


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a file that only this user (or root) can have written.

    A new file has mode 0600; an existing file of this user that others could read gets it. Raises
    :class:`Untrusted` for a link, for anything that is not a file, and for a file that other users own or
    may write.
    """
    try:
        # O_NONBLOCK: opening a named pipe would block.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refusal(path, "a file", "a link") from error
        raise
    try:
        found = os.fstat(descriptor)
        _check(path, found, "a file")
        made_too_strict = flags & os.O_CREAT and stat.S_IMODE(found.st_mode) & FILE_MODE != FILE_MODE
        if found.st_uid == os.geteuid() and (found.st_mode & _OF_OTHERS or made_too_strict):
            with suppress(OSError):  # on a read-only filesystem
                os.fchmod(descriptor, FILE_MODE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_file(path: Path, limit: int = -1) -> bytes:
    """Return the contents of a file, at most ``limit`` bytes of it; raises as :func:`open_file` does."""
    with os.fdopen(open_file(path), "rb") as file:
        return file.read(limit)


def create_file(path: Path, content: bytes = b"") -> None:
    """Create a file; ``FileExistsError`` if it exists."""
    with os.fdopen(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(content)


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, which is created if it is missing."""
    with os.fdopen(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
        file.write(f"{line}\n".encode())


def write_atomic(path: Path, content: bytes | memoryview, *, is_private: bool = True) -> None:
    """Write a file durably; readers see either the old contents or all of the new ones.

    Its mode is 0600, or what the ``umask`` gives where it is not private.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    temporary = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        descriptor = open_file(temporary, flags) if is_private else os.open(temporary, flags, 0o666)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk: which files it has."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check(path: Path, found: os.stat_result, expected: str) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise _refusal(path, expected, "a link")
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise _refusal(path, expected, "something else")
    if found.st_uid not in (os.geteuid(), _ROOT):
        raise _refusal(path, expected, f"one of user {found.st_uid}")
    if found.st_mode & _WRITABLE_BY_OTHERS:
        mode = f"{stat.S_IMODE(found.st_mode):04o}"
        raise _refusal(path, expected, f"one of user {found.st_uid} with mode {mode}")


def _refusal(path: Path, expected: str, found: str) -> Untrusted:
    return Untrusted(
        f"{path}: expected {expected} of user {os.geteuid()} that no other user may write, found {found}: "
        "others could change what is stored there; remove it (or take their rights away, if you trust its "
        "contents), or name another folder"
    )
