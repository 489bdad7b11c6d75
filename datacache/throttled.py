"""Central storage that is slow on purpose: a folder behind one network link, for tests and benchmarks.

``python -m datacache.throttled FOLDER --rate 1gbit --latency-ms 2`` is an HTTP server, a process of its own,
so that its limits hold for all the ranks of a machine together: every answer waits its latency, at the same
time as others, and then goes through one link of the given rate. It prints its URL, ``throttled://…``, when
it is ready. That URL is for fsspec, which finds :class:`ThrottledFileSystem` once this module is imported::

    with serve(folder, rate="1gbit", latency_seconds=0.002) as url:
        fs, root = fsspec.url_to_fs(url)
        fs.find(root, detail=True)  # one request a folder, sizes and versions included
        fs.cat_file(root + "/a/b.jpg", start=100, end=200)
        assert counts(url).requests == 1

The same address as ``http://…`` works with whatever speaks HTTP: ranges, ``HEAD``, folders as pages of links.
fsspec's own HTTP filesystem lists such pages too, but without sizes: it would need a request for each file.
"""

import argparse
import asyncio
import html
import http.client
import json
import os
import random
import re
import selectors
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import fsspec

# What one connection sends before another has its turn: two milliseconds of the link at half a Gbit/s.
CHUNK_BYTES = 128 * 1024

COUNTS = "/-/counts"
LISTING = "application/json"


def bytes_per_second(rate: str) -> float:
    """Return a rate that is written as ``tc`` writes it, in bytes per second.

    >>> bytes_per_second("1gbit"), bytes_per_second("500mbit")
    (125000000.0, 62500000.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)bit", rate)
    if found is None or float(found[1]) == 0:
        raise ValueError(f"rate: expected a number and kbit, mbit or gbit, as in 1gbit, got {rate!r}")
    return float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]] / 8


@dataclass(frozen=True)
class Limits:
    """How slow and how bad the storage is.

    ``rate``: of the link, all clients together, as ``tc`` writes it ("1gbit"); ``None``: no limit.
    ``latency_seconds``: between a request and the first byte of its answer.
    ``failures``: share of the requests that fail, drawn with ``seed``: by turns with status 503, and by
    hanging up after half of the answer.
    ``stall_seconds``: if not 0, requests that fail do so by a pause of so long after half of the answer;
    who is patient gets the other half then.
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
    """What a server has done so far; what failed counts only as such.

    ``requests`` and ``bytes``: answers with the contents of files. ``listings``: all other answers.
    ``reads``: file, relative to the folder, to how often it or a range of it was sent.
    """

    requests: int = 0
    bytes: int = 0
    listings: int = 0
    failures: int = 0
    reads: dict[str, int] = field(default_factory=dict)


def counts(url: str) -> Counts:
    """Return what the server at this URL has done so far; costs no latency, and is not counted itself."""
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

    The server ends with the block, and also when this process dies before: it watches its standard input.
    """
    limits = Limits(rate, latency_seconds, failures, seed, stall_seconds)
    command = [sys.executable, "-m", "datacache.throttled", os.fspath(folder), "--until-input-ends"]
    command += ["--latency-ms", repr(limits.latency_seconds * 1e3)]
    command += ["--failures", repr(limits.failures), "--seed", repr(limits.seed)]
    command += ["--stall-seconds", repr(limits.stall_seconds)]
    if limits.rate is not None:
        command += ["--rate", limits.rate]
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
        server.kill()  # it keeps nothing that would have to be put in order
        server.communicate()


class ThrottledFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """The client of that server: lists folders and reads files, from any number of threads.

    Each thread keeps a connection of its own. An answer that is cut short, refused, or does not go on for
    ``timeout_seconds`` is an ``OSError``; nothing is asked twice here, that is for the caller to do.
    """

    protocol = "throttled"
    cachable = True

    def __init__(self, timeout_seconds: float = 60.0, **options: Any) -> None:
        super().__init__(timeout_seconds=timeout_seconds, **options)
        self._timeout_seconds = timeout_seconds
        self._own = threading.local()

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """Return what lies in a folder by one request; a file is listed alone."""
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
        """Return the bytes of a file from ``start`` to before ``end``, fewer where the file ends before."""
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
        """Return the body of one answer; after any error the connection is given up."""
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
        """Return this thread's connection; a process that was forked from another makes its own."""
        kept: dict[tuple[int, str], http.client.HTTPConnection] = self._own.__dict__.setdefault("kept", {})
        key = (os.getpid(), host)
        if key not in kept:
            kept[key] = http.client.HTTPConnection(host, timeout=self._timeout_seconds)
        return kept[key]


