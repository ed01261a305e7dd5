"""How the front writes its answers: signs of life, faults on the way, large ones beside the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import pytest
import structlog
from quartet.kit import stream as kit_stream
from quartet_inference.engine import Delta, Finish, Reason, Request, Span
from quartet_inference.openai import answers

from .openai_door import Door, until

#: More than the buffers between two processes hold.
LENGTH = 16 << 20


@pytest.mark.parametrize("path", ["completions", "responses"])
async def test_an_idle_stream_shows_signs_of_life_and_goes_on(
    door: Door, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """answers.py 2: proxies and clients give up silent connections."""
    monkeypatch.setattr(kit_stream.with_heartbeats, "__defaults__", (0.02,))
    asked = {"model": door.model, "stream": True, ("prompt" if path == "completions" else "input"): "hi"}
    await door.engine.pause()
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as session,
        session.post(f"http://{door.address}/v1/{path}", json=asked) as answer,
    ):
        assert answer.status == 200
        for _ in range(3):
            while (line := await answer.content.readline()) != b": alive\n":
                assert line == b"\n" or line.startswith((b"event: response.", b"data: ")), line
            assert await answer.content.readline() == b"\n"
        await door.engine.resume()
        rest = (await answer.content.read()).decode()
    told = [json.loads(line[6:]) for line in rest.splitlines() if line.startswith("data: {")]
    if path == "completions":
        assert told[-1]["choices"][0]["finish_reason"] and rest.endswith("data: [DONE]\n\n")
    else:
        assert told[-1]["type"] in ("response.completed", "response.incomplete")


@pytest.mark.parametrize("path", ["completions", "responses"])
async def test_a_fault_within_a_stream_is_its_last_event(
    door: Door, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """answers.py 2: else its caller would wait until it loses patience."""

    async def breaks(request: Request) -> AsyncIterator[Delta]:
        yield Delta(0, [71, 72], [-1.0, -1.0], [Span(0, 2, 0)])
        raise RuntimeError("secret")

    monkeypatch.setattr(door.engine, "generate", breaks)
    asked = {"model": door.model, "stream": True, ("prompt" if path == "completions" else "input"): "hi"}
    with structlog.testing.capture_logs() as said:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as session,
            session.post(f"http://{door.address}/v1/{path}", json=asked) as answer,
        ):
            assert answer.status == 200
            told = await answer.text()
    last = told.strip().rpartition("data: ")[2]
    assert "internal_error" in told and "its log says why" in last and "secret" not in told
    assert [one["path"] for one in said if one["log_level"] == "error"] == [f"/v1/{path}"]
    await until(lambda: door.under_way() == 0)


async def test_small_answers_are_written_at_once_and_large_ones_in_a_thread(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """answers.py 4: by their tokens, all choices together, or by what is told of each token."""
    wrote: list[bool] = []

    class Watched:
        @staticmethod
        def dumps(answer: Any) -> str:
            wrote.append(threading.current_thread() is threading.main_thread())
            return json.dumps(answer)

    monkeypatch.setattr(answers, "json", Watched)
    monkeypatch.setattr(answers, "INLINE_TOKENS", 8)
    one: dict[str, Any] = {"prompt": [3, 5], "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    for asked, at_once in (
        (one, True),
        ({**one, "logprobs": 0}, True),
        ({**one, "max_tokens": 9}, False),
        ({**one, "max_tokens": 5, "n": 2}, False),
        ({**one, "logprobs": 1}, False),
        ({**one, "echo": True}, False),
    ):
        wrote.clear()
        answer = await door.complete(**asked)
        assert (wrote, len(answer.choices)) == ([at_once], asked.get("n", 1)), asked


async def test_large_pieces_of_a_stream_are_written_in_a_thread(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """answers.py 4: a piece is large by what is told of each token, the end of a choice by its length."""
    told: list[tuple[str, bool]] = []
    tell = answers._Teller.tell

    def watched(self: Any, number: int, event: Any) -> bytes:
        told.append((type(event).__name__, threading.current_thread() is threading.main_thread()))
        return tell(self, number, event)

    monkeypatch.setattr(answers._Teller, "tell", watched)
    monkeypatch.setattr(answers, "INLINE_TOKENS", 8)
    asked: dict[str, Any] = {"prompt": [3, 5], "stream": True, "extra_body": {"ignore_eos": True}}
    for tokens_, logprobs, at_once in ((8, 0, True), (9, 0, False), (8, 1, None)):
        told.clear()
        async for _ in await door.complete(**asked, max_tokens=tokens_, logprobs=logprobs):
            pass
        pieces, ends = ([at for kind, at in told if (kind == "Ended") == end] for end in (False, True))
        assert pieces == [at_once is not None] * len(pieces) and pieces
        assert ends == [bool(at_once)]


@asynccontextmanager
async def asked(door: Door, **body: Any) -> AsyncIterator[asyncio.StreamReader]:
    """A connection by which a completion was asked for, whose answer nobody reads by itself."""
    host, _, port = door.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 10)
    sent = json.dumps({"model": door.model, "prompt": "hi", **body}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(sent) + sent)
    await until(lambda: door.under_way() == 1)
    yield reader
    writer.close()


async def read(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """How much comes, and its end; the connection ends with it."""
    size, told = 0, b""
    async with asyncio.timeout(60):
        with suppress(ConnectionResetError):
            while piece := await reader.read(1 << 20):
                size, told = size + len(piece), (told + piece)[-1000:]
    return size, told


def at_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pieces of streams fill the buffers of both machines."""
    tell = answers._Teller.tell

    def long(self: Any, number: int, event: Any) -> bytes:
        return tell(self, number, event) + b": " + b"x" * LENGTH + b"\n\n"

    monkeypatch.setattr(answers._Teller, "tell", long)


