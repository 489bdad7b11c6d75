"""Central storage: files behind any URL that fsspec knows, read with retries, and written."""

import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FuturesTimeout
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, BinaryIO, TypeVar

import fsspec
from fsspec.asyn import sync

from datacache.errors import SourceChanged, StorageFailed
from datacache.escaping import without_secrets

ProgressCallback = Callable[[int, int], None]
"""``report(done, total)``; called by one thread at a time, not always the same one."""

StorageOptions = Mapping[str, Any] | None
"""The keywords of a :class:`Storage`, as sources take them."""

LONGEST_WAIT_SECONDS = 10.0
DEEPEST_FOLDER = 32
LISTING_PATIENCE = 20  # times the timeout: listing a folder may take many requests, or a stat of each entry
# The names by which filesystems report a file's version, the most reliable first.
VERSIONS = (
    *("ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "checksum", "crc32c", "generation"),
    *("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "modified"),
    *("modificationTime", "modify", "created", "CRC"),  # WebHDFS, FTP
)
JOINED_GAP = 16 << 10  # bytes: 0.13 ms at 1 Gbit/s, as a request of 2 ms costs when 16 run in parallel
JOINED_BYTES = 8 << 20
IDLE_SECONDS = 5.0
PERMANENT_ERRORS = (PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError)

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def check_whole(*, least: int, **options: int) -> None:
    """Raise ``ValueError`` for an option that is no whole number from ``least``."""
    for name, value in options.items():
        if type(value) is not int or value < least:  # True is an int in Python
            raise ValueError(f"{name}: expected a whole number from {least}, got {value!r}")


def no_report(done: int, total: int) -> None:
    """Report nothing."""


@dataclass(frozen=True, slots=True)
class File:
    """A file: its path relative to the storage's URL, its bytes, and its version (an ETag or a time)."""

    path: str
    size: int
    version: str


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes ``start … start + length − 1`` of a file; ``whole``: these are all bytes of the file."""

    path: str
    start: int
    length: int
    whole: bool = False

    @property
    def stop(self) -> int:
        """The byte after the last one."""
        return self.start + self.length


def joined(ranges: Sequence[Range]) -> list[tuple[Range, list[int]]]:
    """Merge near ranges; return the ranges to request, and the positions of the given ranges in each."""
    requests: list[tuple[Range, list[int]]] = []
    for position in sorted(range(len(ranges)), key=lambda at: (ranges[at].path, ranges[at].start)):
        wanted = ranges[position]
        if requests:
            last, positions = requests[-1]
            is_near = wanted.start - last.stop <= JOINED_GAP and wanted.stop - last.start <= JOINED_BYTES
            if last.path == wanted.path and last.whole == wanted.whole and is_near:
                end = max(last.stop, wanted.stop)
                both = Range(last.path, last.start, end - last.start, last.whole)
                requests[-1] = both, [*positions, position]
                continue
        requests.append((wanted, [position]))
    return requests


@dataclass(slots=True)
class Listing:
    """The contents of folders: files, folders, and names of unknown kind or size (links, HTTP)."""

    files: list[File] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


class Storage:
    """The files below a URL, for any number of threads, also after a fork.

    A request that fails, stalls for ``timeout_seconds`` or returns too few bytes is retried, ``attempts``
    requests in all, with exponential backoff from ``first_wait_seconds`` to ten seconds and a jitter of up to
    a half. The default survives a million reads from a storage that fails one request in five
    (0.2¹⁰ · 10⁶ = 0.1), gives up on a dead one after half a minute, and on one that stalls after five and a
    half minutes.

    ``options`` go to the filesystem (keys, endpoints, …); ``threads`` is the number of parallel requests.
    The attribute ``url``, which messages show, has no passwords.
    """

    def __init__(
        self,
        url: str,
        *,
        options: Mapping[str, Any] | None = None,
        attempts: int = 10,
        first_wait_seconds: float = 0.1,
        timeout_seconds: float = 30.0,
        threads: int = 16,
    ) -> None:
        check_whole(least=1, attempts=attempts, threads=threads)
        if type(first_wait_seconds) not in (int, float) or not first_wait_seconds >= 0:
            raise ValueError(f"first_wait_seconds: expected a number from 0, got {first_wait_seconds!r}")
        if type(timeout_seconds) not in (int, float) or not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds: expected a number above 0, got {timeout_seconds!r}")
        if options is not None and not isinstance(options, Mapping):
            raise ValueError(f"options: expected keys and values, got one {type(options).__name__}")
        is_root = url == "/" or url.endswith(("://", ":///"))
        self.url, self._whole_url = without_secrets(url if is_root else url.rstrip("/")), url
        self._options = dict(options or {})
        self._attempts = attempts
        self._first_wait_seconds = first_wait_seconds
        self._timeout_seconds = timeout_seconds
        self._threads = threads
        self._connect()

    def files(self, report: ProgressCallback = no_report) -> list[File]:
        """Return all files below the URL, sorted by path; ``report`` counts folders, done and found so far.

        Links to files and folders are followed. ``FileNotFoundError`` if the URL does not exist.
        """
        # fsspec's own find() silently leaves out a folder that it fails to list.
        self._filesystem.invalidate_cache()
        found: list[File] = []
        folders, total = [self._root or self._start], 1
        for _ in range(DEEPEST_FOLDER):
            level = self._level(folders)
            found += level.files
            done, total = total, total + len(level.folders)
            report(done, total)
            if not level.folders:
                return sorted(found, key=lambda file: file.path)
            folders = level.folders
        raise ValueError(
            f"{self.url}: folders are nested deeper than {DEEPEST_FOLDER}, as {folders[0]}; "
            "does a link lead back to a folder above it?"
        )

    def top(self) -> Listing:
        """Return the files and the names of the folders right below the URL, sorted."""
        self._filesystem.invalidate_cache()
        level = self._level([self._root or self._start])
        folders = sorted(self._relative(name.rstrip("/")) or name for name in level.folders)
        return Listing(sorted(level.files, key=lambda file: file.path), folders)

    def file(self, path: str) -> File:
        """Return size and version of one file now; ``FileNotFoundError`` if it does not exist."""
        return self._file(self._request("info", self._full(path)), path)

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        """Return exactly ``length`` bytes from ``start``; without a length, all up to the end of the file.

        ``FileNotFoundError`` at once; ``StorageFailed`` if every attempt failed; ``SourceChanged`` if the
        file is shorter than the range.
        """
        if length is None:
            length = self.file(path).size - start
        return self._read(Range(path, start, length))

    def read_many(self, ranges: Sequence[Range]) -> list[bytes]:
        """Return the bytes of each range, in order, by parallel requests; near ranges share a request."""
        results = [b""] * len(ranges)

        def answer(request: tuple[Range, list[int]]) -> None:
            asked, positions = request
            data = self._read(asked)
            for position in positions:
                at = ranges[position].start - asked.start
                results[position] = data[at : at + ranges[position].length]

        self.in_parallel(answer, joined(ranges))
        return results

    @contextmanager
    def writing(self, path: str) -> Iterator[BinaryIO]:
        """Open a new file for writing; it exists once the block has ended. ``StorageFailed`` if that fails.

        A block that fails may leave a partial file. There are no retries but the filesystem's own.
        """
        self._connected()
        try:
            with self._filesystem.open(self._full(path), "wb") as file:
                yield file
        except Exception as error:
            raise self._failed(path, "cannot be written:", error) from None

    def remove(self, path: str) -> None:
        """Remove a file; ``FileNotFoundError`` where there is none."""
        self._request("rm_file", self._full(path))

    def in_parallel(self, function: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
        """Return ``function(item)`` of each, computed by ``threads`` threads.

        After an exception no more calls begin; it is raised when the running ones have ended.
        """
        if len(items) <= 1:
            return [function(item) for item in items]
        answers: list[Any] = [None] * len(items)
        positions = iter(range(len(items)))
        failed = threading.Event()

        def work() -> None:
            for position in positions:
                if failed.is_set():
                    return
                try:
                    answers[position] = function(items[position])
                except BaseException:
                    failed.set()
                    raise

        pool = self._connected()
        workers = [pool.submit(work) for _ in range(min(self._threads, len(items)))]
        errors = [worker.exception() for worker in workers]
        for error in errors:
            if error is not None:
                raise error
        return answers

    def _read(self, wanted: Range) -> bytes:
        if wanted.length == 0:
            return b""

        def check(data: bytes) -> None:
            if len(data) != wanted.length:
                self._filesystem.invalidate_cache(self._full(wanted.path))
                size = self.file(wanted.path).size
                if size < wanted.stop or (wanted.whole and size == len(data)):  # no retry helps then
                    expected = f"{wanted.stop}" if wanted.whole else f"at least {wanted.stop}"
                    raise SourceChanged(
                        f"{self.url}/{wanted.path}: has {size} bytes, {expected} expected: "
                        "it changed after its manifest was made"
                    )
                raise OSError(f"expected {wanted.length} bytes, got {len(data)}")

        limits = {} if wanted.whole else {"start": wanted.start, "end": wanted.stop}
        data: bytes = self._request("cat_file", self._full(wanted.path), check, **limits)
        return data

    def _level(self, folders: list[str]) -> Listing:
        """Return the contents of several folders; the kind of every entry is known."""
        level = Listing()
        for listing in self.in_parallel(self._list, folders):
            level.files += listing.files
            level.folders += listing.folders
            level.unknown += listing.unknown
        entries = self.in_parallel(lambda name: self._request("info", name), level.unknown)
        for name, entry in zip(level.unknown, entries, strict=True):
            if entry["type"] == "directory":
                level.folders.append(name)
            else:
                level.files.append(self._file(entry, self._relative(name) or name))
        return level

    def _list(self, folder: str) -> Listing:
        listing = Listing()
        for entry in self._request("ls", folder, detail=True):
            name: str = entry["name"].rstrip("/")
            path = self._relative(name)
            if name == self._root and entry["type"] == "file" and entry["name"] == name:
                raise ValueError(f"{self.url}: expected a folder, got a file")
            if path is None or name == folder.rstrip("/"):
                continue  # a link of a web page to elsewhere; an object store's marker of an empty folder
            if entry["type"] == "directory":
                listing.folders.append(entry["name"])
            elif entry["type"] == "file" and entry.get("size") is not None:
                listing.files.append(self._file(entry, path))
            else:
                listing.unknown.append(name)
        return listing

    def _file(self, info: Mapping[str, Any], path: str) -> File:
        if info.get("size") is None:
            raise StorageFailed(f"{self.url}: {path}: the storage does not report the file's size")
        version = next((info[key] for key in VERSIONS if info.get(key) is not None), "")
        if isinstance(version, datetime):  # some filesystems report the same time as a number elsewhere
            version = version.timestamp()
        return File(path, int(info["size"]), str(version))

    def _full(self, path: str) -> str:
        return self._start + path

    def _relative(self, name: str) -> str | None:
        """Return a name as a path below the URL; None if it is not below it, or is a query of a web page."""
        path = name[len(self._start) :].lstrip("/")
        return path if name.startswith(self._start) and path and not path.startswith("?") else None

    def _request(
        self, method: str, path: str, check: Callable[[Any], None] | None = None, **arguments: Any
    ) -> Any:
        """Return the result of a method of the filesystem that ``check`` accepts, with retries."""
        for attempt in range(1, self._attempts + 1):
            try:
                answer = self._request_once(method, path, arguments)
                if check is not None:
                    check(answer)
            except (SourceChanged, StorageFailed):
                raise
            except Exception as caught:
                if _is_missing(caught):
                    raise
                error = caught
                if isinstance(caught, PERMANENT_ERRORS):
                    break
            else:
                return answer
            if attempt < self._attempts:
                wait = min(self._first_wait_seconds * 2.0 ** (attempt - 1), LONGEST_WAIT_SECONDS)
                time.sleep(wait * random.SystemRandom().uniform(0.5, 1.5))  # noqa: S311
        counted = f"{attempt} attempts" if attempt > 1 else "1 attempt"
        # A traceback would show the secrets of the cause.
        cause = error if without_secrets(str(error)) == str(error) else None
        raise self._failed(self._relative(path) or path, f"{counted} failed, the last with", error) from cause

    def _failed(self, path: str, how: str, error: BaseException) -> StorageFailed:
        shown, message = without_secrets(path), without_secrets(str(error))
        return StorageFailed(f"{self.url}: {shown}: {how} {type(error).__name__}: {message}")

    def _request_once(self, method: str, path: str, arguments: dict[str, Any]) -> Any:
        pool = self._connected()
        seconds = self._timeout_seconds * (LISTING_PATIENCE if method == "ls" else 1)
        stalled = f"no answer within {seconds:g} s"
        if self._filesystem.async_impl:
            function = getattr(self._filesystem, f"_{method}")
            try:
                return sync(self._filesystem.loop, function, path, timeout=seconds, **arguments)
            except fsspec.FSTimeoutError as error:
                raise TimeoutError(stalled) from error
        function = getattr(self._filesystem, method)
        answer = pool.submit(partial(function, path, **arguments))
        try:
            return answer.result(seconds)
        except FuturesTimeout as error:  # not the builtin one before Python 3.11
            if answer.done():  # the filesystem's own timeout
                raise
            raise TimeoutError(stalled) from error

    def _connect(self) -> None:
        self._process = os.getpid()
        self._pool = ThreadPool()
        try:
            self._filesystem, root = fsspec.core.url_to_fs(self._whole_url, **self._options)
        except (OSError, ImportError, ValueError):
            raise
        except Exception as error:  # a library's own, such as FTP's for a wrong password
            reason = f"{type(error).__name__}: {without_secrets(str(error))}"
            raise StorageFailed(f"{self.url}: no connection: {reason}") from None
        self._root = root.rstrip("/")
        self._start = f"{self._root}/" if root else ""  # of the names of files

    def _connected(self) -> "ThreadPool":
        if self._process != os.getpid():  # a fork inherits neither threads nor connections
            self._connect()
        return self._pool


def _is_missing(error: Exception) -> bool:
    """Return whether a file does not exist; fsspec's HTTP raises the same if it cannot find the size."""
    if not isinstance(error, FileNotFoundError):
        return False
    cause = error.__cause__
    missing = isinstance(cause, FileNotFoundError | LookupError) or getattr(cause, "status", None) == 404
    return cause is None or missing


def progress(total: int, report: ProgressCallback) -> Callable[[int], None]:
    """Return a thread-safe function that adds to the amount done and reports it."""
    lock = threading.Lock()
    done = 0

    def add(amount: int) -> None:
        nonlocal done
        with lock:
            done += amount
            report(done, total)

    return add


class ThreadPool:
    """Daemon threads, as many as there are running jobs: a stalled job delays neither others nor the exit.

    ``concurrent.futures.ThreadPoolExecutor`` would queue jobs behind stalled ones, and join them at exit.
    """

    def __init__(self, name: str = "datacache-storage") -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)

    def submit(self, job: Callable[[], Answer]) -> "Future[Answer]":
        """Start the job at once, in an idle thread or a new one."""
        future: Future[Answer] = Future()
        self._jobs.put((future, job))
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            try:
                future, job = self._jobs.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                if self._idle.acquire(blocking=False):
                    return
                continue  # a job that relies on this thread is being submitted
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            del future, job  # they refer to the result
            self._idle.release()
