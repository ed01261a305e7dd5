"""What the front is told of a rollout and of its environment: names that a line has room for, and no more
than fits into a message.

1. What an environment calls a reward, a metric or an agent stays as it is where it is 1 to MAX_NAME printable
   characters ("judge/clarity", "format reward"). Verifiers takes any text, such as a judge's criterion in
   several lines: of such a name blanks stand for what is not printable, its end is left out, and a digest of
   it follows, so that two names stay two. Equal names stay equal, in every process.
2. A rollout that is too large loses its messages and its task's data, then experts of its samples; then it is
   a failure.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

from quartet import experts
from quartet.v1 import envhost_service_pb2, rollout_pb2

from quartet_envhost import failures
from quartet_envhost.frames import MAX_MESSAGE_BYTES

#: Longer ones fill a line by themselves; MLflow takes 250 characters, with what stands before it.
MAX_NAME: Final = 128
_DIGEST_BYTES: Final = 4


def described(info: envhost_service_pb2.EnvironmentInfo) -> envhost_service_pb2.EnvironmentInfo:
    """A description, as it is told."""
    for names in (info.rewards, info.metrics):
        names[:] = sorted(map(name_of, names))
    _rename(info.weights)
    return info


def told(rollout: rollout_pb2.Rollout) -> rollout_pb2.Rollout:
    """A rollout, as it is told."""
    for values in (rollout.rewards, rollout.metrics, *(part.rewards for part in rollout.parts)):
        _rename(values)
    for part in rollout.parts:
        part.agent = name_of(part.agent)
    return _bounded(rollout)


def name_of(name: str) -> str:
    """The name, or what stands for it."""
    if name.strip() and len(name) <= MAX_NAME and name.isprintable():
        return name
    digest = f"~{hashlib.blake2b(name.encode(), digest_size=_DIGEST_BYTES).hexdigest()}"
    words = " ".join("".join(one if one.isprintable() else " " for one in name).split())
    return f"{words[: MAX_NAME - len(digest)]}{digest}"


def _rename(values: Any) -> None:
    """The keys of a map of a message."""
    names = {name: name_of(name) for name in values}
    for name, other in names.items():
        if other != name:
            values[other] = values.pop(name)


def _bounded(rollout: rollout_pb2.Rollout) -> rollout_pb2.Rollout:
    if rollout.ByteSize() <= MAX_MESSAGE_BYTES:
        return rollout
    del rollout.messages[:]
    rollout.ClearField("task_json")
    experts.make_room(rollout.samples, rollout.ByteSize() - MAX_MESSAGE_BYTES)
    size = rollout.ByteSize()
    if size <= MAX_MESSAGE_BYTES:
        return rollout
    text = f"the rollout has {size} bytes, more than a message may have ({MAX_MESSAGE_BYTES})"
    return failures.failed(rollout.member, failures.HOST, text, retryable=False)