async def test_what_a_caller_has_not_read_holds_up_its_own_generation_and_no_other(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """answers.py 3"""
    at_length(monkeypatch)
    made: list[int] = []

    async def counted(request: Request) -> AsyncIterator[Delta | Finish]:
        for number in range(5):
            made.append(number)
            yield Delta(0, [97], [-1.0], [Span(number, 1, 0)])
        yield Finish(0, Reason.LENGTH, "", None, 0)

    with monkeypatch.context() as patched:
        patched.setattr(door.engine, "generate", counted)
        async with asked(door, stream=True) as reader:
            await until(lambda: bool(made))
            patched.undo()
            for _ in range(3):
                assert len((await door.complete(max_tokens=4)).choices) == 1
            assert len(made) < 5 and door.under_way() == 1, "what comes next is made when this was read"
            size, told = 0, b""
            async with asyncio.timeout(60):
                while not told.endswith(b"\r\n0\r\n\r\n"):
                    piece = await reader.read(1 << 20)
                    size, told = size + len(piece), (told + piece)[-1000:]
    assert len(made) == 5 and size > 5 * LENGTH
    await until(lambda: door.under_way() == 0)


async def test_who_does_not_read_the_end_of_a_stream_loses_the_connection(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """answers.py 1: nobody waits for him, and nothing is kept for him."""
    at_length(monkeypatch)
    monkeypatch.setattr(answers, "LAST_WORDS_SECONDS", 0.2)
    door.allow(0.5)
    async with asked(door, stream=True) as reader:
        await until(lambda: door.under_way() == 0)
        size, told = await read(reader)
    assert size < LENGTH and b"timeout" not in told


async def test_who_reads_slowly_is_told_why_a_stream_ends(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """answers.py 1 and 2"""
    at_length(monkeypatch)
    monkeypatch.setattr(answers, "LAST_WORDS_SECONDS", 60.0)
    ends, last_words = asyncio.Event(), answers._last_words

    async def noted(*arguments: Any) -> None:
        ends.set()
        await last_words(*arguments)

    monkeypatch.setattr(answers, "_last_words", noted)
    told = b""
    for limit_s in (0.3, 3.0, 20.0):  # on a slow machine a short one is over before anything is told
        door.allow(limit_s)
        async with asked(door, stream=True) as reader:
            await until(lambda: ends.is_set() or door.under_way() == 0)
            if not ends.is_set():
                continue
            await asyncio.sleep(0.05)
            assert door.under_way() == 1, "it waits for him to read"
            async with asyncio.timeout(60):
                while not told.endswith(b"\r\n0\r\n\r\n"):
                    told = told[-1000:] + await reader.read(1 << 20)
            break
    assert b'"code": "timeout"' in told[-1000:]
    await until(lambda: door.under_way() == 0)


async def test_who_does_not_read_an_answer_loses_the_connection(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """answers.py 1"""

    class Long:
        @staticmethod
        def dumps(answer: Any) -> str:
            return json.dumps(answer | {"more": "x" * LENGTH})

    monkeypatch.setattr(answers, "json", Long)
    assert len((await door.complete(max_tokens=1)).more) == LENGTH
    door.allow(0.5)
    async with asked(door, max_tokens=1) as reader:
        await until(lambda: door.under_way() == 0)
        size, _ = await read(reader)
    assert size < LENGTH
