"""The throttled server: ``python -m benchmarks.throttled_server FOLDER --rate 1gbit``.

See :mod:`benchmarks.throttled`, which starts it as a process. It prints its URL when it is ready.
"""

import argparse
import asyncio
import html
import json
import os
import random
import re
import selectors
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from benchmarks.throttled import COUNTS, LISTING, Limits, bytes_per_second

# Sent by one connection before another may send: two milliseconds of the link at half a Gbit/s.
CHUNK_BYTES = 128 * 1024


class _Link:
    """A link of ``rate`` bytes per second that sends one chunk after the other."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = 0.0

    def book(self, earliest: float, size: int) -> float:
        """Return when ``size`` bytes that arrive at ``earliest`` have been sent; times in seconds.

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
class _Response:
    """A response: ``size`` bytes from ``start`` of ``file``, or of ``body`` if there is no file."""

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

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one client's requests until it closes the connection or a response is cut short."""
        with suppress(OSError, asyncio.IncompleteReadError):
            while await self._answer(await _next_request(reader), writer):
                pass
        writer.close()

    async def _answer(self, request: _Request, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return whether the connection stays open."""
        if request.path == COUNTS:
            known = {name: self._sent[name] for name in ("requests", "bytes", "listings", "failures")}
            answer = _text(json.dumps({**known, "reads": self._reads}), LISTING)
            writer.write(answer.head() + answer.body)
            return True
        begun = time.monotonic() + self._limits.latency_seconds
        await _sleep_until(begun)
        if self._random.random() < self._limits.failures:
            return await self._fail(request, writer, begun)
        answer = _response_to(self._folder, request)
        writer.write(answer.head())
        await self._send(answer, writer, begun, 0, answer.size)
        self._count(answer)
        return True

    async def _fail(self, request: _Request, writer: asyncio.StreamWriter, begun: float) -> bool:
        """Refuse, or close or stall half way; return whether the connection stays open."""
        self._sent["failures"] += 1
        stalls = self._limits.stall_seconds > 0
        if not stalls and self._sent["failures"] % 2:
            writer.write(_text("", "text/plain", status="503 Service Unavailable").head())
            return True
        answer = _response_to(self._folder, request)
        writer.write(answer.head())
        await self._send(answer, writer, begun, 0, answer.size // 2)
        if not stalls:
            return False
        await asyncio.sleep(self._limits.stall_seconds)
        await self._send(answer, writer, time.monotonic(), answer.size // 2, answer.size)
        return True

    async def _send(
        self, answer: _Response, writer: asyncio.StreamWriter, earliest: float, begin: int, end: int
    ) -> None:
        """Send the bytes ``begin`` to ``end`` of a response, chunk by chunk at the rate of the link."""
        for start in range(begin, end, CHUNK_BYTES):
            chunk = answer.bytes(start, min(CHUNK_BYTES, end - start))
            earliest = self._link.book(earliest, len(chunk))
            await _sleep_until(earliest)
            writer.write(chunk)
            await writer.drain()

    def _count(self, answer: _Response) -> None:
        if answer.file is None:
            self._sent["listings"] += 1
            return
        self._sent["requests"] += 1
        self._sent["bytes"] += answer.size
        self._reads[answer.file.relative_to(self._folder).as_posix()] += 1


async def _next_request(reader: asyncio.StreamReader) -> _Request:
    """Return the next request of a connection; ``IncompleteReadError`` at its end."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip().split("\r\n")
    method, target, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return _Request(method, unquote(urlsplit(target).path), headers)


async def _sleep_until(moment: float) -> None:
    """Sleep until ``time.monotonic()`` is at least ``moment``."""
    seconds = moment - time.monotonic()
    if seconds > 0:
        await asyncio.sleep(seconds)


def _response_to(folder: Path, request: _Request) -> _Response:
    """Return the response to a request; to ``HEAD``, that of ``GET`` without the contents."""
    if request.method == "GET":
        return _contents(folder, request)
    if request.method == "HEAD":
        return replace(_contents(folder, request), body=b"", file=None, size=0)
    return _text("", "text/plain", status="405 Method Not Allowed")


def _contents(folder: Path, request: _Request) -> _Response:
    """Return a file, a range of one, or the listing of a folder."""
    inside = request.path.strip("/")
    path = folder / inside
    if ".." in inside.split("/") or not path.exists():
        return _text("", "text/plain", status="404 Not Found")
    if request.headers.get("accept") == LISTING:
        return _text(json.dumps(_listing(folder, path)), LISTING)
    if path.is_dir():
        return _text(_page(_listing(folder, path)), "text/html; charset=utf-8")
    return _file(path, request.headers.get("range"))


def _text(text: str, kind: str, status: str = "200 OK") -> _Response:
    body = text.encode()
    headers = {"Content-Type": kind, "Content-Length": str(len(body))}
    return _Response(status, headers, body, size=len(body))


def _file(path: Path, wanted: str | None) -> _Response:
    """Return a file, or the range ``wanted``, as in "bytes=100-199" or "bytes=100-"."""
    facts = path.stat()
    tag = f'"{_version(facts)}"'
    headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", "ETag": tag}
    start, end, status = 0, facts.st_size, "200 OK"
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted or "")
    if found:
        start = int(found[1])
        end = min(end, int(found[2]) + 1) if found[2] else end
        if start >= end:
            headers |= {"Content-Range": f"bytes */{facts.st_size}", "Content-Length": "0"}
            return _Response("416 Range Not Satisfiable", headers)
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{facts.st_size}"
        status = "206 Partial Content"
    headers["Content-Length"] = str(end - start)
    return _Response(status, headers, file=path, start=start, size=end - start)


