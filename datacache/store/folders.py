"""The folders of record stores: created and removed atomically, and never while a process uses them.

A folder ``gen-<fingerprint>`` is prepared under a temporary name and renamed when it is complete, and renamed
again before it is removed, so a folder of that name is never partial. Every process that uses it holds a
shared lock on its file ``in-use``; the kernel releases the locks of a process that dies. Folders and files
are private to their user (see :mod:`datacache.store.files`).
"""

import fcntl
import json
import os
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from datacache.errors import Damaged, Untrusted
from datacache.store import files, locks
from datacache.store.records import seed_of

FORMAT = 2  # of folders, their files and their records
PREFIX = "gen-"
COMPLETE, DESCRIPTION, IN_USE, BROKEN = "COMPLETE", "generation.json", "in-use", "BROKEN"
READS = "reads"  # a line for each process that has closed the store: samples requested, samples found

_ROOT_LOCK = "lock"
_CREATING, _REMOVING = ".new-", ".old-"
_ROOT_SECONDS = 60.0
_ENTER_SECONDS = 60.0
_ATTEMPTS = 20
_MOST_BYTES_OF_FACTS = 1 << 20
_DROP_SECONDS = 2.0


@dataclass(frozen=True)
class Description:
    """The contents of ``generation.json``: what a folder is for. ``expected_bytes``: its largest size."""

    fingerprint: str
    samples: int
    ids: str  # xxh3_128 of the sorted ids
    expected_bytes: int
    note: dict[str, Any]
    boot: str
    format: int = FORMAT


def enter(
    root: Path, wanted: Description, create: Callable[[Path], None], use: Callable[[Path], None]
) -> int:
    """Open the folder of a fingerprint; return a descriptor that protects it from removal until closed.

    ``create`` makes the files of a missing folder, ``use`` opens the files of an existing one. An unusable
    folder, such as one for which ``use`` raises :class:`Damaged`, is removed; ``RuntimeError`` if another job
    uses it. ``ValueError`` for a folder of other ids, :class:`Untrusted` if other users can change it.
    """
    files.check_folder(root)
    folder = root / (PREFIX + wanted.fingerprint)
    for _ in range(_ATTEMPTS):
        descriptor = _lock(folder)
        if descriptor is None:
            _create(root, folder, wanted, create)
            continue
        try:
            fault = _fault(folder, wanted)
            if fault is None:
                use(folder)
                return descriptor
        except Damaged as error:
            warnings.warn(f"{folder}: damaged, it is filled again: {error}", stacklevel=4)
            fault = "damaged"
        except BaseException:
            os.close(descriptor)
            raise
        _drop(folder, descriptor, fault)
    raise TimeoutError(f"{folder}: created and removed by other processes {_ATTEMPTS} times")


