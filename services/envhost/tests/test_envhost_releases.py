"""A front of a newer release than the interpreter that an environment has: no setting is passed over."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from quartet.v1 import common_pb2, envhost_service_pb2
from quartet_envhost.frames import HEADER, Kind
from quartet_envhost.worker import Worker

# Field 999, a varint: 1. What a release to come writes for a setting that it has.
SETTING = b"\xb8\x3e\x01"


class Line:
    """Takes what a worker sends."""

    def __init__(self) -> None:
        self.frames: list[tuple[int, bytes]] = []

    def write(self, frame: bytes) -> None:
        _, kind, _ = HEADER.unpack(frame[: HEADER.size])
        self.frames.append((kind, frame[HEADER.size :]))


async def test_a_worker_refuses_a_setting_that_it_does_not_know() -> None:
    """worker.py 4"""
    line: Any = Line()
    worker = Worker(asyncio.StreamReader(), line)
    sampling = common_pb2.SamplingParams(temperature=0.5)
    sampling.MergeFromString(SETTING)
    request = envhost_service_pb2.RunRolloutsRequest(members=[0], sampling=sampling)
    await worker._answer(1, worker._interact, request.SerializeToString())
    ((kind, payload),) = line.frames
    assert kind == Kind.ERROR
    said = json.loads(payload)
    assert said["reason"] == "NOT_IMPLEMENTED" and "upgrade" in said["message"]
    assert said["metadata"]["field"] == "SamplingParams, field 999"
