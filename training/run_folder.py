"""The folder of a run: its configuration, metrics, checkpoints and weights, and the lock of its process."""

import fcntl
import io
import json
import os
import re
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from datacache.escaping import escaped
from datacache.store import files
from training.config.run_files import CHECKPOINTS, CONFIG, METRICS, RUN, SUMMARY, WEIGHTS, last_checkpoint
from training.config.secrets import with_texts
from training.process.job import log_error
from training.results import Ranks, Summary

LOCK = "lock"
_STAMP = re.compile(r"\d{8}-\d{6}(-\d+)?")  # as _new_folder makes it
_PATIENCE_SECONDS = 1.0  # a process that only checks the lock holds it for a moment


class WeightsNotSaved(RuntimeError):
    """The weights of a run that has ended could not be written; one line names the file and the cause."""


class RunIsAlive(ValueError):
    """Another process trains this run; one line names the folder, the process and its host."""


class NamedRun(Protocol):
    """The part of a configuration that names a run's folder."""

    name: str
    output: str

    def to_yaml(self) -> str:
        """Return the configuration as YAML."""


class RunFolder:
    """The folder of one run, which rank 0 writes while it holds the run's lock (:class:`RunLock`).

    ``run.json``: the identity of the run, which its checkpoints have, too. ``config.yaml``: the resolved
    configuration. ``metrics.jsonl``: a JSON object a line for each event (:mod:`training.run.events`), with
    its ``kind`` and the ``seconds`` since this process opened the folder; the ``seconds`` of ``summary`` are
    those of the whole training. Non-finite numbers are ``null``. ``summary.json``: written when the run has
    ended.

    If metrics cannot be written any more, one warning is printed and training continues.
    """

    def __init__(self, config: NamedRun, path: Path | None = None) -> None:
        """Create a new folder, or continue in ``path``; ``ValueError`` where it is in use, or read-only."""
        with unwritable(f"output: {config.output}: expected a folder that can be written"):
            self.path = _new_folder(Path(config.output), config.name) if path is None else path
            self._lock = RunLock(self.path)
            try:
                self.identity = _identity(self.path / RUN)
                self._metrics = _Lines(self.path / METRICS)
            except BaseException:
                self._lock.release()
                raise
        self._missing: Counter[str] = Counter()
        self._start = time.perf_counter()

    def write_config(self, config: NamedRun) -> None:
        """Write ``config.yaml``; raise ``ValueError`` with the reason if that fails."""
        with unwritable(f"{self.path / CONFIG}: expected room for it"):
            self.write_file(CONFIG, config.to_yaml())

    def write(self, kind: str, **values: Any) -> None:
        """Append one line to ``metrics.jsonl``, if there is room for it."""
        seconds = round(time.perf_counter() - self._start, 6)
        record = with_texts({"kind": kind, "seconds": seconds, **values}, escaped)  # file names may be bytes
        line = json.dumps(_finite(record), allow_nan=False)
        self.attempt(METRICS, lambda: self._metrics.append(f"{line}\n".encode()))

    def save_weights(self, model: Any) -> None:
        """Write ``model.weights.h5``, whole or not at all; raises :class:`WeightsNotSaved`."""
        content = _InMemory()  # HDF5 crashes on a full disk
        model.save_weights(content)
        try:
            write_whole(self.path / WEIGHTS, content.getvalue())
        except OSError as error:
            size = len(content.getvalue())
            raise WeightsNotSaved(
                f"{self.path / WEIGHTS}: expected room for the {size:,} bytes of the weights, which are not "
                f"saved: {error.strerror}"
            ) from error

    def write_file(self, name: str, content: str) -> None:
        """Write a file atomically; raise ``OSError`` if the disk is full."""
        write_whole(self.path / name, content.encode())

    def attempt(self, name: str, write: Callable[[], None]) -> bool:
        """Write an optional file; return whether that succeeded. A full disk causes one warning per file."""
        try:
            write()
        except OSError as error:
            self._missing[name] += 1
            if self._missing[name] == 1:
                problem = f"{self.path / name}: cannot be written: {error.strerror}"
                log_error(f"warning: {problem}; training goes on without it")
            return False
        return True

    def end(self, summary: Summary, ranks: Ranks) -> None:
        """Write the result of the run: it is not resumed any more."""
        content = _finite(asdict(summary))
        content = {**content.pop("metrics"), **content}
        content |= {"ranks": ranks.count, "nodes": ranks.nodes, "hosts": ranks.hosts}
        self.write("summary", **content)
        self.attempt(SUMMARY, lambda: self.write_file(SUMMARY, json.dumps(content, indent=2) + "\n"))
        if (missing := self._missing[METRICS]) > 1:
            log_error(f"warning: {self.path / METRICS}: {missing} lines are missing in it")

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.close()
        self._lock.release()


