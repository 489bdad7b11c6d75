"""Server of slow central storage: ``python -m datacache.testing.throttled_server FOLDER --rate 1gbit``.

A process of its own, see :mod:`datacache.testing.throttled`. It prints its URL when it is ready.
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

from datacache.testing.throttled import COUNTS, LISTING, Limits, bytes_per_second

# What one connection sends before another has its turn: two milliseconds of the link at half a Gbit/s.
CHUNK_BYTES = 128 * 1024


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
    parser = argparse.ArgumentParser(
        prog="python -m datacache.testing.throttled_server", description="A slow file server."
    )
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


if __name__ == "__main__":
    main()
