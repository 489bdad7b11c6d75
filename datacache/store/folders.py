"""The folders of a cache: made whole, never changed into something else, removed only when nobody uses them.

A folder ``gen-<fingerprint>`` is made under another name and renamed when it can be used, and renamed before
it is removed, so that what has that name is always whole. Whoever uses it holds a shared lock on its file
``in-use``, which a crash releases. All is made for this user alone, and used only if nobody else can have
changed it (see :mod:`datacache.store.private`).
"""

import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from datacache.errors import Damaged, Untrusted
from datacache.store import locks
from datacache.store.private import append_line, check_folder, create_file, make_folder, open_file, read_file
from datacache.store.records import seed_of

FORMAT = 2  # of folders, their files and their records
PREFIX = "gen-"
COMPLETE, DESCRIPTION, IN_USE, BROKEN = "COMPLETE", "generation.json", "in-use", "BROKEN"
READS = "reads"  # a line for each process that has closed it: samples asked for, samples that were there

_ROOT_LOCK = "lock"
_MAKING, _REMOVING = ".new-", ".old-"
_ROOT_SECONDS = 60.0
_ENTER_SECONDS = 60.0
_ATTEMPTS = 20
_DROP_SECONDS = 2.0


@dataclass(frozen=True)
class Description:
    """What a folder is made for. ``expected_bytes``: what it may grow to."""

    fingerprint: str
    samples: int
    ids: str  # xxh3_128 of the sorted ids
    expected_bytes: int
    note: dict[str, Any]
    boot: str
    format: int = FORMAT


def enter(root: Path, wanted: Description, fill: Callable[[Path], None]) -> tuple[Path, int]:
    """Return the folder of a fingerprint, and a descriptor that keeps it until closed.

    If there is none it is made, and ``fill`` puts into it what belongs there. One that cannot be used is
    dropped; if another job uses it, or it was made for other ids, that is an error.
    :class:`datacache.errors.Untrusted` if others can change what is there.
    """
    check_folder(root)
    folder = root / (PREFIX + wanted.fingerprint)
    for _ in range(_ATTEMPTS):
        descriptor = _keep(folder)
        if descriptor is None:
            _make(root, folder, wanted, fill)
            continue
        try:
            fault = _fault(folder, wanted)
        except BaseException:
            os.close(descriptor)
            raise
        if fault is None:
            return folder, descriptor
        drop(folder, descriptor, fault)
    raise TimeoutError(f"{folder}: made and removed by others {_ATTEMPTS} times")


def drop(folder: Path, descriptor: int, fault: str) -> None:
    """Remove a folder that was entered and cannot be used, and close the descriptor that kept it.

    Others that find the same fault are waited for; what one of them has made again is left. Raises
    ``RuntimeError`` if another job uses it.
    """
    deadline = time.monotonic() + _DROP_SECONDS
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        while not remove(folder, descriptor):
            if time.monotonic() >= deadline:
                raise RuntimeError(
                    f"{folder}: {fault}, and another job uses it: choose another folder than {folder.parent}"
                )
            time.sleep(0.02)
    finally:
        os.close(descriptor)


def remove(folder: Path, entered: int | None = None) -> bool:
    """Remove a folder unless somebody uses it; return whether it is gone.

    ``entered``: a descriptor of its file ``in-use``; another folder that has taken its place is left.
    """
    root = folder.parent
    gone = root / f"{_REMOVING}{folder.name}-{secrets.token_hex(4)}"
    with _alone(root):
        if not folder.is_dir() or (entered is not None and not is_at(entered, folder / IN_USE)):
            return True
        descriptor = locks.take(folder / IN_USE)
        if descriptor is None:
            return False
        try:
            folder.rename(gone)
        finally:
            os.close(descriptor)
    shutil.rmtree(gone, ignore_errors=True)
    return True


def is_in_use(folder: Path) -> bool:
    """Tell whether any living process has the folder open."""
    if not (folder / IN_USE).exists():
        return False
    descriptor = locks.take(folder / IN_USE)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


def all_folders(root: Path) -> list[Path]:
    """Return the folders of all fingerprints, sorted."""
    return sorted(path for path in root.glob(PREFIX + "*") if path.is_dir() and not path.is_symlink())


def describe(folder: Path) -> Description | None:
    """Return what a folder was made for, or ``None`` if that cannot be read or is of another format."""
    fingerprint = folder.name.removeprefix(PREFIX)
    try:
        written = read_facts(folder / DESCRIPTION, seed_of(fingerprint))
        found = Description(**written) if written["format"] == FORMAT else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if found is not None and found.fingerprint == fingerprint else None


def write_facts(path: Path, facts: dict[str, Any], seed: int) -> None:
    """Write facts as JSON with a checksum; wholly and durably, or not at all."""
    write_whole(path, json.dumps({**facts, "check": _check_of(facts, seed)}).encode())


