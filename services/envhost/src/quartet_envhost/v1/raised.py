"""Errors that Verifiers records, told with where the environment's own code raised them.

What it records is text: the error itself is at hand only when it does so, and is looked at then.

Pinned to verifiers 0.4.0: it wraps `Trace.record_error` and the private `env._as_error`.
"""

from __future__ import annotations

from typing import Any

from verifiers.v1 import env, trace
from verifiers.v1.errors import ProviderError

from quartet_envhost.own_code import OwnCode
from quartet_envhost.v1.interception import current_policy


def key_of(recorded: trace.Error) -> tuple[str, str, str | None]:
    """By which a recorded error is found again: two without text differ in where they were raised."""
    return recorded.type, recorded.message, recorded.traceback


def tell_where(own: OwnCode) -> None:
    """Note for the current policy how each recorded error is told, by what Verifiers keeps of it."""
    internals: Any = env
    record, as_error = trace.Trace.record_error, internals._as_error

    def note(recorded: trace.Error, error: Exception) -> None:
        if not isinstance(error, ProviderError):  # the model's, which has no place
            current_policy.get().told[key_of(recorded)] = own.text_of(error)

    def recording(self: trace.Trace, error: Exception) -> None:
        record(self, error)
        note(self.errors[-1], error)

    def as_noted_error(error: Exception) -> trace.Error:
        recorded: trace.Error = as_error(error)
        note(recorded, error)
        return recorded

    trace.Trace.record_error = recording
    internals._as_error = as_noted_error
