"""Prometheus metrics of RPCs and of the event loop.

1. Labels are service, method and code, all from closed sets: a caller cannot make new time series.
2. The endpoint has a port of its own and serves nothing but metrics.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import prometheus_client

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
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"server.metrics_address = {address!r} is refused: should be 'host:port'")
    try:
        server, thread = prometheus_client.start_http_server(int(port), host.strip("[]") or "127.0.0.1")
    except OSError as error:
        raise ConfigError(
            f"server.metrics_address = {address!r} cannot be bound: {error.strerror}; choose another port"
        ) from None
    return MetricsServer(server, thread)
