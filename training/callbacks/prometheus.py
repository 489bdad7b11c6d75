"""The newest numbers of a run for Prometheus, served on this machine alone."""

import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from training.callbacks.callback import RunView
from training.callbacks.writers import Writer
from training.run_folder import RunFolder

LOOPBACK = "127.0.0.1"


class Prometheus(Writer):
    """Serves ``http://127.0.0.1:PORT/metrics`` on the machine of rank 0 while the run lasts."""

    def __init__(self, port: int) -> None:
        self._port, self._registry = port, CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}

    def on_build(self, run: RunView) -> None:
        if run.rank == 0:
            with self._port_errors(), socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
                probe.bind((LOOPBACK, self._port))

    def open(self, run: RunView, folder: RunFolder) -> None:
        self._run_name = run.config.name
        with self._port_errors():
            self._served = start_http_server(self._port, addr=LOOPBACK, registry=self._registry)

    def write(self, numbers: Mapping[str, float], steps: int) -> None:
        """Serve these numbers from now on, and the latest of other names."""
        for name, value in {"steps": steps, **numbers}.items():
            full = f"cloudtrain_{re.sub('[^a-zA-Z0-9_]', '_', name)}"
            if full not in self._gauges:
                self._gauges[full] = Gauge(full, name, ["run"], registry=self._registry)
            self._gauges[full].labels(self._run_name).set(value)

    def close(self, *, has_failed: bool) -> None:
        server, thread = self._served
        server.shutdown()
        server.server_close()
        thread.join()

    @contextmanager
    def _port_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            expected = f"expected a free port of {LOOPBACK}"
            raise ValueError(f"metrics_port: {expected}, got {self._port}: {error.strerror}") from error