class _Link:
    """A link that passes ``rate`` bytes per second on, one chunk after the other."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = 0.0

    def book(self, earliest: float, size: int) -> float:
        """Return when ``size`` bytes are through that come in at ``earliest``; times in seconds.

        >>> link = _Link(100)
        >>> link.book(1.0, 50), link.book(1.0, 50), link.book(3.0, 50)
        (1.5, 2.0, 3.5)
        """
        self._free_at = max(self._free_at, earliest) + size / self._rate
        return self._free_at


@dataclass(frozen=True)
class _Request:
    method: str
    path: str
    headers: dict[str, str]


@dataclass(frozen=True)
class _Answer:
    """What is sent: ``size`` bytes from ``start`` of ``file``, or of ``body`` where there is no file."""

    status: str
    headers: dict[str, str]
    body: bytes = b""
    file: Path | None = None
    start: int = 0
    size: int = 0

    def head(self) -> bytes:
        lines = [f"HTTP/1.1 {self.status}", *(f"{name}: {value}" for name, value in self.headers.items())]
        return "\r\n".join([*lines, "", ""]).encode()

    def bytes(self, start: int, size: int) -> bytes:
        if self.file is None:
            return self.body[start : start + size]
        with self.file.open("rb", buffering=0) as contents:
            contents.seek(self.start + start)
            return contents.read(size)


class _Server:
    """Answers requests for the files of ``folder`` within ``limits``."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self._folder = folder
        self._limits = limits
        self._link = _Link(float("inf") if limits.rate is None else bytes_per_second(limits.rate))
        self._random = random.Random(limits.seed)
        self._sent: Counter[str] = Counter()
        self._reads: Counter[str] = Counter()

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one client's requests, one after the other, until it hangs up or one is cut short."""
        with suppress(OSError, asyncio.IncompleteReadError):
            while await self._answer(await _next_request(reader), writer):
                pass
        writer.close()

    async def _answer(self, request: _Request, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return whether the connection goes on."""
        if request.path == COUNTS:
            known = {name: self._sent[name] for name in ("requests", "bytes", "listings", "failures")}
            answer = _text(json.dumps({**known, "reads": self._reads}), LISTING)
            writer.write(answer.head() + answer.body)
            return True
        begun = time.monotonic() + self._limits.latency_seconds
        await _sleep_until(begun)
        if self._random.random() < self._limits.failures:
            return await self._fail(request, writer, begun)
        answer = _answer_to(self._folder, request)
        writer.write(answer.head())
        await self._send(answer, writer, begun, 0, answer.size)
        self._count(answer)
        return True

    async def _fail(self, request: _Request, writer: asyncio.StreamWriter, begun: float) -> bool:
        """Refuse, hang up half way or stall half way; return whether the connection goes on."""
        self._sent["failures"] += 1
        stalls = self._limits.stall_seconds > 0
        if not stalls and self._sent["failures"] % 2:
            writer.write(_text("", "text/plain", status="503 Service Unavailable").head())
            return True
        answer = _answer_to(self._folder, request)
        writer.write(answer.head())
        await self._send(answer, writer, begun, 0, answer.size // 2)
        if not stalls:
            return False
        await asyncio.sleep(self._limits.stall_seconds)
        await self._send(answer, writer, time.monotonic(), answer.size // 2, answer.size)
        return True

    async def _send(
        self, answer: _Answer, writer: asyncio.StreamWriter, earliest: float, begin: int, end: int
    ) -> None:
        """Send the bytes ``begin`` to ``end`` of an answer, chunk by chunk as the link lets them through."""
        for start in range(begin, end, CHUNK_BYTES):
            chunk = answer.bytes(start, min(CHUNK_BYTES, end - start))
            earliest = self._link.book(earliest, len(chunk))
            await _sleep_until(earliest)
            writer.write(chunk)
            await writer.drain()

    def _count(self, answer: _Answer) -> None:
        if answer.file is None:
            self._sent["listings"] += 1
            return
        self._sent["requests"] += 1
        self._sent["bytes"] += answer.size
        self._reads[answer.file.relative_to(self._folder).as_posix()] += 1


async def _next_request(reader: asyncio.StreamReader) -> _Request:
    """Return the next request of a connection; its end is an ``IncompleteReadError``."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip().split("\r\n")
    method, target, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return _Request(method, unquote(urlsplit(target).path), headers)


async def _sleep_until(moment: float) -> None:
    """Sleep until ``time.monotonic()`` says ``moment``; not at all if it has passed."""
    seconds = moment - time.monotonic()
    if seconds > 0:
        await asyncio.sleep(seconds)


def _answer_to(folder: Path, request: _Request) -> _Answer:
    """Return the answer to a request; to ``HEAD``, what ``GET`` would be told, without the contents."""
    if request.method == "GET":
        return _contents(folder, request)
    if request.method == "HEAD":
        return replace(_contents(folder, request), body=b"", file=None, size=0)
    return _text("", "text/plain", status="405 Method Not Allowed")


def _contents(folder: Path, request: _Request) -> _Answer:
    """Return a file, a range of one, or what lies in a folder."""
    inside = request.path.strip("/")
    place = folder / inside
    if ".." in inside.split("/") or not place.exists():
        return _text("", "text/plain", status="404 Not Found")
    if request.headers.get("accept") == LISTING:
        return _text(json.dumps(_listing(folder, place)), LISTING)
    if place.is_dir():
        return _text(_page(_listing(folder, place)), "text/html; charset=utf-8")
    return _file(place, request.headers.get("range"))


def _text(text: str, kind: str, status: str = "200 OK") -> _Answer:
    body = text.encode()
    headers = {"Content-Type": kind, "Content-Length": str(len(body))}
    return _Answer(status, headers, body, size=len(body))


def _file(path: Path, wanted: str | None) -> _Answer:
    """Return a file, or the range ``wanted``, as in "bytes=100-199" or "bytes=100-"."""
    facts = path.stat()
    headers = {
        "Content-Type": "application/octet-stream",
        "Accept-Ranges": "bytes",
        "ETag": f'"{_version(facts)}"',
    }
    start, end, status = 0, facts.st_size, "200 OK"
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted or "")
    if found:
        start = int(found[1])
        end = min(end, int(found[2]) + 1) if found[2] else end
        if start >= end:
            headers |= {"Content-Range": f"bytes */{facts.st_size}", "Content-Length": "0"}
            return _Answer("416 Range Not Satisfiable", headers)
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{facts.st_size}"
        status = "206 Partial Content"
    headers["Content-Length"] = str(end - start)
    return _Answer(status, headers, file=path, start=start, size=end - start)


