"""The closed list of what can go wrong, as one exception type that survives the wire.

1. Every reason is the name of a `quartet.v1.ErrorReason` without its prefix, and has exactly one gRPC code
   (`CODES`).
2. `to_status` and `from_rpc` are inverses: an error raised in a servicer arrives at the caller equal in
   reason, message, metadata and retry delay (a minute at most), as a `google.rpc.Status` with exactly one
   `ErrorInfo` of domain "quartet".
3. What does not come from a Quartet servicer (a dead peer, a proxy, a message over the limit) is mapped
   into the same list, so callers handle one exception type. `grpc_code` in its metadata tells it apart; a
   servicer that hands such an error on leaves that out.
4. Text is clipped so that the status always fits into gRPC's 8 KiB of trailers.
"""

from __future__ import annotations

from typing import Any, Final

import grpc
from google.protobuf import any_pb2, message
from google.rpc import error_details_pb2, status_pb2

from quartet.unreachable import explained

DOMAIN: Final = "quartet"
STATUS_KEY: Final = "grpc-status-details-bin"

# Trailers share 8 KiB; the message travels twice (grpc-message and the status), percent- and base64-encoded.
MAX_MESSAGE_BYTES: Final = 600
MAX_VALUE_BYTES: Final = 200
MAX_METADATA_KEYS: Final = 10

CODES: Final[dict[str, grpc.StatusCode]] = {
    "INVALID_REQUEST": grpc.StatusCode.INVALID_ARGUMENT,
    "INVALID_CONFIG": grpc.StatusCode.INVALID_ARGUMENT,
    "RUN_UNKNOWN": grpc.StatusCode.NOT_FOUND,
    "RUN_CONFLICT": grpc.StatusCode.ALREADY_EXISTS,
    "SEQUENCE_GAP": grpc.StatusCode.FAILED_PRECONDITION,
    "SEQUENCE_CONFLICT": grpc.StatusCode.FAILED_PRECONDITION,
    "STREAM_TORN": grpc.StatusCode.INVALID_ARGUMENT,
    "ENVIRONMENT_UNKNOWN": grpc.StatusCode.NOT_FOUND,
    "ENVIRONMENT_UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "RESOURCE_UNKNOWN": grpc.StatusCode.NOT_FOUND,
    "VERSION_UNKNOWN": grpc.StatusCode.NOT_FOUND,
    "VERSION_UNAVAILABLE": grpc.StatusCode.FAILED_PRECONDITION,
    "RUN_NOT_SERVED": grpc.StatusCode.FAILED_PRECONDITION,
    "CHECKSUM_MISMATCH": grpc.StatusCode.DATA_LOSS,
    "OFFSET_OUT_OF_RANGE": grpc.StatusCode.OUT_OF_RANGE,
    "PROMPT_TOO_LONG": grpc.StatusCode.INVALID_ARGUMENT,
    "OVERLOADED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "NOT_READY": grpc.StatusCode.UNAVAILABLE,
    "DEADLINE": grpc.StatusCode.DEADLINE_EXCEEDED,
    "UNAUTHENTICATED": grpc.StatusCode.UNAUTHENTICATED,
    "NOT_IMPLEMENTED": grpc.StatusCode.UNIMPLEMENTED,
    "INTERNAL": grpc.StatusCode.INTERNAL,
    "SCORER_FAILED": grpc.StatusCode.FAILED_PRECONDITION,
}

# What an error without ErrorInfo means: it was made by gRPC itself or by something between the two services.
_BARE_CODES: Final[dict[grpc.StatusCode, str]] = {
    grpc.StatusCode.UNAVAILABLE: "NOT_READY",
    # The peer cancelled; our own cancellation is asyncio.CancelledError.
    grpc.StatusCode.CANCELLED: "NOT_READY",
    grpc.StatusCode.DEADLINE_EXCEEDED: "DEADLINE",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "OVERLOADED",
    grpc.StatusCode.UNIMPLEMENTED: "NOT_IMPLEMENTED",
    grpc.StatusCode.UNAUTHENTICATED: "UNAUTHENTICATED",
}

# What grpc.aio says in place of the status of a call that its peer ended while a message was written.
LOST_STATUS: Final = "Internal error from Core"
_LOST: Final = (
    "its peer ended the call while a message was written, and gRPC lost why; the peer's log may say it"
)

DEFAULT_RETRY_AFTER_MS: Final = 1000
# Whatever a peer asks for, nobody waits for longer without asking again: it may be somebody else's.
MAX_RETRY_AFTER_MS: Final = 60_000


