"""The one server interceptor. Around every RPC, of all four kinds, in this order:

1. request id and deadline into the context (quartet.kit.context);
2. metrics, and the span of a caller who is let in (quartet.kit.tracing);
3. bearer token, and the bound on RPCs under way: refused before a byte of the request is parsed;
4. the handler, with requests parsed and responses serialised inside, so that malformed and oversize
   messages are errors of the contract like any other: QuartetError becomes a Status with one ErrorInfo; any
   other exception becomes INTERNAL, says nothing but the request id, and is logged with its traceback. Of an
   answer that no message holds it says which bound that is over.
   Refusals that repeat word for word (a watcher of a run that is over asks every few seconds) are logged
   once a minute;
5. a request with a field that this build's contract does not have is refused before the handler sees it
   (quartet.kit.unknown).

Handlers are `async def` (unary response) or async generators (streamed response), and read streamed
requests by iterating.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf import message
from grpc_status import rpc_status

from quartet.config import ConfigError
from quartet.errors import QuartetError, from_rpc, to_status
from quartet.kit import context as request_context
from quartet.kit import tracing
from quartet.kit.metrics import Observation, observe
from quartet.kit.options import MAX_MESSAGE_BYTES
from quartet.kit.own_log import get_logger
from quartet.kit.repeated import Repeated
from quartet.kit.security import TokenFile
from quartet.kit.unknown import refuse_unknown

# Probes carry no token, and a full service is not a dead one.
_OPEN_PREFIX: Final = "/grpc.health.v1.Health/"
_OWN_PREFIX: Final = "/quartet."
#: Errors that led to one, of which the frames are freed.
MAX_LED_TO: Final = 100

log = get_logger()


@dataclass(frozen=True)
class _Rpc:
    """What is known of an RPC before its handler runs."""

    path: str
    request_id: str | None
    known: bool = True
    # Its caller's, who was let in.
    metadata: Mapping[str, Any] | None = None

    @property
    def service(self) -> str:
        return self.path.split("/")[1] if self.known else "unknown"

    @property
    def method(self) -> str:
        return self.path.rpartition("/")[2] if self.known else "unknown"


class ServerInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Wraps every handler of a server."""

    def __init__(self, token: TokenFile | None, max_concurrent_rpcs: int) -> None:
        """Demand `token` if there is one; admit at most `max_concurrent_rpcs` at a time."""
        self._token = token
        self._limit = max_concurrent_rpcs
        self._under_way = 0
        self._refusals = Repeated()

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """Replace the handler by a guarded one."""
        metadata = dict(details.invocation_metadata or ())
        offered_id = metadata.get(request_context.REQUEST_ID_KEY)
        handler = await continuation(details)
        refusal = self._refusal(details.method, metadata)
        if refusal is None and handler is None:
            refusal = QuartetError(
                "NOT_IMPLEMENTED", f"there is no method {details.method} here", rpc=details.method
            )
        if refusal is not None:
            return self._refuse(_Rpc(details.method, offered_id, known=handler is not None), refusal)
        return self._wrap(_Rpc(details.method, offered_id, metadata=metadata), handler)

    def _refusal(self, path: str, metadata: dict[str, Any]) -> QuartetError | None:
        if self._token is None or path.startswith(_OPEN_PREFIX):
            return None
        scheme, _, offered = str(metadata.get("authorization", "")).partition(" ")
        if scheme.lower() == "bearer" and self._token.accepts(offered):
            return None
        wrong = "is none of this service's" if scheme.lower() == "bearer" else "is missing"
        return QuartetError(
            "UNAUTHENTICATED", f"the token {wrong}; send it as metadata 'authorization: Bearer TOKEN'"
        )

    def _refuse(self, rpc: _Rpc, refusal: QuartetError) -> Any:
        async def refuse(_requests: Any, context: Any) -> None:
            async with self._guard(rpc, context):
                raise refusal

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _wrap(self, rpc: _Rpc, handler: Any) -> Any:
        if handler.response_streaming:
            inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
            wrapped = self._wrap_generator(rpc, handler, inner)
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
        else:
            inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
            wrapped = self._wrap_coroutine(rpc, handler, inner)
            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
        return make(wrapped)

    def _wrap_coroutine(self, rpc: _Rpc, handler: Any, inner: Any) -> Any:
        async def answer(raw: Any, context: Any) -> Any:
            async with self._guard(rpc, context):
                return _serialise(rpc, handler, await inner(_parse(rpc, handler, raw), context))

        return answer

    def _wrap_generator(self, rpc: _Rpc, handler: Any, inner: Any) -> Any:
        async def answer(raw: Any, context: Any) -> AsyncIterator[Any]:
            async with (
                self._guard(rpc, context),
                contextlib.aclosing(inner(_parse(rpc, handler, raw), context)) as responses,
            ):
                async for response in responses:
                    yield _serialise(rpc, handler, response)

        return answer

    @contextlib.asynccontextmanager
    async def _guard(self, rpc: _Rpc, context: Any) -> AsyncIterator[None]:
        request_id, scope = request_context.enter(rpc.request_id, context.time_remaining())
        counted = rpc.path.startswith(_OWN_PREFIX)
        with (
            observe(rpc.service, rpc.method) as seen,
            tracing.serving(rpc.path, rpc.metadata, request_id, seen),
        ):
            try:
                with self._place(counted):
                    yield
            except grpc.aio.AbortError:
                seen.code = _code_name(context.code())
                raise
            except Exception as error:  # noqa: BLE001  The boundary of the process: all of it is mapped.
                typed = self._typed(error, rpc, request_id)
                seen.code = typed.code.name
                tracing.note(reason=typed.reason)
                _let_go(error)
                await context.abort_with_status(rpc_status.to_status(to_status(typed)))
            except BaseException:  # cancelled by the caller, or the stream was closed early
                seen.code = "CANCELLED"
                raise
            finally:
                scope.close()
                _note(rpc, seen)

    @contextlib.contextmanager
    def _place(self, counted: bool) -> Iterator[None]:
        """One of the places for RPCs under way. A refusal takes none, however slowly its caller reads it."""
        if counted and self._under_way >= self._limit:
            raise QuartetError(
                "OVERLOADED",
                f"{self._limit} RPCs are under way here, as many as server.max_concurrent_rpcs "
                "allows; call again later, or raise that where the service is started",
                limit=self._limit,
            )
        self._under_way += counted
        try:
            yield
        finally:
            self._under_way -= counted

    def _typed(self, error: Exception, rpc: _Rpc, request_id: str) -> QuartetError:
        match error:
            case QuartetError():
                self._log_refusal(rpc, error.reason, error.message, error.metadata)
                return error
            case ConfigError():
                self._log_refusal(rpc, "INVALID_CONFIG", str(error), {})
                return QuartetError(
                    "INVALID_CONFIG", str(error), key=error.key, value=error.value, remedy=error.remedy
                )
            case grpc.RpcError():
                typed = from_rpc(error)
                log.warning("rpc failed downstream", rpc=rpc.path, reason=typed.reason, message=typed.message)
                return typed
            case _TooLarge():
                log.error("answer too large", rpc=rpc.path, message=str(error))
                return QuartetError("INTERNAL", str(error), request_id=request_id)
        log.error("rpc crashed", rpc=rpc.path, exc_info=error)
        return QuartetError(
            "INTERNAL",
            "internal fault; the service's log has it under this request_id",
            request_id=request_id,
        )

    def _log_refusal(self, rpc: _Rpc, reason: str, message: str, metadata: Mapping[str, str]) -> None:
        held_back = self._refusals.held_back((rpc.path, reason, message))
        if held_back is None:
            return
        more: dict[str, Any] = {"metadata": metadata} if metadata else {}
        if held_back:
            more["held_back"] = held_back
        log.info("rpc refused", rpc=rpc.path, reason=reason, message=message, **more)


