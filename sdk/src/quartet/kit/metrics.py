"""Prometheus metrics of RPCs and of the event loop.

1. Labels are service, method and code, all from closed sets: a caller cannot make new time series.
2. The endpoint has a port of its own and serves nothing but metrics.
3. What a service tells of itself is read when somebody scrapes (`scraped`), in the endpoint's thread.
4. It asks nobody who he is, and so is bounded: MAX_SCRAPES connections, SILENT_SECONDS of silence on each.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import prometheus_client
from prometheus_client.registry import Collector

from quartet.config import ConfigError

STARTED: Final = prometheus_client.Counter("quartet_rpc_started", "RPCs begun.", ["service", "method"])
HANDLED: Final = prometheus_client.Counter(
    "quartet_rpc_handled", "RPCs ended.", ["service", "method", "code"]
)
IN_FLIGHT: Final = prometheus_client.Gauge("quartet_rpc_in_flight", "RPCs under way.", ["service", "method"])
SECONDS: Final = prometheus_client.Histogram(
    "quartet_rpc_seconds",
    "Time an RPC took, streams included.",
    ["service", "method"],
    buckets=(0.001, 0.005, 0.025, 0.1, 0.5, 2, 10, 60, 300, 1800),
)
LOOP_LAG: Final = prometheus_client.Gauge(
    "quartet_loop_lag_seconds", "How late the event loop last ran a timer."
)


class Observation:
    """The outcome of one RPC, filled in by whoever finds it out."""

    def __init__(self) -> None:
        """Assume success until told otherwise."""
        self.code = "OK"


@cache  # labels come from closed sets
def _series(service: str, method: str) -> tuple[Any, Any, Any]:
    """Looking labels up costs as much as counting."""
    return STARTED.labels(service, method), IN_FLIGHT.labels(service, method), SECONDS.labels(service, method)


@cache
def _handled(service: str, method: str, code: str) -> Any:
    return HANDLED.labels(service, method, code)


@contextmanager
def observe(service: str, method: str) -> Iterator[Observation]:
    """Count one RPC from here to the end of the block."""
    seen = Observation()
    started, in_flight, seconds = _series(service, method)
    started.inc()
    in_flight.inc()
    began = time.monotonic()
    try:
        yield seen
    finally:
        in_flight.dec()
        seconds.observe(time.monotonic() - began)
        _handled(service, method, seen.code).inc()


@contextmanager
def scraped(collector: Collector) -> Iterator[None]:
    """While inside, the process's endpoint tells of what this reads."""
    prometheus_client.REGISTRY.register(collector)
    try:
        yield
    finally:
        prometheus_client.REGISTRY.unregister(collector)


#: At once; each has a thread. A process has one scraper or two.
MAX_SCRAPES: Final = 32
#: Between two pieces of a request.
SILENT_SECONDS: Final = 10.0


class _Scrape(WSGIRequestHandler):
    timeout = SILENT_SECONDS

    def log_message(self, *_: Any) -> None:
        """Nothing: it is no news."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = found[0]
        self._room = threading.BoundedSemaphore(MAX_SCRAPES)
        super().__init__(found[4], _Scrape)  # type: ignore[arg-type]
        self.set_app(prometheus_client.make_wsgi_app())

    def server_bind(self) -> None:
        """Without asking for the machine's name, for which a nameserver that is away takes ten seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own, or not at all."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and make room."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: whoever asked went away, or fell silent."""


class MetricsServer:
    """The endpoint that Prometheus scrapes, in a thread of its own."""

    def __init__(self, server: Any, thread: threading.Thread) -> None:
        """Take over a running HTTP server."""
        self._server = server
        self._thread = thread
        self.port = int(server.server_port)

    def close(self) -> None:
        """Give the port back."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def start_metrics(address: str) -> MetricsServer:
    """Serve the metrics on "host:port". Raises ConfigError."""
    server = _bound(address)
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return MetricsServer(server, thread)


def check_metrics(address: str) -> None:
    """Whether `start_metrics` would; the port is let go at once. Raises ConfigError."""
    _bound(address).server_close()


def _bound(address: str) -> _Server:
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"server.metrics_address = {address!r} is refused: should be 'host:port'")
    try:
        return _Server(host.strip("[]") or "127.0.0.1", int(port))
    except OSError as error:
        raise ConfigError(
            f"server.metrics_address = {address!r} cannot be bound: {error.strerror}; choose another port"
        ) from None
    except UnicodeError as error:  # of a name with an empty label
        raise ConfigError(f"server.metrics_address = {address!r} is refused: {error}") from None