class QuartetError(Exception):
    """An error of the contract.

    `reason` is an ErrorReason without prefix; metadata names the offending values.
    """

    def __init__(
        self, reason: str, message: str, *, retry_after_ms: int | None = None, **metadata: object
    ) -> None:
        """Make an error; an unknown reason is our own mistake, hence the assertion."""
        assert reason in CODES, f"{reason!r} is not an ErrorReason"
        assert len(metadata) <= MAX_METADATA_KEYS, "too many metadata keys for the trailers"
        self.reason = reason
        self.message = _clip(message, MAX_MESSAGE_BYTES)
        self.metadata = {key: _clip(_text(value), MAX_VALUE_BYTES) for key, value in metadata.items()}
        if reason == "OVERLOADED" and retry_after_ms is None:
            retry_after_ms = DEFAULT_RETRY_AFTER_MS
        self.retry_after_ms = retry_after_ms
        super().__init__(f"{reason}: {self.message}")

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC status code this reason travels under."""
        return CODES[self.reason]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by value: errors cross process boundaries inside a service."""
        return (_rebuild, (self.reason, self.message, self.retry_after_ms, self.metadata))


def has_no_method(error: QuartetError) -> bool:
    """Whether who answered lacks the method: an older release, or another service that has the address since.

    gRPC goes on dialling an address that a name no longer has until it asks for the name again, which it does
    once in 30 s. In a network whose addresses are handed on (containers), somebody else may be there by then.
    """
    told = error.metadata.keys()
    # With a field it has the method, and does not know what that was asked with.
    return (
        error.reason == "NOT_IMPLEMENTED"
        and "field" not in told
        and not told.isdisjoint({"rpc", "grpc_code"})
    )


def refused(field: str, value: object, remedy: str) -> QuartetError:
    """INVALID_REQUEST of one field."""
    shown = "empty" if value == "" else _clip(str(value), MAX_VALUE_BYTES)
    text = f"{field} = {shown} is refused; {remedy}"
    return QuartetError("INVALID_REQUEST", text, field=field, value=value, remedy=remedy)


def to_status(error: QuartetError) -> status_pb2.Status:
    """The error as google.rpc.Status with one ErrorInfo, and RetryInfo where a delay is set."""
    status = status_pb2.Status(code=error.code.value[0], message=error.message)
    metadata = {key: value for key, value in error.metadata.items() if key != "grpc_code"}
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    _pack(status, info)
    if error.retry_after_ms is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(error.retry_after_ms)
        _pack(status, retry)
    return status


def from_rpc(error: grpc.RpcError) -> QuartetError:
    """The QuartetError that a failed RPC carries, or the nearest one where the peer sent no ErrorInfo."""
    code = error.code()
    details = error.details() or ""
    found = _from_trailers(error.trailing_metadata())
    if found is not None:
        return found
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "message larger than max" in details:
        # A larger message stays larger: not OVERLOADED, which callers retry.
        return QuartetError(
            "INVALID_REQUEST", details, field="message", remedy="stream it in pieces; messages end at 4 MiB"
        )
    if details == LOST_STATUS:
        details = _LOST
    reason = _BARE_CODES.get(code, "INTERNAL")
    return QuartetError(reason, explained(details) or f"the call ended with {code.name}", grpc_code=code.name)


def _from_trailers(trailers: Any) -> QuartetError | None:
    raw = next((value for key, value in trailers or () if key == STATUS_KEY), None)
    if raw is None:
        return None
    status = status_pb2.Status()
    try:
        status.ParseFromString(raw)
    except message.DecodeError:
        return None
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    reason, metadata, retry_after_ms = None, {}, None
    for detail in status.details:
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Is(retry.DESCRIPTOR):
            detail.Unpack(retry)
            retry_after_ms = max(0, min(retry.retry_delay.ToMilliseconds(), MAX_RETRY_AFTER_MS))
    if reason is None or info.domain != DOMAIN:
        return None
    if reason not in CODES:  # A newer peer: keep what it said, under the reason that promises nothing.
        metadata = {**metadata, "unknown_reason": reason}
        reason = "INTERNAL"
    return _rebuild(reason, status.message, retry_after_ms, metadata)


def _rebuild(reason: str, text: str, retry_after_ms: int | None, metadata: dict[str, str]) -> QuartetError:
    error = QuartetError(reason, text, retry_after_ms=retry_after_ms)
    error.metadata = dict(metadata)
    return error


def _pack(status: status_pb2.Status, detail: message.Message) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (list, tuple, set, frozenset)):
        return ", ".join(str(item) for item in value)
    return str(value)


def _clip(text: str, limit_bytes: int) -> str:
    raw = text.encode("utf-8", "replace")
    if len(raw) <= limit_bytes:
        return raw.decode()
    return raw[: limit_bytes - 3].decode("utf-8", "ignore") + "…"
