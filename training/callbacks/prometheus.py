"""The newest numbers of a run for Prometheus, in its text format, on this machine alone."""

import re
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from training.callbacks.callback import RunView
from training.callbacks.writer import Writer

LOOPBACK = "127.0.0.1"
FORMAT = "text/plain; version=0.0.4; charset=utf-8"


class Prometheus(Writer):
    """Serves ``http://127.0.0.1:PORT/metrics`` on the machine of rank 0 while the run lasts."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._numbers: dict[str, float] = {}
        self._server: ThreadingHTTPServer | None = None

    def on_build(self, run: RunView) -> None:
        """Take the port; ``ValueError`` where another program has it."""
        if run.rank != 0:
            return
        try:
            self._server = ThreadingHTTPServer((LOOPBACK, self._port), self._handler(run.config.name))
        except OSError as error:
            expected = f"expected a free port of {LOOPBACK}"
            raise ValueError(f"metrics_port: {expected}, got {self._port}: {error.strerror}") from error

    def on_run_begin(self, run: RunView) -> None:
        """Begin to serve."""
        if self._server is not None:
            Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def write(self, numbers: Mapping[str, float], steps: int) -> None:
        """Serve these numbers from now on, and earlier ones of other names."""
        self._numbers = {**self._numbers, "steps": steps, **numbers}  # a new one: others may read the old one

    def on_run_end(self, run: RunView) -> None:
        """Free the port."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def on_error(self, run: RunView, error: BaseException) -> None:
        """Free the port."""
        self.on_run_end(run)

    def _handler(self, run_name: str) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:  # noqa: N805 - self is the callback
                is_known = handler.path == "/metrics"
                text = exposition(self._numbers, run_name) if is_known else "see /metrics\n"
                handler.send_response(200 if is_known else 404)
                handler.send_header("Content-Type", FORMAT)
                handler.end_headers()
                handler.wfile.write(text.encode())

            def log_message(handler, *_: object) -> None:  # noqa: N805
                """Print nothing."""

        return Handler


def exposition(numbers: Mapping[str, float], run_name: str) -> str:
    """Return numbers in Prometheus' text format.

    >>> print(exposition({"train/loss": 0.5, "steps": 20}, "digits"), end="")
    # TYPE cloudtrain_train_loss gauge
    cloudtrain_train_loss{run="digits"} 0.5
    # TYPE cloudtrain_steps gauge
    cloudtrain_steps{run="digits"} 20
    """
    lines = []
    for name, value in numbers.items():
        full = f"cloudtrain_{re.sub('[^a-zA-Z0-9_]', '_', name)}"
        lines += [f"# TYPE {full} gauge", f'{full}{{run="{run_name}"}} {value!r}']
    return "".join(f"{line}\n" for line in lines)