def _finite(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record as JSON has it, with ``None`` for a NaN or an infinity, such as a perplexity can be."""
    return json.loads(json.dumps(record), parse_constant=lambda _: None)


class _Lines:
    """A file to which lines are appended atomically: a line that fails leaves nothing behind."""

    def __init__(self, path: Path) -> None:
        # Unbuffered: otherwise closing the file would retry what could not be written.
        self._file = path.open("a+b", buffering=0)
        self._file.seek(max(0, self._file.seek(0, os.SEEK_END) - 1))
        if self._file.read(1) not in (b"", b"\n"):  # a crash has left half a line
            self._file.seek(0)
            self._file.truncate(self._file.readall().rfind(b"\n") + 1)

    def append(self, line: bytes) -> None:
        """Write a line completely or not at all; raise ``OSError`` if the disk is full."""
        end, rest = self._file.seek(0, os.SEEK_END), memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with suppress(OSError):
                self._file.truncate(end)
            raise

    def close(self) -> None:
        self._file.close()


class _InMemory(io.BytesIO):
    """A file in memory whose name makes Keras treat it as a weights file."""

    def __str__(self) -> str:
        return WEIGHTS


@contextmanager
def unwritable(expected: str) -> Iterator[None]:
    """Re-raise an ``OSError`` of the block as a ``ValueError`` of one line, before training begins."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{expected}: {error}") from error


def to_resume(config: NamedRun, resume: str) -> Path | None:
    """Return the folder of the run to resume, if any; ``ValueError`` if it holds no run, or a running one."""
    if resume == "never":
        return None
    path = _unfinished_run(config) if resume == "auto" else Path(resume).expanduser()
    if path is None:
        return None
    if not (path / METRICS).exists():
        raise ValueError(f"resume: expected auto, never or the folder of a run, got {resume}")
    if (holder := holder_of(path)) is not None:
        raise RunIsAlive(f"resume: {holder}; wait until it ends, or begin another with resume=never")
    return path


def _unfinished_run(config: NamedRun) -> Path | None:
    """Return the newest run of this name that did not end: with checkpoints, or still being trained."""

    def is_unfinished(path: Path) -> bool:
        stamp = path.name.removeprefix(f"{config.name}-")  # another name may begin with this one
        if not _STAMP.fullmatch(stamp) or not (path / METRICS).exists() or (path / SUMMARY).exists():
            return False
        is_saved = (path / CHECKPOINTS).is_dir() or last_checkpoint(path / METRICS) is not None
        return is_saved or holder_of(path) is not None

    runs = filter(is_unfinished, Path(config.output).glob(f"{config.name}-*"))
    return max(runs, key=lambda path: (path / METRICS).stat().st_mtime, default=None)


def _new_folder(parent: Path, name: str) -> Path:
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    parent.mkdir(parents=True, exist_ok=True)
    for attempt in count():
        path = parent / (f"{stem}-{attempt}" if attempt else stem)
        with suppress(FileExistsError):
            path.mkdir()
            break
    return path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file of a run atomically, with the permissions of ``umask``: results may be shared."""
    files.write_atomic(path, content, is_private=False)


def _identity(path: Path) -> str:
    try:
        return str(json.loads(path.read_bytes())["identity"])
    except FileNotFoundError:
        identity = secrets.token_hex(16)
        write_whole(path, f"{json.dumps({'identity': identity})}\n".encode())
        return identity
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected the identity of a run, got what is damaged") from error


class RunLock:
    """The lock of a run's folder, held until :meth:`release` or the end of this process, however it ends.

    It is an ``flock`` on the file ``lock``, which only its owner may open, and which is never removed.
    Over NFS it holds between hosts where the mount passes locks on (all but ``nolock`` and ``local_lock``).
    Raises :class:`RunIsAlive` where another process holds it. A file system without locks causes a warning.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK
        self._file = io.FileIO(path, "a+", opener=_opened)  # NFS locks only a file to write exclusively
        try:
            is_free = _locked(self._file.fileno(), fcntl.LOCK_EX, _PATIENCE_SECONDS)
        except OSError as error:
            log_error(f"warning: {path}: no lock to be had ({error.strerror}): others may join this run")
            is_free = True
        if not is_free:
            self._file.close()
            raise RunIsAlive(f"resume: {_holder(path)}")
        since = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
        holder = {"host": socket.gethostname(), "process": os.getpid(), "since": since}
        with suppress(OSError):  # the disk is full: the lock works without its contents
            self._file.truncate(0)
            self._file.write(f"{json.dumps(holder)}\n".encode())

    def release(self) -> None:
        """Release the lock; idempotent."""
        if not self._file.closed:
            with suppress(OSError):
                self._file.truncate(0)
            self._file.close()


def holder_of(folder: Path) -> str | None:
    """Return one line about the process that trains the run of a folder, ``None`` where none does."""
    path = folder / LOCK
    # Suppressed: there is no such file yet, or no locks, of which RunLock warns.
    with suppress(OSError), io.FileIO(path, opener=_opened) as file:
        return None if _locked(file.fileno(), fcntl.LOCK_SH, 0.0) else _holder(path)
    return None


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _locked(descriptor: int, operation: int, patience_seconds: float) -> bool:
    """Try to take a lock for some time; return whether that succeeded."""
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        else:
            return True


def _holder(path: Path) -> str:
    try:
        found = json.loads(path.read_bytes())
        who = f"process {found['process']} on {found['host']}, since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        who = "another process"
    return f"expected a run that has stopped, got {path.parent}, which is being trained by {who}"