def _version(facts: os.stat_result) -> str:
    return f"{facts.st_mtime_ns:x}-{facts.st_size:x}"


def _listing(folder: Path, found: Path) -> list[dict[str, Any]]:
    """Return the entries of a folder, by name, or the one of a file, in the format of fsspec."""
    entries = []
    for path in sorted(found.iterdir()) if found.is_dir() else [found]:
        facts = path.stat()
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            entries.append({"name": name, "size": 0, "type": "directory"})
        else:
            version = {"ETag": _version(facts), "mtime": facts.st_mtime}
            entries.append({"name": name, "size": facts.st_size, "type": "file", **version})
    return entries


def _page(entries: list[dict[str, Any]]) -> str:
    """Return a folder as a page of links; links to folders end with a slash."""
    names = [entry["name"].rpartition("/")[2] + "/" * (entry["type"] == "directory") for entry in entries]
    links = [f'<li><a href="{quote(name)}">{html.escape(name)}</a>' for name in names]
    return "\n".join(["<!doctype html>", "<ul>", *links, "</ul>", ""])


async def _run(folder: Path, limits: Limits, port: int, until_input_ends: bool) -> None:
    """Serve until the process is ended."""
    server = await asyncio.start_server(_Server(folder, limits).serve, "127.0.0.1", port)
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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throttled_server", description="A file server of limited rate."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rate", help="of all clients together, such as 1gbit (default: no limit)")
    parser.add_argument("--latency-seconds", type=float, default=0.0, help="before each response (default 0)")
    parser.add_argument("--failures", type=float, default=0.0, help="share of requests that fail (default 0)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests that fail (default 0)")
    parser.add_argument("--stall-seconds", type=float, default=0.0, help="of a pause instead of a failure")
    parser.add_argument("--port", type=int, default=0, help="on the loopback interface (default: a free one)")
    parser.add_argument("--until-input-ends", action="store_true", help="exit when standard input is closed")
    args = parser.parse_args()
    if not args.folder.is_dir():
        parser.error(f"folder: expected a folder, got {args.folder}")
    try:
        limits = Limits(args.rate, args.latency_seconds, args.failures, args.seed, args.stall_seconds)
    except ValueError as error:
        parser.error(str(error))
    # select() sleeps to the microsecond; epoll, the default, rounds every wait up to whole milliseconds
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    with suppress(KeyboardInterrupt):
        loop.run_until_complete(_run(args.folder, limits, args.port, args.until_input_ends))


if __name__ == "__main__":
    main()