class _TooLarge(Exception):
    """An answer that no message holds. What may grow is streamed, so that it is a fault of the service; but
    whoever asked knows of what there was so much."""


def _let_go(error: BaseException) -> None:
    """Free what the frames of a refused call hold: samples, weights, a run.

    gRPC's server keeps the exception by which it refused last until the next call comes, and with it all that
    led to it.
    """
    left, seen = [error], set[int]()
    while left and len(seen) < MAX_LED_TO:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        at, one.__traceback__ = one.__traceback__, None
        while at is not None:
            at.tb_next, at = None, at.tb_next
        left += [led for led in (one.__cause__, one.__context__) if led is not None]
        left += one.exceptions if isinstance(one, BaseExceptionGroup) else ()


def _note(rpc: _Rpc, seen: Observation) -> None:
    if rpc.path.startswith(_OWN_PREFIX):
        log.debug("rpc handled", rpc=rpc.path, code=seen.code)


def _parse(rpc: _Rpc, handler: Any, raw: Any) -> Any:
    parse_one = handler.request_deserializer
    if not handler.request_streaming:
        return _noted(_parse_one(rpc, parse_one, raw))

    async def requests() -> AsyncIterator[Any]:
        is_first = True
        async for piece in raw:
            request = _parse_one(rpc, parse_one, piece)
            yield _noted(request) if is_first else request
            is_first = False

    return requests()


def _noted(request: Any) -> Any:
    """The request, whose run the span under way tells. Frames of Push are no messages here."""
    if isinstance(request, message.Message):
        tracing.note_run(request)
    return request


def _parse_one(rpc: _Rpc, parse: Any, raw: Any) -> Any:
    if parse is None:
        return raw
    try:
        request = parse(raw)
    except message.DecodeError:
        raise QuartetError(
            "INVALID_REQUEST",
            f"{rpc.method} was sent {len(raw)} bytes that are not its request message",
            field="request",
            value=f"{len(raw)} bytes",
            remedy="send the request message of the contract this service was built with",
        ) from None
    # Health and reflection are gRPC's; frames of Push are read without a message (quartet.weights.frames).
    if rpc.path.startswith(_OWN_PREFIX) and isinstance(request, message.Message):
        refuse_unknown(request, raw, rpc.path)
    return request


def _serialise(rpc: _Rpc, handler: Any, response: Any) -> Any:
    raw = response if handler.response_serializer is None else handler.response_serializer(response)
    if len(raw) > MAX_MESSAGE_BYTES:
        raise _TooLarge(
            f"the answer of {rpc.method} has {len(raw)} bytes, and a message {MAX_MESSAGE_BYTES} at most "
            "(4 MiB); ask for less in one call"
        )
    return raw


def _code_name(code: Any) -> str:
    return code.name if isinstance(code, grpc.StatusCode) else "UNKNOWN"
