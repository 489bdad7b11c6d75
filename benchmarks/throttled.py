"""Throttled central storage: a folder behind one slow link, for tests and benchmarks.

Each request waits for the latency, in parallel with others; contents of files then pass the link, which all
threads and processes of this machine share::

    with serve(folder, gbit=1, latency_seconds=0.002) as url:
        fs, root = fsspec.url_to_fs(url)
        fs.cat_file(root + "/a/b.jpg", start=100, end=200)
        assert requests(url) == 1

The link is a file that holds the time at which the link is next free, locked while it is changed. So there
is no server process that could be the bottleneck.
"""

import fcntl
import math
import os
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

# Sent by one request before another may send: two milliseconds of the link at half a Gbit/s.
CHUNK_BYTES = 128 * 1024
# The moment from which on the link is free, requests of contents so far, bytes a second, seconds of latency.
LINK = struct.Struct("dqdd")


@contextmanager
def serve(
    folder: str | os.PathLike[str], *, gbit: float | None = None, latency_seconds: float = 0.0
) -> Iterator[str]:
    """Yield the URL of a folder behind a link, of so many Gbit/s for all clients together."""
    with tempfile.TemporaryDirectory(prefix="throttled-") as name:
        state = Path(name)
        bytes_per_second = math.inf if gbit is None else gbit * 1e9 / 8
        (state / "link").write_bytes(LINK.pack(0.0, 0, bytes_per_second, latency_seconds))
        (state / "behind-the-link").symlink_to(Path(folder).resolve())
        yield f"throttled://{state / 'behind-the-link'}"


def requests(url: str) -> int:
    """Return how often a file, or a range of one, was requested from the storage at this URL."""
    return LINK.unpack((_state(url) / "link").read_bytes())[1]


def _state(path: str) -> Path:
    return Path(path.removeprefix("throttled://").partition("/behind-the-link")[0])


class ThrottledFileSystem(LocalFileSystem):
    """Lists folders and reads files of a throttled storage, in any number of threads and processes."""

    protocol = "throttled"

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        """Return the entries of a folder, or the one of a file, by one request."""
        self._wait(path)
        return super().ls(path, detail, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """Return the bytes of a file from ``start`` to before ``end``, fewer if the file is shorter."""
        self._wait(path)
        body = super().cat_file(path, start, end, **options)
        with self._link(path) as link:
            link[1] += 1
            bytes_per_second = link[2]
        if bytes_per_second < math.inf:
            self._pass_link(path, len(body), bytes_per_second)
        return body

    def _wait(self, path: str) -> None:
        """Wait for the latency."""
        time.sleep(LINK.unpack((_state(path) / "link").read_bytes())[3])

    def _pass_link(self, path: str, size: int, rate: float) -> None:
        """Wait until so many bytes have passed the link, chunk by chunk."""
        earliest = time.monotonic()
        for start in range(0, size, CHUNK_BYTES):
            with self._link(path) as link:
                link[0] = max(link[0], earliest) + min(CHUNK_BYTES, size - start) / rate
                earliest = link[0]
            time.sleep(max(0.0, earliest - time.monotonic()))

    @contextmanager
    def _link(self, path: str) -> Iterator[list[Any]]:
        """Let one thread of one process at a time change the state of the link."""
        with (_state(path) / "link").open("r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            link = list(LINK.unpack(file.read(LINK.size)))
            yield link
            os.pwrite(file.fileno(), LINK.pack(*link), 0)


fsspec.register_implementation("throttled", "benchmarks.throttled.ThrottledFileSystem")