def read_facts(path: Path, seed: int) -> dict[str, Any]:
    """Return facts as they were written; :class:`Damaged` if they are not, or were with another seed."""
    try:
        facts = json.loads(read_file(path))
        check = facts.pop("check")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path}: cannot be read ({error})") from error
    if check != _check_of(facts, seed):
        raise Damaged(f"{path}: not what was written")
    return dict(facts)


def _check_of(facts: dict[str, Any], seed: int) -> str:
    return xxh3_64_hexdigest(json.dumps(facts, sort_keys=True).encode(), seed)


def note_reads(folder: Path, asked: int, found: int) -> None:
    """Note how many samples a process has asked for in a folder, and how many were there."""
    if asked == 0:
        return
    with suppress(OSError):  # nobody misses it where it cannot be written
        append_line(folder / READS, f"{asked} {found}")


def reads_of(folder: Path) -> tuple[int, int]:
    """Return how many samples all processes so far have asked for, and how many were there."""
    try:
        lines = [line.split() for line in read_file(folder / READS).splitlines()]
        return sum(int(asked) for asked, _ in lines), sum(int(found) for _, found in lines)
    except (OSError, ValueError):
        return 0, 0


def held_bytes(folder: Path) -> int:
    """Return the bytes that a folder takes of its filesystem."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += 512 * path.stat().st_blocks
        except FileNotFoundError:  # a file of another process that was renamed meanwhile
            continue
    return total


def promised_bytes(root: Path, but: Path) -> int:
    """Return what the other generations that are being filled may still grow by."""
    total = 0
    for folder in all_folders(root):
        found = describe(folder)
        if folder == but or found is None or (folder / COMPLETE).exists() or not is_in_use(folder):
            continue
        total += max(0, found.expected_bytes - held_bytes(folder))
    return total


def boot() -> str:
    """Return what changes when the machine starts again, which is when data that was not synced is lost."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def write_whole(path: Path, content: bytes, *, is_private: bool = True) -> None:
    """Write a file so that it is there wholly and durably, or not at all.

    It is for this user alone, or else for whom the ``umask`` says.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    aside = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with open(open_file(aside, flags) if is_private else os.open(aside, flags, 0o666), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make durable which files a folder has."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _keep(folder: Path) -> int | None:
    """Return a descriptor that keeps others from removing the folder, or ``None`` if there is no folder."""
    while folder.is_dir():
        check_folder(folder)
        try:
            descriptor = locks.take(folder / IN_USE, shared=True, timeout_seconds=_ENTER_SECONDS)
        except FileNotFoundError:
            continue
        if descriptor is None:
            raise TimeoutError(f"{folder / IN_USE}: locked by a process for more than {_ENTER_SECONDS} s")
        if is_at(descriptor, folder / IN_USE):
            return descriptor
        os.close(descriptor)  # it was removed, perhaps made again, while we waited
    return None


def is_at(descriptor: int, path: Path) -> bool:
    """Tell whether an open file has not been removed or replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False


def _make(root: Path, folder: Path, wanted: Description, fill: Callable[[Path], None]) -> None:
    try:
        make_folder(root)
        os.close(open_file(root / _ROOT_LOCK, os.O_RDWR | os.O_CREAT))
    except Untrusted:
        raise
    except OSError as error:
        raise PermissionError(f"{root}: holds no {folder.name}, and it cannot be made: {error}") from error
    with _alone(root):
        for leftover in (*root.glob(_MAKING + "*"), *root.glob(_REMOVING + "*")):
            shutil.rmtree(leftover, ignore_errors=True)  # of a crash: they are made under this lock
        if folder.is_dir():
            return
        new = root / f"{_MAKING}{folder.name}-{secrets.token_hex(4)}"
        try:
            make_folder(new)
            create_file(new / IN_USE)
            fill(new)
            write_facts(new / DESCRIPTION, asdict(wanted), seed_of(wanted.fingerprint))
            new.rename(folder)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise


def _fault(folder: Path, wanted: Description) -> str | None:
    """Return why a folder cannot be used, if it cannot."""
    found = describe(folder)
    if found is None:
        return f"damaged, or not of format {FORMAT}"
    if found.ids != wanted.ids:
        raise ValueError(
            f"{folder}: holds {found.samples} samples, expected {wanted.samples} with other ids; "
            "the fingerprint must also tell which part of the samples is kept"
        )
    if (folder / BROKEN).exists():
        return "damaged"
    if not (folder / COMPLETE).exists() and found.boot != wanted.boot:
        return "not finished before the machine started again"
    return None


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Inside the block nobody else makes or removes folders of this root."""
    with locks.exclusive(root / _ROOT_LOCK, _ROOT_SECONDS) as held:
        if not held:
            raise TimeoutError(f"{root / _ROOT_LOCK}: locked by a process for more than {_ROOT_SECONDS} s")
        yield
