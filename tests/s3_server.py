"""A storage that speaks as much of S3's protocol as s3fs does: objects in memory, on the loopback interface.

Signatures are not checked. It can be told to answer a share of all requests by 503, or every one by 403.
"""

import hashlib
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bucket"
PARTIAL = re.compile(r"bytes=(\d+)-(\d*)")


class Server(ThreadingHTTPServer):
    """Holds ``objects`` by key, and ``requests`` as (method, key)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.requests: list[tuple[str, str]] = []
        self.failing_share = 0.0
        self.refuses = False
        self.lock = threading.Lock()
        self.chance = random.Random(1)

    @property
    def storage(self) -> dict[str, Any]:
        """The keywords of a Storage that has its objects behind ``s3://bucket``."""
        options = {"key": "a", "secret": "b", "endpoint_url": f"http://127.0.0.1:{self.server_port}"}
        return {"options": {**options, "skip_instance_cache": True}, "first_wait_seconds": 0.001}


class Handler(BaseHTTPRequestHandler):
    """Answers one request after the other of a connection."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        _, _, key = unquote(url.path).lstrip("/").partition("/")
        body = self._body()
        server = self.server
        with server.lock:
            server.requests.append((self.command, key))
            if server.refuses:
                return self._send(403, _error("AccessDenied"))
            if server.chance.random() < server.failing_share:
                return self._send(503, _error("SlowDown"))
            return getattr(self, f"_{self.command.lower()}")(key, query, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
            return body
        content = b""
        while True:
            head, _, body = body.partition(b"\r\n")
            size = int(head.partition(b";")[0], 16)
            if size == 0:
                return content
            content, body = content + body[:size], body[size + 2 :]

    def _get(self, key: str, query: dict[str, str], _: bytes) -> None:
        if not key:
            return self._list(query)
        if key not in self.server.objects:
            return self._send(404, _error("NoSuchKey"))
        content = self.server.objects[key]
        if not (part := PARTIAL.fullmatch(self.headers.get("Range", ""))):
            return self._send(200, content, ETag=_tag(content))
        start, end = int(part[1]), int(part[2] or len(content))
        content = content[start : end + 1]
        where = f"bytes {start}-{start + len(content) - 1}/{len(self.server.objects[key])}"
        return self._send(206, content, ETag=_tag(content), Content_Range=where)

    def _head(self, key: str, query: dict[str, str], _: bytes) -> None:
        content = self.server.objects.get(key)
        if content is None:
            return self._send(404, b"")
        return self._send(200, content, ETag=_tag(content), Last_Modified="Sun, 22 Nov 2026 00:00:00 GMT")

    def _list(self, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        items, folders = [], []
        for key, content in sorted(self.server.objects.items()):
            if not key.startswith(prefix):
                continue
            inner = key[len(prefix) :]
            if delimiter and delimiter in inner:
                folder = prefix + inner.partition(delimiter)[0] + delimiter
                folders += [folder] if folder not in folders else []
                continue
            items.append(
                f"<Contents><Key>{quote(key)}</Key><LastModified>2026-11-22T00:00:00.000Z</LastModified>"
                f"<ETag>{escape(_tag(content))}</ETag><Size>{len(content)}</Size></Contents>"
            )
        common = [f"<CommonPrefixes><Prefix>{quote(each)}</Prefix></CommonPrefixes>" for each in folders]
        facts = f"<Name>{BUCKET}</Name><IsTruncated>false</IsTruncated><EncodingType>url</EncodingType>"
        count = f"<KeyCount>{len(items) + len(folders)}</KeyCount>"
        self._send(
            200, f"<ListBucketResult>{facts}{count}{''.join(items + common)}</ListBucketResult>".encode()
        )

    def _put(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "uploadId" in query:
            self.server.uploads[query["uploadId"]][int(query["partNumber"])] = body
        else:
            self.server.objects[key] = body
        self._send(200, b"", ETag=_tag(body))

    def _post(self, key: str, query: dict[str, str], body: bytes) -> None:
        if "uploads" in query:
            identity = f"upload-{len(self.server.uploads)}"
            self.server.uploads[identity] = {}
            return self._send(
                200,
                f"<InitiateMultipartUploadResult><Bucket>{BUCKET}</Bucket><Key>{escape(key)}</Key>"
                f"<UploadId>{identity}</UploadId></InitiateMultipartUploadResult>".encode(),
            )
        parts = self.server.uploads[query["uploadId"]]
        content = self.server.objects[key] = b"".join(parts[number] for number in sorted(parts))
        tag = f"<ETag>{escape(_tag(content))}</ETag>"
        return self._send(
            200, f"<CompleteMultipartUploadResult>{tag}</CompleteMultipartUploadResult>".encode()
        )

    def _delete(self, key: str, query: dict[str, str], _: bytes) -> None:
        self.server.objects.pop(key, None)
        self._send(204, b"")

    def _send(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _tag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'  # noqa: S324


def _error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


@contextmanager
def s3_server() -> Iterator[Server]:
    """Run one in a thread for the block."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
