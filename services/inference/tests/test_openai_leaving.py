"""Callers of the front who leave while they are answered."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

import pytest
import structlog
from quartet_inference.openai import answers

from .openai_door import Door, say, until


async def test_who_resets_the_connection_before_the_last_words_is_no_fault_of_ours(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop hears of the reset only after it has written."""
    host, _, port = door.address.rpartition(":")
    caller = socket.create_connection((host, int(port)))
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    last_words = answers._last_words

    async def too_late(*arguments: Any) -> None:
        caller.close()
        await last_words(*arguments)

    monkeypatch.setattr(answers, "_last_words", too_late)
    say(monkeypatch, door, "hello")
    body = json.dumps({"model": door.model, "prompt": "hi", "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with structlog.testing.capture_logs() as said:
        caller.sendall(head.encode() + body)
        await until(lambda: caller.fileno() < 0 and door.under_way() == 0)
    assert [one for one in said if one["log_level"] == "error"] == []
