"""Spans by OpenTelemetry's SDK, over OTLP/HTTP. Imported by tracing.py, and only where traces are on.

1. A span that ends goes into a queue of OTEL_BSP_MAX_QUEUE_SIZE and is sent by a thread of its own. A
   collector that is away or slow costs dropped spans, and a line of the log a minute.
2. Attributes are ids, names, numbers and codes, and why something failed, of MAX_TEXT_CHARS at most; never
   what a prompt or a rollout says. Nor does a line of the log have a key of the collector.
3. RPCs and requests are named by OpenTelemetry's conventions for gRPC and HTTP; what is ours is
   "quartet.NAME".
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from quartet.config import ConfigError
from quartet.kit.build import release_of
from quartet.kit.context import REQUEST_ID_KEY
from quartet.kit.metrics import Observation
from quartet.kit.own_log import get_logger
from quartet.kit.repeated import Repeated

T = TypeVar("T")
Attributes = Mapping[str, str | int | float | bool]
Pairs = tuple[tuple[str, Any], ...]

NANOSECONDS: Final = 1_000_000_000
#: Of an attribute: a caller may send an id as long as a message, and thousands of spans wait in the queue.
MAX_TEXT_CHARS: Final = 1024
#: What a server that answers so did wrong itself; the other codes are its caller's matter.
SERVER_FAULTS: Final = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)
#: The same of HTTP: from here on.
FIRST_HTTP_FAULT: Final = 500
#: Who tells of a header that it cannot read, with the key that is in it.
OF_HEADERS: Final = "opentelemetry.util.re"
UNREAD: Final = "a header of OTEL_EXPORTER_OTLP_HEADERS cannot be read, and is left out: write name=value"
_NOWHERE: Final = otel_context.Context()
#: Which run the work is of, in a context.
_RUN: Final = otel_context.create_key("quartet.run_id")

log = get_logger()


class Spans:
    """What this process exports."""

    def __init__(self, service: str) -> None:
        """Begin a thread that exports. Raises ConfigError."""
        _tell_seldom()
        named: dict[str, str | int] = {"service.name": service, "service.version": release_of("quartet")}
        named["process.pid"] = os.getpid()
        # What the variables say of it goes before that.
        resource = Resource.create({**named}).merge(OTELResourceDetector().detect())
        try:
            self._exporter = _Exporter()
            self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        except ValueError as error:
            raise ConfigError(f"OpenTelemetry refuses its variables: {error}") from error
        # Libraries that make spans of their own find it.
        if not isinstance(trace.get_tracer_provider(), TracerProvider):
            trace.set_tracer_provider(self._provider)
        self._tracer = self._provider.get_tracer("quartet", release_of("quartet"))
        self._propagator = TraceContextTextMapPropagator()

    def close(self, limit_s: float) -> None:
        """Send what is left, or give it up: a collector that took nothing last is not waited for."""
        ending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        ending.start()
        if not self._exporter.failing:
            ending.join(limit_s)

    @contextmanager
    def span(
        self, name: str, root: bool, within: Any, links: Sequence[Any], attributes: Attributes
    ) -> Iterator[_Span]:
        """As tracing.span."""
        places = [trace.get_current_span(place).get_span_context() for place in links if place is not None]
        above = _NOWHERE if root else within
        said = {**_run_above(above), **attributes}
        span = self._tracer.start_span(
            name,
            context=above,
            attributes=_ours(said),
            links=[trace.Link(place) for place in places if place.is_valid],
        )
        here = otel_context.set_value(_RUN, said.get("run_id"))
        token = otel_context.attach(trace.set_span_in_context(span, here))
        try:
            yield _Span(span)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                span.set_attribute("quartet.cancelled", True)
            else:
                span.set_status(StatusCode.ERROR, type(error).__name__)
            raise
        finally:
            span.end()
            otel_context.detach(token)

    def past(self, name: str, start_s: float, end_s: float, attributes: Attributes) -> None:
        """As tracing.past."""
        span = self._tracer.start_span(
            name,
            start_time=round(start_s * NANOSECONDS),
            attributes=_ours({**_run_above(), **attributes}),
        )
        span.end(round(end_s * NANOSECONDS))

    def event(self, name: str, attributes: Attributes) -> None:
        """As tracing.event."""
        trace.get_current_span().add_event(name, _ours(attributes))

    def note(self, attributes: Attributes) -> None:
        """As tracing.note."""
        trace.get_current_span().set_attributes(_ours(attributes))

    def about(self, run_id: str) -> None:
        """As tracing.about; until the task ends, whose context is its own."""
        otel_context.attach(otel_context.set_value(_RUN, run_id[:MAX_TEXT_CHARS]))

    def here(self) -> otel_context.Context:
        """As tracing.here."""
        return otel_context.get_current()

    def carried(self) -> str:
        """As tracing.carried."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        run = _run_above().get("run_id", "")
        return f"{carrier['traceparent']} {run}".strip() if carrier else ""

    def go_on(self, carried: str) -> None:
        """As tracing.go_on; until the task ends, whose context is its own."""
        traceparent, _, run_id = carried.partition(" ")
        place = self._brought({"traceparent": traceparent})
        otel_context.attach(otel_context.set_value(_RUN, run_id, place))

    @contextmanager
    def serving(
        self, path: str, metadata: Mapping[str, Any], request_id: str, seen: Observation
    ) -> Iterator[None]:
        """As tracing.serving."""
        attributes = _of_rpc(path, request_id)
        span = self._tracer.start_span(
            path[1:], context=self._brought(metadata), kind=SpanKind.SERVER, attributes=attributes
        )
        # Never detached: the context is of this RPC's task alone, and a stream may be closed in another one.
        otel_context.attach(trace.set_span_in_context(span, _NOWHERE))
        try:
            yield
        finally:
            _end(span, seen.code, is_error=seen.code in SERVER_FAULTS)

    @contextmanager
    def answering(self, method: str, route: str, headers: Mapping[str, Any]) -> Iterator[_Answer]:
        """As tracing.answering."""
        span = self._tracer.start_span(
            f"{method} {route}",
            context=self._brought(headers),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "http.route": route},
        )
        # Detached: one task has all requests of a connection.
        token = otel_context.attach(trace.set_span_in_context(span, _NOWHERE))
        try:
            yield _Answer(span)
        except asyncio.CancelledError:
            span.set_attribute("quartet.cancelled", True)
            raise
        finally:
            span.end()
            otel_context.detach(token)

    def calling(self, path: str, peer: str, pairs: Pairs, start: Callable[[Pairs], T]) -> T:
        """As tracing.calling."""
        request_id = next(value for key, value in pairs if key == REQUEST_ID_KEY)
        attributes = {**_of_rpc(path, request_id), "server.address": peer, **_ours(_run_above())}
        span = self._tracer.start_span(path[1:], kind=SpanKind.CLIENT, attributes=attributes)
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, trace.set_span_in_context(span))
        try:
            call: Any = start((*pairs, *carrier.items()))
        except BaseException:  # of a channel that is closed
            _end(span, "CANCELLED", is_error=True)
            raise
        call.add_done_callback(partial(_end_call, span))
        started: T = call
        return started

    def named(self, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """As tracing.name_trace."""
        place = trace.get_current_span().get_span_context()
        if place.is_valid:
            line["trace_id"] = trace.format_trace_id(place.trace_id)
            line["span_id"] = trace.format_span_id(place.span_id)
        return line

    def _brought(self, carrier: Mapping[str, Any]) -> otel_context.Context:
        """The place that a carrier names; nowhere, if it is malformed."""
        return self._propagator.extract(carrier, context=_NOWHERE)


class _Span:
    """As tracing.Span."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def set(self, **attributes: str | int | float | bool) -> None:
        self._span.set_attributes(_ours(attributes))

    def fail(self, why: str) -> None:
        self._span.set_status(StatusCode.ERROR, why)


class _Answer:
    """As tracing.Answer."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def came_to(self, status: int) -> None:
        self._span.set_attribute("http.response.status_code", status)
        if status >= FIRST_HTTP_FAULT:
            self._span.set_attribute("error.type", str(status))
            self._span.set_status(StatusCode.ERROR)


class _Exporter(OTLPSpanExporter):
    """Whether the collector took what it was given last."""

    failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        self.failing = result is not SpanExportResult.SUCCESS
        return result


class _Seldom(logging.Handler):
    """What OpenTelemetry says of itself, as a line of ours a minute."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._repeated = Repeated()

    def emit(self, record: logging.LogRecord) -> None:
        held_back = self._repeated.held_back("traces")
        if held_back is not None:
            why = UNREAD if record.name == OF_HEADERS else record.getMessage()
            log.warning("spans may be lost", why=why, held_back=held_back)


def _tell_seldom() -> None:
    said = logging.getLogger("opentelemetry")
    said.propagate, said.handlers = False, [_Seldom()]


def _ours(attributes: Attributes) -> dict[str, str | int | float | bool]:
    return {
        f"quartet.{name}": value[:MAX_TEXT_CHARS] if isinstance(value, str) else value
        for name, value in attributes.items()
    }


def _run_above(place: otel_context.Context | None = None) -> dict[str, str]:
    """Which run the work is of that a place is in, or this task."""
    run_id = otel_context.get_value(_RUN, place)
    return {"run_id": str(run_id)} if run_id else {}


def _of_rpc(path: str, request_id: str) -> dict[str, str]:
    return {"rpc.system.name": "grpc", "rpc.method": path[1:], "quartet.request_id": request_id}


def _end_call(span: trace.Span, call: Any) -> None:
    code = _code(call)
    # The conventions take it for an error that its caller left it; ours leave a stream that has said enough.
    _end(span, code, is_error=code not in ("OK", "CANCELLED"))


def _code(call: Any) -> str:
    """Of a call that is done, which grpc.aio tells coroutines alone: this one has nothing to wait for."""
    asking = call.code()
    try:
        asking.send(None)
    except StopIteration as told:
        return str(told.value.name)
    asking.close()
    return "UNKNOWN"


def _end(span: trace.Span, code: str, *, is_error: bool) -> None:
    span.set_attribute("rpc.response.status_code", code)
    if is_error:
        span.set_attribute("error.type", code)
        span.set_status(StatusCode.ERROR)
    span.end()