def _version(facts: os.stat_result) -> str:
    return f"{facts.st_mtime_ns:x}-{facts.st_size:x}"


def _listing(folder: Path, place: Path) -> list[dict[str, Any]]:
    """Return the entries of a folder, by name, as fsspec wants them; a file is listed alone."""
    entries = []
    for path in sorted(place.iterdir()) if place.is_dir() else [place]:
        facts = path.stat()
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            entries.append({"name": name, "size": 0, "type": "directory"})
        else:
            version = {"ETag": _version(facts), "mtime": facts.st_mtime}
            entries.append({"name": name, "size": facts.st_size, "type": "file", **version})
    return entries


def _page(entries: list[dict[str, Any]]) -> str:
    """Return a folder as a page of links, those to folders with a slash at the end."""
    names = [entry["name"].rpartition("/")[2] + "/" * (entry["type"] == "directory") for entry in entries]
    links = [f'<li><a href="{quote(name)}">{html.escape(name)}</a>' for name in names]
    return "\n".join(["<!doctype html>", "<ul>", *links, "</ul>", ""])


async def _run(folder: Path, limits: Limits, port: int, until_input_ends: bool) -> None:
    """Serve until the process is ended."""
    server = await asyncio.start_server(_Server(folder, limits).talk, "127.0.0.1", port)
    if until_input_ends:
        # A thread, because an event loop cannot wait for every kind of standard input.
        threading.Thread(target=_exit_when_input_ends, daemon=True).start()
    print(f"throttled://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def _exit_when_input_ends() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(prog="python -m datacache.throttled", description="A slow file server.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rate", help="of all clients together, as tc writes it: 1gbit (default: no limit)")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="before each answer (default 0)")
    parser.add_argument("--failures", type=float, default=0.0, help="share of requests that fail (default 0)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default 0)")
    parser.add_argument("--stall-seconds", type=float, default=0.0, help="failures are pauses of so long")
    parser.add_argument("--port", type=int, default=0, help="on the loopback interface (default: a free one)")
    parser.add_argument("--until-input-ends", action="store_true", help="exit when standard input is closed")
    args = parser.parse_args()
    if not args.folder.is_dir():
        parser.error(f"folder: expected a folder, got {args.folder}")
    try:
        limits = Limits(args.rate, args.latency_ms / 1e3, args.failures, args.seed, args.stall_seconds)
    except ValueError as error:
        parser.error(str(error))
    # select() sleeps to the microsecond; epoll, the default, rounds every wait up to whole milliseconds
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    with suppress(KeyboardInterrupt):
        loop.run_until_complete(_run(args.folder, limits, args.port, args.until_input_ends))


fsspec.register_implementation("throttled", "datacache.throttled.ThrottledFileSystem")

if __name__ == "__main__":
    main()
