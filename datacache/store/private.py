"""Files and folders of a cache: made for their user alone, used only if nobody else can have changed them.

A folder below ``/dev/shm`` or ``/tmp`` may have been made by somebody else, with links in it that lead to
files of this user, or samples that are not ours. So everything is opened without following a link, and its
owner and mode are looked at before it is read or written.
"""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from datacache.errors import Untrusted

FOLDER_MODE, FILE_MODE = 0o700, 0o600
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_OF_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_ROOT = 0  # can do as it likes in any case


def check_folder(path: Path) -> None:
    """Raise :class:`Untrusted` if another user made what is at ``path``, or may change it, or it is a link.

    Nothing there is nothing wrong.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        _check(path, os.lstat(path), "a folder")


def make_folder(path: Path) -> None:
    """Make a folder of this user, and those above that are missing; one that is there is checked."""
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
    """Return a descriptor of a file that nobody but this user can have written.

    One that is made is for this user alone, and so becomes one of this user that others could read. Raises
    :class:`Untrusted` for a link, for what is no file, and for one that others own or may write.
    """
    try:
        # A named pipe would be waited for.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Untrusted(_refusal(path, "a file", "a link")) from error
        raise
    try:
        found = os.fstat(descriptor)
        _check(path, found, "a file")
        made_too_strict = flags & os.O_CREAT and stat.S_IMODE(found.st_mode) & FILE_MODE != FILE_MODE
        if found.st_uid == os.geteuid() and (found.st_mode & _OF_OTHERS or made_too_strict):
            with suppress(OSError):  # on a filesystem that is only read
                os.fchmod(descriptor, FILE_MODE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_file(path: Path) -> bytes:
    """Return what is in a file; raises as :func:`open_file` does."""
    with os.fdopen(open_file(path), "rb") as file:
        return file.read()


def create_file(path: Path, content: bytes = b"") -> None:
    """Write a file that is not there yet."""
    with os.fdopen(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        file.write(content)


def append_line(path: Path, line: str) -> None:
    """Add a line to a file, which is made if it is missing."""
    with os.fdopen(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
        file.write(f"{line}\n".encode())


def _check(path: Path, found: os.stat_result, expected: str) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise Untrusted(_refusal(path, expected, "a link"))
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise Untrusted(_refusal(path, expected, "something else"))
    if found.st_uid not in (os.geteuid(), _ROOT):
        raise Untrusted(_refusal(path, expected, f"one of user {found.st_uid}"))
    if found.st_mode & _WRITABLE_BY_OTHERS:
        mode = stat.S_IMODE(found.st_mode)
        raise Untrusted(_refusal(path, expected, f"one of user {found.st_uid} with mode {mode:04o}"))


def _refusal(path: Path, expected: str, found: str) -> str:
    return (
        f"{path}: expected {expected} of user {os.geteuid()} that nobody else may write, found {found}: "
        "others could change what is kept there; remove it (or take their rights away, if you trust what is "
        "in it), or name another folder"
    )
