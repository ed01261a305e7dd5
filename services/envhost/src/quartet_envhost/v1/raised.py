"""Errors that Verifiers records, told with where the environment's own code raised them.

What it records is text: the error itself is at hand only when it does so, and is looked at then. Of what the
hooks of a model call raise (`@vf.stop`, `@vf.intercept`) it keeps less: of some the text alone, and of all it
puts the end of the harness in the place of the cause. So they have a boundary, and their cause again.

Pinned to verifiers 0.4.0: it wraps `Trace.record_error` and the private `env._as_error` and
`session.call_hook`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verifiers.v1 import env, session, trace
from verifiers.v1.errors import HarnessError, ProviderError, TaskError, boundary

from quartet_envhost.own_code import OwnCode
from quartet_envhost.v1.interception import current_policy


def key_of(recorded: trace.Error) -> tuple[str, str, str | None]:
    """By which a recorded error is found again: two without text differ in where they were raised."""
    return recorded.type, recorded.message, recorded.traceback


def tell_where(own: OwnCode) -> None:
    """Note for the current policy how each recorded error is told, by what Verifiers keeps of it."""
    internals: Any = env
    calls: Any = session
    record, as_error, call_hook = trace.Trace.record_error, internals._as_error, calls.call_hook

    def note(recorded: trace.Error, error: Exception) -> None:
        if not isinstance(error, ProviderError):  # the model's, which has no place
            current_policy.get().told[key_of(recorded)] = own.text_of(error)

    def recording(self: trace.Trace, error: Exception) -> None:
        if isinstance(error.__cause__, HarnessError) and error.__context__ is not None:
            error.__cause__ = error.__context__  # it ended the harness, not the other way round
        record(self, error)
        note(self.errors[-1], error)

    def as_noted_error(error: Exception) -> trace.Error:
        recorded: trace.Error = as_error(error)
        note(recorded, error)
        return recorded

    async def hooked(handler: Callable[..., Any], available: dict[type, object]) -> object:
        async with boundary(TaskError, f"hook {handler.__name__}"):
            return await call_hook(handler, available)

    trace.Trace.record_error = recording
    internals._as_error, calls.call_hook = as_noted_error, hooked
