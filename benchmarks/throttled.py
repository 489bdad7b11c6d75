"""Throttled central storage: a folder behind one slow link, for tests and benchmarks.

Each request waits for the latency, in parallel with others, and then passes the link, which all threads and
processes of this machine share::

    with serve(folder, rate="1gbit", latency_seconds=0.002) as url:
        fs, root = fsspec.url_to_fs(url)
        fs.find(root, detail=True)  # one request a folder, sizes and versions included
        fs.cat_file(root + "/a/b.jpg", start=100, end=200)
        assert counts(url).requests == 1

The link is a file with the moment from which on it is free, which is locked to be changed. So there is no
server, and no process that could be the bottleneck.
"""

import fcntl
import json
import os
import random
import re
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import fsspec

# Sent by one request before another may send: two milliseconds of the link at half a Gbit/s.
CHUNK_BYTES = 128 * 1024
LINK = struct.Struct("dqq")  # the moment from which on the link is free; requests and failures so far


def bytes_per_second(rate: str) -> float:
    """Return a rate in the notation of ``tc`` in bytes per second.

    >>> bytes_per_second("1gbit"), bytes_per_second("500mbit")
    (125000000.0, 62500000.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)bit", rate)
    if found is None or float(found[1]) == 0:
        raise ValueError(f"rate: expected a number and kbit, mbit or gbit, as in 1gbit, got {rate!r}")
    return float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]] / 8


@dataclass(frozen=True)
class Limits:
    """The limits and faults of the storage.

    ``rate``: of the link, for all clients together, in the notation of ``tc`` ("1gbit"); ``None``: no limit.
    ``latency_seconds``: between a request and its first byte. ``failures``: the share of requests that fail,
    drawn with ``seed``: alternately at once, and after half of the bytes.
    """

    rate: str | None = None
    latency_seconds: float = 0.0
    failures: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Counts:
    """What a storage has sent so far; failed requests count only in ``failures``.

    ``requests`` and ``bytes``: of contents of files. ``listings``: all other requests. ``reads``: for each
    file, relative to the folder, how often it or a range of it was sent.
    """

    requests: int = 0
    bytes: int = 0
    listings: int = 0
    failures: int = 0
    reads: dict[str, int] = field(default_factory=dict)


@contextmanager
def serve(folder: str | os.PathLike[str], **limits: Any) -> Iterator[str]:
    """Yield the URL of a folder behind a link; see :class:`Limits` for the keywords."""
    with tempfile.TemporaryDirectory(prefix="throttled-") as name:
        state = Path(name)
        (state / "limits.json").write_text(json.dumps(asdict(Limits(**limits))))
        (state / "link").write_bytes(LINK.pack(0.0, 0, 0))
        (state / "log").touch()
        (state / "folder").symlink_to(Path(folder).resolve())
        yield f"throttled://{state.name}"


def counts(url: str) -> Counts:
    """Return the counts of the storage at this URL."""
    state = _state(url.removeprefix("throttled://"))
    lines = [line.split(" ", 1) for line in (state / "log").read_text().splitlines()]
    sent = [(int(size), name) for size, name in lines if size != "-"]
    (_, _, failures) = LINK.unpack((state / "link").read_bytes())
    reads = Counter(name for _, name in sent)
    return Counts(len(sent), sum(size for size, _ in sent), len(lines) - len(sent), failures, dict(reads))


def _state(host: str) -> Path:
    return Path(tempfile.gettempdir()) / host


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


class ThrottledFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Lists folders and reads files of a throttled storage, in any number of threads and processes.

    A request that fails raises an ``OSError``; there are no retries here: :class:`datacache.Storage` retries.
    """

    protocol = "throttled"
    cachable = True

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """Return the entries of a folder, or the one of a file, by one request."""
        host, inside = self._place(path)
        found = self._request(host, inside)
        entries = []
        for each in sorted(found.iterdir()) if found.is_dir() else [found]:
            facts, own = each.stat(), each.relative_to(_state(host) / "folder").as_posix()
            entry: dict[str, Any] = {"name": f"{host}/{own}", "size": 0, "type": "directory"}
            if not each.is_dir():
                version = {"ETag": f"{facts.st_mtime_ns:x}-{facts.st_size:x}", "mtime": facts.st_mtime}
                entry |= {"size": facts.st_size, "type": "file", **version}
            entries.append(entry)
        self._log(host, "-", inside)
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Return size, type and version of one file or folder by one request."""
        path = self._strip_protocol(path).rstrip("/")
        alone = [entry for entry in self.ls(path) if entry["name"] == path]
        return alone[0] if alone else {"name": path, "size": 0, "type": "directory"}

    def find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, **options: Any) -> Any:
        """Return all files below a folder; a folder that cannot be listed is an error, not empty."""
        return super().find(path, maxdepth, withdirs, **{"on_error": "raise", **options})

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """Return the bytes of a file from ``start`` to before ``end``, fewer if the file is shorter."""
        first = start or 0
        host, inside = self._place(path)
        with self._request(host, inside).open("rb", buffering=0) as file:
            file.seek(first)
            body = file.read(-1 if end is None else end - first)
        self._pass_link(host, len(body))
        self._log(host, str(len(body)), inside)
        return body

    def _place(self, path: str) -> tuple[str, str]:
        host, _, inside = self._strip_protocol(path).rstrip("/").partition("/")
        return host, inside

    def _limits(self, host: str) -> Limits:
        try:
            return Limits(**json.loads((_state(host) / "limits.json").read_text()))
        except FileNotFoundError:
            raise ConnectionError(f"throttled://{host}: nothing is served there") from None

    def _request(self, host: str, inside: str) -> Path:
        """Wait for the latency, perhaps fail, and return the path of a file or folder."""
        limits, url = self._limits(host), f"throttled://{host}/{inside}"
        _sleep_until(time.monotonic() + limits.latency_seconds)
        path = _state(host) / "folder" / inside
        with self._link(host) as link:
            link[1] += 1
            fails = random.Random(f"{limits.seed} {link[1]}").random() < limits.failures
            link[2] += fails
            failures = link[2]
        if fails and failures % 2:
            raise OSError(f"{url}: 503 Service Unavailable")
        if ".." in inside.split("/") or not path.exists():
            raise FileNotFoundError(url)
        if fails:
            self._pass_link(host, path.stat().st_size // 2)
            raise OSError(f"{url}: the connection was closed after half of the bytes")
        return path

    def _pass_link(self, host: str, size: int) -> None:
        """Wait until so many bytes have passed the link, chunk by chunk."""
        limits = self._limits(host)
        if limits.rate is None:
            return
        rate, earliest = bytes_per_second(limits.rate), time.monotonic()
        for start in range(0, size, CHUNK_BYTES):
            with self._link(host) as link:
                link[0] = max(link[0], earliest) + min(CHUNK_BYTES, size - start) / rate
                earliest = link[0]
            _sleep_until(earliest)

    @contextmanager
    def _link(self, host: str) -> Iterator[list[Any]]:
        """Let one thread of one process at a time change the state of the link."""
        with (_state(host) / "link").open("r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            link = list(LINK.unpack(file.read(LINK.size)))
            yield link
            os.pwrite(file.fileno(), LINK.pack(*link), 0)

    def _log(self, host: str, size: str, inside: str) -> None:
        with (_state(host) / "log").open("a") as log:
            log.write(f"{size} {inside}\n")


fsspec.register_implementation("throttled", "benchmarks.throttled.ThrottledFileSystem")
