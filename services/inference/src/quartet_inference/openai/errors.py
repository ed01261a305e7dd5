"""Errors as OpenAI's clients know them: a status, a type, the parameter at fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quartet.errors import QuartetError

#: reason -> (HTTP status, type, code). Clients repeat 408, 409, 429 and everything from 500 on.
_STATUS: dict[str, tuple[int, str, str | None]] = {
    "INVALID_REQUEST": (400, "invalid_request_error", None),
    "NOT_IMPLEMENTED": (400, "invalid_request_error", "unsupported_parameter"),
    "PROMPT_TOO_LONG": (400, "invalid_request_error", "context_length_exceeded"),
    "RUN_NOT_SERVED": (404, "invalid_request_error", "model_not_found"),
    "VERSION_UNAVAILABLE": (412, "invalid_request_error", "version_unavailable"),
    "UNAUTHENTICATED": (401, "authentication_error", "invalid_api_key"),
    "OVERLOADED": (429, "rate_limit_error", "overloaded"),
    "NOT_READY": (503, "server_error", "not_ready"),
    "DEADLINE": (504, "server_error", "timeout"),
}
#: Where the error names no time itself. A replica that starts or drains takes seconds: clients that are told
#: nothing ask twice within two, and give up.
NOT_READY_RETRY_SECONDS = 5.0
#: OpenAI's own words: LiteLLM and what is built on it know by them, not by the code, that a conversation has
#: to be shortened.
TOO_LONG = "This model's maximum context length is exceeded: "
#: What a DEADLINE waited for that comes no sooner the next time.
ANSWER = "the answer, or its next piece,"
_INTERNAL = (500, "server_error", "internal_error")


class OpenAiError(Exception):
    """What is answered instead of a completion."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        allowed: str = "",
        hopeless: bool = False,
    ) -> None:
        """`allowed` are the methods of a 405. What is `hopeless` would mostly end the same if asked again."""
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.allowed = allowed
        self.hopeless = hopeless
        self._error = {"message": message, "type": kind, "param": param, "code": code}

    def renamed(self, name: Callable[[str], str]) -> OpenAiError:
        """The same where parameters have other names."""
        renamed = OpenAiError(
            self.status, name(str(self)), retry_after_s=self.retry_after_s, hopeless=self.hopeless
        )
        param = self._error["param"]
        renamed._error = {**self._error, "message": str(renamed), "param": param and name(param)}
        return renamed

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        return {"error": self._error}


def unsupported(field: str, remedy: str) -> OpenAiError:
    """A parameter that this server would otherwise have to ignore."""
    return OpenAiError(
        400, f"{field} is not supported here; {remedy}", param=field, code="unsupported_parameter"
    )


def malformed(field: str, message: str) -> OpenAiError:
    """A parameter of the wrong form."""
    return OpenAiError(400, f"{field}: {message}", param=field, code="invalid_value")


def from_quartet(error: QuartetError) -> OpenAiError:
    """A typed error of the service; faults keep their details in the log."""
    status, kind, code = _STATUS.get(error.reason, _INTERNAL)
    message = error.message if error.reason in _STATUS else "the server failed; its log says why"
    if error.reason == "PROMPT_TOO_LONG":
        message = TOO_LONG + message
    wait_s = error.retry_after_ms / 1000 if error.retry_after_ms else None
    if wait_s is None and status == 503:
        wait_s = NOT_READY_RETRY_SECONDS
    # What waited for weights, or a body, may have them next time; an answer would be as long as it was.
    hopeless = error.reason == "DEADLINE" and error.metadata.get("waited_for") == ANSWER
    field = error.metadata.get("field")
    return OpenAiError(status, message, kind, field, code, wait_s, hopeless=hopeless)
