"""A collector of OpenTelemetry's in the test: OTLP over HTTP, kept in memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

KINDS = {1: "INTERNAL", 2: "SERVER", 3: "CLIENT"}
STATUSES = {0: "", 1: "OK", 2: "ERROR"}
WAIT_SECONDS = 30


@dataclass(frozen=True)
class Collected:
    """A span as it arrived."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: str
    service: str
    status: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any] = field(compare=False)
    resource: dict[str, Any] = field(compare=False)
    events: tuple[str, ...] = ()
    links: tuple[str, ...] = ()

    @property
    def said(self) -> str:
        return f"{self.service} {self.kind} {self.name}"


class Collector(ThreadingHTTPServer):
    """Takes spans; `delay_s` before each answer."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Exports)
        self.spans: list[Collected] = []
        self.delay_s = 0.0

    @property
    def variables(self) -> dict[str, str]:
        """What makes a process export to it, soon."""
        url = f"http://127.0.0.1:{self.server_address[1]}"
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "100", "NO_PROXY": "127.0.0.1"}

    def named(self, name: str, kind: str = "") -> list[Collected]:
        return [one for one in list(self.spans) if one.name == name and kind in ("", one.kind)]

    def wait(self, enough: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + WAIT_SECONDS
        while not (found := enough()):
            assert time.monotonic() < deadline, sorted(one.said for one in self.spans)
            time.sleep(0.02)
        return found

    def parent(self, span: Collected) -> Collected | None:
        return next((one for one in self.spans if one.span_id == span.parent_id), None)

    def above(self, span: Collected) -> list[str]:
        """What it is below, from its parent to the root."""
        found, at = [], self.parent(span)
        while at is not None:
            found.append(at.said)
            at = self.parent(at)
        return found

    def tree(self, root: Collected, depth: int = 0) -> Iterator[str]:
        """For a person: what is below it, when it began after it and how long it took."""
        below: Sequence[Collected] = sorted(
            (one for one in self.spans if one.parent_id == root.span_id), key=lambda one: one.start_ns
        )
        took_ms = (root.end_ns - root.start_ns) / 1e6
        own = {name: value for name, value in root.attributes.items() if name.startswith("quartet.")}
        own.pop("quartet.request_id", None)
        told = " ".join(f"{name.removeprefix('quartet.')}={value}" for name, value in own.items())
        events = f" events={','.join(root.events)}" if root.events else ""
        links = f" links={len(root.links)}" if root.links else ""
        yield f"{'  ' * depth}{root.said}  {took_ms:.1f} ms  {root.status} {told}{events}{links}".rstrip()
        for one in below:
            yield from self.tree(one, depth + 1)


class _Exports(BaseHTTPRequestHandler):
    server: Collector
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(self.server.delay_s)
        assert self.path == "/v1/traces"
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _values(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                self.server.spans += [_collected(one, resource) for one in of_scope.spans]
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: Any) -> None:
        """Nothing."""


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that runs."""
    collector = Collector()
    thread = threading.Thread(target=collector.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        collector.shutdown()
        thread.join()
        collector.server_close()


@contextmanager
def collecting_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector that this process and its children are told of."""
    with collecting() as collector:
        only_variables(monkeypatch, collector.variables)
        yield collector


def only_variables(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    """Set these, and of OpenTelemetry's no others."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def _collected(span: Any, resource: dict[str, Any]) -> Collected:
    return Collected(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        kind=KINDS[span.kind],
        service=resource["service.name"],
        status=STATUSES[span.status.code],
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        resource=resource,
        events=tuple(event.name for event in span.events),
        links=tuple(link.span_id.hex() for link in span.links),
    )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
