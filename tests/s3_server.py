"""A storage that speaks S3: moto on the loopback interface, with faults that tests ask for.

It can be told to answer a share of all requests by 503, or every one by 403.
"""

import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

from moto.s3.models import s3_backends
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

BUCKET = "bucket"
ACCOUNT = "123456789012"  # moto's


class Server:
    """``failing_share`` of requests are answered by 503; with ``refuses`` each one by 403.

    ``parts``: of large objects, the upload and the number of each that was sent.
    """

    def __init__(self) -> None:
        self.failing_share = 0.0
        self.refuses = False
        self.parts: set[tuple[str, str]] = set()
        self._chance = random.Random(1)
        self._application = DomainDispatcherApplication(create_backend_app)
        self._backend = s3_backends[ACCOUNT]["aws"]
        self._backend.reset()
        self._backend.create_bucket(BUCKET, "us-east-1")
        self.server = make_server("127.0.0.1", 0, self.answer, threaded=True)

    @property
    def objects(self) -> set[str]:
        """The keys of all objects."""
        return set(self._backend.buckets[BUCKET].keys)

    @property
    def storage(self) -> dict[str, Any]:
        """The keywords of a Storage that has its objects behind ``s3://bucket``."""
        options = {"key": "a", "secret": "b", "endpoint_url": f"http://127.0.0.1:{self.server.port}"}
        return {"options": {**options, "skip_instance_cache": True}, "first_wait_seconds": 0.001}

    def answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request, as moto does unless it is to fail."""
        if self.refuses:
            return _error(start_response, "403 Forbidden", "AccessDenied")
        if self._chance.random() < self.failing_share:
            return _error(start_response, "503 Slow Down", "SlowDown")
        query = parse_qs(environ["QUERY_STRING"])
        if "partNumber" in query:
            self.parts.add((query["uploadId"][0], query["partNumber"][0]))
        answered: Iterable[bytes] = self._application(environ, start_response)
        return answered


def _error(start_response: Callable[..., Any], status: str, code: str) -> list[bytes]:
    start_response(status, [("Content-Type", "application/xml")])
    return [f"<Error><Code>{escape(code)}</Code><Message>{escape(code)}</Message></Error>".encode()]


@contextmanager
def s3_server() -> Iterator[Server]:
    """Run one in a thread for the block."""
    served = Server()
    thread = threading.Thread(target=served.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        served.server.shutdown()
        thread.join()
