"""Throttled central storage: a folder behind one slow network link, for tests and benchmarks.

``python -m benchmarks.throttled_server FOLDER --rate 1gbit --latency-seconds 0.002``: an HTTP server.
It is a process of its own, so that its limits hold for all ranks of a machine together: each response waits
for the latency, in parallel with others, and then passes one link of the given rate. It prints its URL,
``throttled://…``, when it is ready. fsspec opens such URLs with :class:`ThrottledFileSystem` once this module
is imported::

    with serve(folder, rate="1gbit", latency_seconds=0.002) as url:
        fs, root = fsspec.url_to_fs(url)
        fs.find(root, detail=True)  # one request a folder, sizes and versions included
        fs.cat_file(root + "/a/b.jpg", start=100, end=200)
        assert counts(url).requests == 1

The same address as ``http://…`` works with any HTTP client: ranges, ``HEAD``, folders as pages of links.
fsspec's own HTTP filesystem lists such pages too, but without sizes: it would need a request for each file.
"""

import http.client
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import fsspec

COUNTS = "/-/counts"
LISTING = "application/json"
SERVER = "benchmarks.throttled_server"


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
    ``latency_seconds``: between a request and the first byte of its response.
    ``failures``: the share of requests that fail, drawn with ``seed``: alternately with status 503, and with
    a connection that is closed after half of the response.
    ``stall_seconds``: if not 0, failing requests instead pause for this time after half of the response, and
    then send the other half.
    """

    rate: str | None = None
    latency_seconds: float = 0.0
    failures: float = 0.0
    seed: int = 0
    stall_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.rate is not None:
            bytes_per_second(self.rate)
        if not self.latency_seconds >= 0:
            raise ValueError(f"latency_seconds: expected 0 or more, got {self.latency_seconds}")
        if not 0 <= self.failures <= 1:
            raise ValueError(f"failures: expected a share from 0 to 1, got {self.failures}")
        if not self.stall_seconds >= 0:
            raise ValueError(f"stall_seconds: expected 0 or more, got {self.stall_seconds}")
        if self.stall_seconds and not self.failures:
            raise ValueError(
                f"failures: expected a share above 0, got 0: none would stall {self.stall_seconds} s"
            )


@dataclass(frozen=True)
class Counts:
    """What a server has sent so far; failed requests count only in ``failures``.

    ``requests`` and ``bytes``: responses with contents of files. ``listings``: all other responses.
    ``reads``: for each file, relative to the folder, how often it or a range of it was sent.
    """

    requests: int = 0
    bytes: int = 0
    listings: int = 0
    failures: int = 0
    reads: dict[str, int] = field(default_factory=dict)


def counts(url: str) -> Counts:
    """Return the counts of the server at this URL, without latency; this request is not counted."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        connection.request("GET", COUNTS)
        return Counts(**json.load(connection.getresponse()))
    finally:
        connection.close()


@contextmanager
def serve(
    folder: str | os.PathLike[str],
    *,
    rate: str | None = None,
    latency_seconds: float = 0.0,
    failures: float = 0.0,
    seed: int = 0,
    stall_seconds: float = 0.0,
) -> Iterator[str]:
    """Serve a folder from a process of its own and yield its URL; see :class:`Limits` for the arguments.

    The server ends with the block, or when this process dies: it watches its standard input.
    """
    limits = Limits(rate, latency_seconds, failures, seed, stall_seconds)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(limits).items() if value]
    command = [sys.executable, "-m", SERVER, os.fspath(folder), "--until-input-ends", *options]
    package = str(Path(__file__).resolve().parents[1])
    search = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    server = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": search},
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        if not url:
            raise RuntimeError(f"{' '.join(command)}: ended before it served, status {server.wait()}")
        yield url
    finally:
        server.kill()  # it has no state to save
        server.communicate()


class ThrottledFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The client of the throttled server: lists folders and reads files, in any number of threads.

    Each thread has its own connection. A response that is incomplete, an error, or stalls for
    ``timeout_seconds`` raises an ``OSError``; there are no retries here: :class:`datacache.Storage` retries.
    """

    protocol = "throttled"
    cachable = True

    def __init__(self, timeout_seconds: float = 60.0, **options: Any) -> None:
        super().__init__(timeout_seconds=timeout_seconds, **options)
        self._timeout_seconds = timeout_seconds
        self._own = threading.local()

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """Return the entries of a folder, or the one of a file, by one request."""
        path = self._strip_protocol(path).rstrip("/")
        host, _, inside = path.partition("/")
        entries: list[dict[str, Any]] = json.loads(self._get(host, f"/{inside}", {"Accept": LISTING}))
        for entry in entries:
            entry["name"] = f"{host}/{entry['name']}"
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Return size, type and version of one file or folder by one request."""
        path = self._strip_protocol(path).rstrip("/")
        alone = [entry for entry in self.ls(path) if entry["name"] == path]
        return alone[0] if alone else {"name": path, "size": 0, "type": "directory"}

    def find(
        self,
        path: str,
        maxdepth: int | None = None,
        withdirs: bool = False,
        detail: bool = False,
        **options: Any,
    ) -> Any:
        """Return all files below a folder; a folder that cannot be listed is an error, not empty."""
        options = {"on_error": "raise", **options}
        return super().find(path, maxdepth, withdirs, detail, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """Return the bytes of a file from ``start`` to before ``end``, fewer if the file is shorter."""
        first = start or 0
        if first < 0 or (end is not None and end < first):
            raise ValueError(f"range of {path}: expected 0 ≤ start ≤ end, got {start} and {end}")
        if end == first:
            return b""
        host, _, inside = self._strip_protocol(path).partition("/")
        headers = {}
        if start is not None or end is not None:
            headers["Range"] = f"bytes={first}-{'' if end is None else end - 1}"
        return self._get(host, f"/{inside}", headers)

    def _get(self, host: str, path: str, headers: dict[str, str]) -> bytes:
        """Return the body of one response; the connection is closed after any error."""
        connection = self._connection(host)
        try:
            connection.request("GET", quote(path), headers=headers)
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise OSError(f"throttled://{host}{path}: {type(error).__name__}: {error}") from error
        if answer.status == 404:
            raise FileNotFoundError(f"throttled://{host}{path}")
        if answer.status == 416:  # begins past the end
            return b""
        if answer.status not in (200, 206):
            raise OSError(f"throttled://{host}{path}: {answer.status} {answer.reason}")
        return body

    def _connection(self, host: str) -> http.client.HTTPConnection:
        """Return this thread's connection; a forked process opens its own."""
        opened: dict[tuple[int, str], http.client.HTTPConnection] = self._own.__dict__.setdefault(
            "opened", {}
        )
        key = (os.getpid(), host)
        if key not in opened:
            opened[key] = http.client.HTTPConnection(host, timeout=self._timeout_seconds)
        return opened[key]


fsspec.register_implementation("throttled", "benchmarks.throttled.ThrottledFileSystem")
