"""Throttled central storage: a folder behind one slow network link, for tests and benchmarks.

``python -m benchmarks.throttled FOLDER --rate 1gbit --latency-seconds 0.002``: an HTTP server. It is a
process of its own, so that its limits hold for all ranks of a machine together: each response waits for the
latency, in parallel with others, and then passes one link of the given rate. It prints its URL,
``throttled://…``. fsspec opens it with :class:`ThrottledFileSystem` once this module is imported::

    with serve(folder, rate="1gbit", latency_seconds=0.002) as url:
        fs, root = fsspec.url_to_fs(url)
        fs.find(root, detail=True)  # one request a folder, sizes and versions included
        fs.cat_file(root + "/a/b.jpg", start=100, end=200)
        assert counts(url).requests == 1
"""

import argparse
import http.client
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import fsspec

COUNTS = "/-/counts"
# Sent by one connection before another may send: two milliseconds of the link at half a Gbit/s.
CHUNK_BYTES = 128 * 1024


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
    """

    rate: str | None = None
    latency_seconds: float = 0.0
    failures: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rate is not None:
            bytes_per_second(self.rate)
        if self.latency_seconds < 0:
            raise ValueError(f"latency_seconds: expected 0 or more, got {self.latency_seconds}")
        if not 0 <= self.failures <= 1:
            raise ValueError(f"failures: expected a share from 0 to 1, got {self.failures}")


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


# ---- The client ----


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
) -> Iterator[str]:
    """Serve a folder from a process of its own and yield its URL; see :class:`Limits` for the arguments.

    The server ends with the block, or when this process dies: it watches its standard input.
    """
    limits = Limits(rate, latency_seconds, failures, seed)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(limits).items() if value]
    command = [
        sys.executable,
        "-m",
        "benchmarks.throttled",
        os.fspath(folder),
        "--until-input-ends",
        *options,
    ]
    search = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    server = subprocess.Popen(
        [*command, *options],
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
        entries: list[dict[str, Any]] = json.loads(self._get(host, f"/{inside}", {"Accept": "listing"}))
        for entry in entries:
            entry["name"] = f"{host}/{entry['name']}"
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
        if first < 0 or (end is not None and end < first):
            raise ValueError(f"range of {path}: expected 0 ≤ start ≤ end, got {start} and {end}")
        if end == first:
            return b""
        host, _, inside = self._strip_protocol(path).partition("/")
        return self._get(host, f"/{inside}", {"Range": f"bytes={first}-{'' if end is None else end - 1}"})

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
        if answer.status != 200:
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


# ---- The server ----


class _Server(ThreadingHTTPServer):
    """Answers requests for the files of ``folder`` within ``limits``, a thread a connection."""

    daemon_threads = True

    def __init__(self, folder: Path, limits: Limits, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.folder, self.limits = folder, limits
        self.lock = threading.Lock()
        self.sent: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self._random = random.Random(limits.seed)
        self._rate = float("inf") if limits.rate is None else bytes_per_second(limits.rate)
        self._free_at = 0.0

    def pass_link(self, earliest: float, size: int) -> float:
        """Wait until ``size`` bytes have passed the link, not before ``earliest``; return the moment."""
        with self.lock:
            self._free_at = max(self._free_at, earliest) + size / self._rate
            moment = self._free_at
        _sleep_until(moment)
        return moment

    def draws_failure(self) -> bool:
        """Return whether the next request fails, and count it."""
        with self.lock:
            fails = self._random.random() < self.limits.failures
            self.sent["failures"] += fails
        return fails

    def count(self, name: str | None, size: int) -> None:
        """Count a response with contents of a file of that name, or another one."""
        with self.lock:
            if name is None:
                self.sent["listings"] += 1
            else:
                self.sent.update(requests=1, bytes=size)
                self.reads[name] += 1


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 0
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        """Answer a request: with a file, a range of one, the listing of a folder, or the counts."""
        server = self.server
        inside = unquote(urlsplit(self.path).path).strip("/")
        if f"/{inside}" == COUNTS:
            known = {name: server.sent[name] for name in ("requests", "bytes", "listings", "failures")}
            body = json.dumps({**known, "reads": server.reads}).encode()
            self._begin(200, len(body))
            self.wfile.write(body)
            return
        begun = time.monotonic() + server.limits.latency_seconds
        _sleep_until(begun)
        fails = server.draws_failure()
        if fails and server.sent["failures"] % 2:
            self._begin(503, 0)
            return
        status, body, name = self._body(server.folder / inside, inside)
        self._begin(status, len(body))
        self._send(body[: len(body) // 2] if fails else body, begun)
        if fails:
            self.close_connection = True
        else:
            server.count(name, len(body))

    def _body(self, path: Path, inside: str) -> tuple[int, bytes, str | None]:
        """Return status and body of a response, and the name of the file, unless it is a listing."""
        lists = self.headers.get("Accept") == "listing"
        if ".." in inside.split("/") or not path.exists() or (path.is_dir() and not lists):
            return 404, b"", None
        if lists:
            return 200, json.dumps(_listing(self.server.folder, path)).encode(), None
        start, _, end = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        with path.open("rb", buffering=0) as file:
            file.seek(int(start))
            body = file.read(int(end) + 1 - int(start) if end else -1)
        return 200, body, inside

    def _begin(self, status: int, size: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(size))
        self.end_headers()

    def _send(self, body: bytes, earliest: float) -> None:
        """Send bytes, chunk by chunk at the rate of the link."""
        with suppress(OSError):  # the client has gone
            for start in range(0, len(body), CHUNK_BYTES):
                chunk = body[start : start + CHUNK_BYTES]
                earliest = self.server.pass_link(earliest, len(chunk))
                self.wfile.write(chunk)


def _listing(folder: Path, found: Path) -> list[dict[str, Any]]:
    """Return the entries of a folder, by name, or the one of a file, in the format of fsspec."""
    entries = []
    for path in sorted(found.iterdir()) if found.is_dir() else [found]:
        facts, name = path.stat(), path.relative_to(folder).as_posix()
        if path.is_dir():
            entries.append({"name": name, "size": 0, "type": "directory"})
        else:
            version = {"ETag": f"{facts.st_mtime_ns:x}-{facts.st_size:x}", "mtime": facts.st_mtime}
            entries.append({"name": name, "size": facts.st_size, "type": "file", **version})
    return entries


def _exit_when_input_ends() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description="A file server of limited rate; see Limits.")
    parser.add_argument("folder", type=Path)
    for name, default in asdict(Limits()).items():
        kind = str if default is None else type(default)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default)
    parser.add_argument("--port", type=int, default=0, help="on the loopback interface (default: a free one)")
    parser.add_argument("--until-input-ends", action="store_true", help="exit when standard input is closed")
    given = vars(parser.parse_args())
    folder, port, until_input_ends = given.pop("folder"), given.pop("port"), given.pop("until_input_ends")
    if not folder.is_dir():
        parser.error(f"folder: expected a folder, got {folder}")
    try:
        server = _Server(folder, Limits(**given), port)
    except ValueError as error:
        parser.error(str(error))
    if until_input_ends:
        threading.Thread(target=_exit_when_input_ends, daemon=True).start()
    print(f"throttled://127.0.0.1:{server.server_port}", flush=True)
    with suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
