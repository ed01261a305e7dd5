"""The private line between the front and one worker: length-prefixed frames over a socket pair.

1. A frame is `<length u32><kind u8><call id u64><payload>`, little-endian; the payload is a message of the
   contract, or JSON where the contract has none (OPEN, ERROR).
2. The worker's stdout and stderr are never part of the line: environments print.
3. No payload is larger than MAX_PAYLOAD_BYTES; a larger one is a fault of the writer and never sent.
"""

from __future__ import annotations

import asyncio
import enum
import json
import struct
from typing import Final

from quartet.errors import CODES, QuartetError

# The contract's message limit; a frame carries at most one message.
MAX_PAYLOAD_BYTES: Final = 4 * 1024 * 1024
# What a message of ours may have, so that the stream frame around it and its transport still fit.
MAX_MESSAGE_BYTES: Final = MAX_PAYLOAD_BYTES - 64 * 1024
HEADER: Final = struct.Struct("<IBQ")
TRACES: Final = b"traces"
# The key of OPEN by which a front takes WAITS.
TAKES_WAITS: Final = "takes_waits"


class Kind(enum.IntEnum):
    """What a frame says."""

    # Worker to front, first: the process lives and can speak. TRACES of one that takes TRACE.
    HELLO = 1
    # Front to worker: JSON settings; answered by OK with an EnvironmentInfo once the environment is loaded.
    OPEN = 2
    # Front to worker: GetTasksRequest; answered by OK with a GetTasksResponse.
    TASKS = 3
    # Front to worker: RunRolloutsRequest whose first member is to be run; the others, if any, are those it is
    # scored with, each asked for by a RUN of its own. Answered by OK with a Rollout.
    RUN = 4
    # Front to worker: end the call of this id; it is answered all the same.
    CANCEL = 5
    # Worker to front: the answer of a call.
    OK = 6
    # Worker to front: JSON {reason, message, metadata} instead of an answer.
    ERROR = 7
    # Worker to front, every second: the event loop runs. Text that says why no turn can be sampled, or none.
    HEARTBEAT = 8
    # Front to worker: as RUN, but the turns are sampled by the client of the call.
    INTERACT = 9
    # Worker to front: ModelQuestion of the INTERACT of this id.
    QUESTION = 10
    # Front to worker: its ModelAnswer.
    ANSWER = 11
    # Front to worker, before the RUN or INTERACT of this id: the traceparent that its spans are below. Only
    # to one whose HELLO asks for it: others know no such frame.
    TRACE = 12
    # Worker to front: text that says why no rollout can end well in this process any more; it is to be
    # stopped. A front of an earlier release stops it, too: it knows no such frame.
    LOST = 13
    # Worker to front, where it changed since: JSON {request id: what a turn of it waits for}, of all that
    # wait. Only to a front whose OPEN says that it takes them.
    WAITS = 14


Frame = tuple[Kind, int, bytes]


def encode(kind: Kind, call_id: int, payload: bytes = b"") -> bytes:
    """One frame as bytes."""
    assert len(payload) <= MAX_PAYLOAD_BYTES, f"frame of {len(payload)} bytes"
    return HEADER.pack(len(payload), kind, call_id) + payload


async def read_frame(reader: asyncio.StreamReader) -> Frame | None:
    """The next frame, or None at the end of the line. ValueError: the peer is broken."""
    try:
        length, kind, call_id = HEADER.unpack(await reader.readexactly(HEADER.size))
        if length > MAX_PAYLOAD_BYTES:
            raise ValueError(f"frame of {length} bytes is over {MAX_PAYLOAD_BYTES}")
        payload = await reader.readexactly(length) if length else b""
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return Kind(kind), call_id, payload


def refusal(payload: bytes) -> QuartetError:
    """What an ERROR says. ValueError: no worker of ours says it."""
    try:
        content = json.loads(payload)
    except RecursionError:
        content = None
    match content:
        case {"reason": str(reason), "message": str(message), "metadata": dict(metadata)}:
            told = {name: str(value) for name, value in metadata.items()}
        case _:
            raise ValueError(f"an error of another form: {payload[:200]!r}")
    if reason not in CODES:  # the environment's interpreter has a newer release
        reason, told = "INTERNAL", {**told, "unknown_reason": reason}
    error = QuartetError(reason, message)
    error.metadata = told  # of any names, and one more than an error of ours has
    return error