def _drop(folder: Path, descriptor: int, fault: str) -> None:
    """Remove a folder that was entered and is unusable, and close its descriptor.

    Processes that find the same fault wait for each other; a folder that one of them has created again is
    left. Raises ``RuntimeError`` if another job uses the folder.
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
    """Remove a folder unless a process uses it; return whether it is gone.

    ``entered``: a descriptor of its file ``in-use``; a newer folder of the same name is left.
    """
    root = folder.parent
    removed = root / f"{_REMOVING}{folder.name}-{secrets.token_hex(4)}"
    with _exclusive(root):
        if not folder.is_dir() or (entered is not None and not is_at(entered, folder / IN_USE)):
            return True
        with locks.exclusive(folder / IN_USE, 0.0) as held:
            if not held:
                return False
            folder.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)
    return True


def is_in_use(folder: Path) -> bool:
    """Return whether a running process has the folder open."""
    if not (folder / IN_USE).exists():
        return False
    with locks.exclusive(folder / IN_USE, 0.0) as held:
        return not held


def all_folders(root: Path) -> list[Path]:
    """Return the folders of all fingerprints, sorted."""
    return sorted(path for path in root.glob(PREFIX + "*") if path.is_dir() and not path.is_symlink())


def describe(folder: Path) -> Description | None:
    """Return the description of a folder, or ``None`` if it is unreadable or of another format."""
    fingerprint = folder.name.removeprefix(PREFIX)
    try:
        written = read_facts(folder / DESCRIPTION, seed_of(fingerprint))
        found = Description(**written) if written["format"] == FORMAT else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if found is not None and found.fingerprint == fingerprint else None


def write_facts(path: Path, facts: dict[str, Any], seed: int) -> None:
    """Write facts as JSON with a checksum, atomically and durably."""
    files.write_atomic(path, json.dumps({**facts, "check": _check_of(facts, seed)}).encode())


def read_facts(path: Path, seed: int) -> dict[str, Any]:
    """Return what :func:`write_facts` wrote; :class:`Damaged` if it is damaged or of another seed."""
    try:
        facts = json.loads(files.read_file(path, _MOST_BYTES_OF_FACTS))
        check = facts.pop("check")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(f"{path}: cannot be read ({error})") from error
    if check != _check_of(facts, seed):
        raise Damaged(f"{path}: not what was written")
    return dict(facts)


def _check_of(facts: dict[str, Any], seed: int) -> str:
    return xxh3_64_hexdigest(json.dumps(facts, sort_keys=True).encode(), seed)


def add_read_counts(folder: Path, requested: int, found: int) -> None:
    """Record how many samples a process has requested from a folder, and how many it found."""
    if requested:
        with suppress(OSError):  # statistics only
            files.append_line(folder / READS, f"{requested} {found}")


def read_counts(folder: Path) -> tuple[int, int]:
    """Return how many samples all processes so far have requested, and how many they found."""
    try:
        lines = [line.split() for line in files.read_file(folder / READS).splitlines()]
        return sum(int(requested) for requested, _ in lines), sum(int(found) for _, found in lines)
    except (OSError, ValueError):
        return 0, 0


def used_bytes(folder: Path) -> int:
    """Return the bytes that a folder uses on its filesystem."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # another process renamed it meanwhile
            total += 512 * path.stat().st_blocks
    return total


def reserved_bytes(root: Path, but: Path) -> int:
    """Return how many bytes the other stores that are being filled may still need."""
    total = 0
    for folder in all_folders(root):
        found = describe(folder)
        if folder != but and found and not (folder / COMPLETE).exists() and is_in_use(folder):
            total += max(0, found.expected_bytes - used_bytes(folder))
    return total


def boot() -> str:
    """Return the id of this boot: unsynced data of another boot is lost."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _lock(folder: Path) -> int | None:
    """Return a descriptor that protects the folder from removal, or ``None`` if it does not exist."""
    while folder.is_dir():
        files.check_folder(folder)
        try:
            descriptor = locks.take(folder / IN_USE, shared=True, timeout_seconds=_ENTER_SECONDS)
        except FileNotFoundError:
            continue
        if descriptor is None:
            raise TimeoutError(f"{folder / IN_USE}: locked by a process for more than {_ENTER_SECONDS} s")
        if is_at(descriptor, folder / IN_USE):
            return descriptor
        os.close(descriptor)  # the folder was removed, and perhaps created again, meanwhile
    return None


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still the one at ``path``."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False


def _create(root: Path, folder: Path, wanted: Description, create: Callable[[Path], None]) -> None:
    try:
        files.make_folder(root)
        os.close(files.open_file(root / _ROOT_LOCK, os.O_RDWR | os.O_CREAT))
    except Untrusted:
        raise
    except OSError as error:
        raise PermissionError(f"{root}: has no {folder.name}, and it cannot be created: {error}") from error
    with _exclusive(root):
        for leftover in (*root.glob(_CREATING + "*"), *root.glob(_REMOVING + "*")):
            shutil.rmtree(leftover, ignore_errors=True)  # of a crash: they exist only under this lock
        if folder.is_dir():
            return
        new = root / f"{_CREATING}{folder.name}-{secrets.token_hex(4)}"
        try:
            files.make_folder(new)
            files.create_file(new / IN_USE)
            create(new)
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
            "the fingerprint must also depend on which samples are stored"
        )
    if (folder / BROKEN).exists():
        return "damaged"
    if not (folder / COMPLETE).exists() and found.boot != wanted.boot:
        return "not finished before the machine restarted"
    return None


@contextmanager
def _exclusive(root: Path) -> Iterator[None]:
    """Inside the block no other process creates or removes folders of this root."""
    with locks.exclusive(root / _ROOT_LOCK, _ROOT_SECONDS) as held:
        if not held:
            raise TimeoutError(f"{root / _ROOT_LOCK}: locked by a process for more than {_ROOT_SECONDS} s")
        yield
