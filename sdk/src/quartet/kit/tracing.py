"""Traces by OpenTelemetry: which work belongs together over all services, and where its time went.

1. Off unless OpenTelemetry's own variables name a collector (docs/tracing.md). Off, nothing of it is
   imported, and an RPC costs one look at a variable.
2. What is asked for and cannot be had (packages that are missing, a protocol that is not spoken) is a
   ConfigError before anything is served.
3. Nothing waits for the collector (otel.py): what it does not take is dropped. A service that ends waits
   FLUSH_SECONDS for it at most.
4. A process exports for itself, from `exporting` on, which is after every fork that made it.
5. Context travels as W3C traceparent beside the request id, and in the headers of HTTP. One that is malformed
   counts for nothing, and so does that of a caller who is refused.
6. Which run it is of is told by every span below the place that said so: a span with a run_id, a request
   that has one, `about`. Other processes of ours are told with the place; other services by their requests.
7. What is no work has no span: watching, which lasts as long as a run does, and asking again and again how
   something stands (UNTRACED); health and reflection.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from quartet.config import ConfigError
from quartet.kit.metrics import Observation

if TYPE_CHECKING:
    from quartet.kit.otel import Spans

T = TypeVar("T")
#: A value of an attribute; attributes are named "quartet.NAME".
Value = str | int | float | bool
#: A place in a trace, to go on from in another task. Opaque; None where there is none.
Place = Any
Pairs = tuple[tuple[str, Any], ...]

#: Of a request that is a stream: what each message is one of.
_FRAME: Final = "frame"

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL: Final = "http/protobuf"
#: Less than what launchers leave a service to end in.
FLUSH_SECONDS: Final = 2.0
UNTRACED: Final = frozenset(
    {
        "/quartet.v1.OrchestratorService/WatchRun",
        "/quartet.v1.OrchestratorService/StreamRollouts",
        "/quartet.v1.WeightService/Watch",
        "/quartet.v1.OrchestratorService/GetRunStatus",
        "/quartet.v1.OrchestratorService/ListRuns",
        "/quartet.v1.TrainerService/GetRun",
        "/quartet.v1.InferenceService/GetModel",
        "/quartet.v1.EnvHostService/ListEnvironments",
    }
)


class Span(Protocol):
    """Work under way."""

    def set(self, **attributes: Value) -> None:
        """Say more of it."""

    def fail(self, why: str) -> None:
        """It did not come to what it was begun for."""


class Answer(Protocol):
    """A request over HTTP that is being answered."""

    def came_to(self, status: int) -> None:
        """What it was answered."""


class _Nothing(AbstractContextManager["_Nothing"]):
    """Where traces are off."""

    def came_to(self, status: int) -> None: ...

    def set(self, **attributes: Value) -> None: ...

    def fail(self, why: str) -> None: ...

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: object) -> None: ...


_NOTHING: Final = _Nothing()
_spans: Spans | None = None


def asked() -> bool:
    """Whether the environment asks for traces. Raises ConfigError where it asks for what is not spoken."""
    endpoint = next((name for name in ENDPOINTS if os.environ.get(name)), "")
    if not endpoint or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if exporter == "none":
        return False
    if exporter != "otlp":
        raise ConfigError(f"OTEL_TRACES_EXPORTER = {exporter!r} is refused: write otlp, or none")
    name = next((one for one in PROTOCOLS if os.environ.get(one)), "")
    if name and os.environ[name] != PROTOCOL:
        raise ConfigError(
            f"{name} = {os.environ[name]!r} is refused: write {PROTOCOL}, and in {endpoint} the collector's "
            "port for that, mostly 4318"
        )
    return True


def check() -> None:
    """Whether `exporting` would begin. Raises ConfigError."""
    if not asked():
        return
    try:
        import quartet.kit.otel  # noqa: F401  Only here: off, nothing of it is imported.
    except ImportError as error:
        raise ConfigError(
            f"traces are asked for ({' or '.join(ENDPOINTS)}), but {error.name} is not installed; in the "
            "repository: pip install './sdk[otel]', or set OTEL_SDK_DISABLED=true"
        ) from error


@contextlib.contextmanager
def exporting(service: str) -> Iterator[None]:
    """While inside, spans of this process go to the collector, if the environment asks for that.

    Raises ConfigError.
    """
    global _spans
    check()
    if not asked():
        yield
        return
    from quartet.kit.otel import Spans

    spans = _spans = Spans(f"quartet-{service}")
    try:
        yield
    finally:
        _spans = None
        spans.close(FLUSH_SECONDS)


def span(
    name: str, *, root: bool = False, within: Place = None, links: Sequence[Place] = (), **attributes: Value
) -> AbstractContextManager[Span]:
    """Work from here to the end of the block: below `within`, else below what is under way here.

    `root`: below nothing. `links` are places in other traces that it is done for, too.
    """
    return _NOTHING if _spans is None else _spans.span(name, root, within, links, attributes)


def past(name: str, start_s: float, end_s: float, **attributes: Value) -> None:
    """Work that somebody else timed, by time.time(), below what is under way here; 0 is none."""
    if _spans is not None and 0 < start_s <= end_s:
        _spans.past(name, start_s, end_s, attributes)


def event(name: str, **attributes: Value) -> None:
    """A moment of what is under way here."""
    if _spans is not None:
        _spans.event(name, attributes)


def note(**attributes: Value) -> None:
    """Say more of what is under way here."""
    if _spans is not None:
        _spans.note(attributes)


def note_run(request: Any) -> None:
    """Say which run the request under way is about, if its message, or the first one of a stream, says so."""
    if _spans is not None and (run_id := _run_of(request)):
        _spans.note({"run_id": run_id})
        _spans.about(run_id)


def about(run_id: str) -> None:
    """What this task does from here on is of this run."""
    if _spans is not None:
        _spans.about(run_id)


def here() -> Place:
    """Where this task is."""
    return None if _spans is None else _spans.here()


def is_on() -> bool:
    """Whether this process exports."""
    return _spans is not None


def carried() -> str:
    """`here` as it goes to another process, to be read by `go_on`; empty where there is none."""
    return "" if _spans is None else _spans.carried()


def go_on(carried: str) -> None:
    """What this task does from here on is below the place that `carried` told in another process."""
    if _spans is not None:
        _spans.go_on(carried)


def serving(
    path: str, metadata: Mapping[str, Any] | None, request_id: str, seen: Observation
) -> AbstractContextManager[Any]:
    """The span of an RPC that is handled here; it ends with the code that was `seen`.

    `metadata` is its caller's; None: of one who is refused.
    """
    if _spans is None or metadata is None or not _is_work(path):
        return _NOTHING
    return _spans.serving(path, metadata, request_id, seen)


def answering(method: str, route: str, headers: Mapping[str, Any]) -> AbstractContextManager[Answer]:
    """The span of a request over HTTP that is answered here, below the place that its headers name. Of one
    who is refused its place counts for nothing: whoever serves calls this behind the door."""
    return _NOTHING if _spans is None else _spans.answering(method, route, headers)


def calling(path: str, peer: str, pairs: Pairs, start: Callable[[Pairs], T]) -> T:
    """Start a call with this metadata; its span ends when the call is done, however it ends."""
    if _spans is None or not _is_work(path):
        return start(pairs)
    return _spans.calling(path, peer, pairs, start)


def name_trace(_logger: Any, _method: str, line: Any) -> Any:
    """For structlog: which trace a line belongs to."""
    return line if _spans is None else _spans.named(line)


def _is_work(path: str) -> bool:
    return path.startswith("/quartet.") and path not in UNTRACED


def _run_of(request: Any) -> str:
    if "run_id" in request.DESCRIPTOR.fields_by_name:
        return str(request.run_id)
    if _FRAME in request.DESCRIPTOR.oneofs_by_name and (frame := request.WhichOneof(_FRAME)):
        return _run_of(getattr(request, frame))
    return ""
