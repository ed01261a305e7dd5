"""What is answered instead of a result, in the forms that the SDK raises cleanly.

1. A request that cannot be taken is answered with a status at once: 4xx, which the SDK raises, but for 408,
   409 and 429, which it repeats.
2. What was taken and then fails is the answer of its future: a sentence and whose fault it was. The SDK
   raises RequestFailedError with both.
"""

from __future__ import annotations

from quartet.errors import QuartetError

#: Reasons of the services that the caller of the gateway can do something about.
USERS = frozenset(
    {
        "INVALID_REQUEST",
        "INVALID_CONFIG",
        "RUN_UNKNOWN",
        "RUN_CONFLICT",
        "RESOURCE_UNKNOWN",
        "VERSION_UNAVAILABLE",
        "RUN_NOT_SERVED",
        "PROMPT_TOO_LONG",
        "OVERLOADED",
    }
)


class Refused(Exception):
    """One sentence for the person who wrote the script; `status` where it is answered at once."""

    def __init__(self, sentence: str, *, status: int = 400, category: str = "user") -> None:
        super().__init__(sentence)
        self.sentence, self.status, self.category = sentence, status, category


def unknown(what: str, name: str, remedy: str, ends: str = "") -> Refused:
    """Something that this gateway does not have; `ends` says what else than a restart may have ended it."""
    forgotten = f"a restart forgets it, and {ends}" if ends else "a restart forgets it"
    sentence = f"{what} {name!r} is not known to this gateway ({forgotten}); {remedy}"
    return Refused(sentence, status=404)


def from_quartet(error: QuartetError) -> Refused:
    """A typed error of a service."""
    category = "user" if error.reason in USERS else "server"
    status = 429 if error.reason == "OVERLOADED" else 400 if category == "user" else 503
    return Refused(f"{error.message} ({error.reason})", status=status, category=category)
