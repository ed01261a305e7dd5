"""The OpenAI-compatible front: whom it refuses, whom it gives up, and how it says so."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from quartet.inference import INFERENCE
from quartet_inference.engine import Delta, Request, Span
from quartet_inference.openai import answers, server
from quartet_inference.openai.parameters import MAX_DEPTH
from quartet_inference.prompts import Prompts

from .openai_door import TOOL, Door, opened, say, until

BAD: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs", "invalid_value"),
    ({"top_logprobs": -1, "logprobs": True}, 400, "top_logprobs", "invalid_value"),
    ({"top_logprobs": True, "logprobs": True}, 400, "top_logprobs", "invalid_value"),
    ({"top_logprobs": 3}, 400, "top_logprobs", "invalid_value"),
    ({"top_logprobs": 3, "logprobs": False}, 400, "top_logprobs", "invalid_value"),
    ({"top_logprobs": 20, "logprobs": True, "n": 256}, 400, "top_logprobs", "invalid_value"),
    ({"logit_bias": {"5": 1}}, 400, "logit_bias", "unsupported_parameter"),
    ({"response_format": {"type": "grammar"}}, 400, "response_format.type", "invalid_value"),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema.schema",
     "invalid_value"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "set"}}}}, 400,
     "response_format", None),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, 400, "guided_regex", "invalid_value"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, 400, "ignore_eos", None),
    ({"structured_outputs": {}}, 400, "structured_outputs", "invalid_value"),
    ({"structured_outputs": {"regex": "a("}}, 400, "structured_outputs.regex", None),
    ({"structured_outputs": {"structural_tag": "x"}}, 400, "structured_outputs.structural_tag",
     "unsupported_parameter"),
    ({"guided_json": "{"}, 400, "guided_json", None),
    ({"guided_choice": [""]}, 400, "guided_choice[0]", "invalid_value"),
    ({"guided_grammar": "start: x"}, 400, "guided_grammar", None),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, 400,
     "tool_choice", "invalid_value"),
    ({"tool_choice": "required"}, 400, "tool_choice", "invalid_value"),
    ({"frobnicate": 1}, 400, "frobnicate", "unsupported_parameter"),
    ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs", "invalid_value"),
    ({"chat_template_kwargs": {"a": "x" * 8192}}, 400, "chat_template_kwargs", "invalid_value"),
    ({"chat_template_kwargs": ["a"]}, 400, "chat_template_kwargs", "invalid_value"),
    ({"temperature": "hot"}, 400, "temperature", "invalid_value"),
    ({"temperature": -1}, 400, "temperature", None),
    ({"top_p": 0}, 400, "top_p", None),
    ({"max_tokens": 0}, 400, "max_tokens", "invalid_value"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, 400, "max_completion_tokens", "invalid_value"),
    ({"n": 0}, 400, "n", "invalid_value"),
    ({"n": 257}, 400, "n", "invalid_value"),
    ({"stop": ["x"] * 17}, 400, "stop", None),
    ({"stop_token_ids": [999]}, 400, "stop_token_ids", None),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", "invalid_value"),
    ({"messages": []}, 400, "messages", "invalid_value"),
    ({"messages": [{"role": "judge", "content": "x"}]}, 400, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, 400,
     "messages[0].mood", "unsupported_parameter"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400,
     "messages[0].content[0].type", "unsupported_parameter"),
    ({"messages": [{"role": "user", "content": "x" * 300}]}, 400, None, "context_length_exceeded"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": True,
                                                  "parameters": {"not": {}}}}]}, 400, "tools.strict", None),
    ({"model": "another"}, 404, "model", "model_not_found"),
    ({"model": None}, 400, "model", "invalid_value"),
    ({"model": 3}, 400, "model", "invalid_value"),
    ({"model": ["another"]}, 400, "model", "invalid_value"),
    ({"prompt_cache_options": None, "prompt_cache_option": {}}, 400, "prompt_cache_option",
     "unsupported_parameter"),
    ({"stream": None, "stream_options": {"include_usage": None}}, 400, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, 400, "stream_options.include_usage",
     "invalid_value"),
    ({"stream": True, "stream_options": {"usage": None}}, 400, "stream_options.usage",
     "unsupported_parameter"),
    ({"exact_policy_version": 4}, 412, None, "version_unavailable"),
    ({"run_id": "another", "min_policy_version": 0}, 404, None, "model_not_found"),
]  # fmt: skip


async def test_what_is_not_served_is_refused_by_name(model_folder: Path) -> None:
    async with opened(model_folder, version_wait_seconds=0.2) as door:
        for extra, status, param, code in BAD:
            body = {"model": door.model, "messages": [{"role": "user", "content": "x"}], **extra}
            have, error = await door.refusal(**body)
            assert have == status, (extra, error)
            assert error["param"] == param, (extra, error)
            assert error["code"] == code or code is None, (extra, error)
            assert error["message"]
        harmless: dict[str, Any] = {
            "user": "me",
            "store": False,
            "metadata": {"a": "b"},
            "service_tier": "auto",
            "extra_body": {"prompt_cache_options": {"mode": "implicit"}},
        }
        neutral: dict[str, Any] = {
            "parallel_tool_calls": True,
            "response_format": {"type": "text"},
            "top_logprobs": None,
            "logit_bias": {},
        }
        assert (await door.chat(max_tokens=2, **harmless, **neutral)).choices
        completion_bad: list[tuple[dict[str, Any], str]] = [
            ({"logprobs": 21}, "logprobs"),
            ({"logprobs": -1}, "logprobs"),
            ({"logprobs": 21, "echo": True}, "logprobs"),
            ({"logprobs": 20, "max_tokens": 43_000}, "prompt"),
            ({"top_logprobs": 3}, "top_logprobs"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"suffix": "x"}, "suffix"),
            ({"prompt": []}, "prompt"),
            ({"prompt": [[1], ["a"]]}, "prompt"),
            ({"prompt": ["x"] * 129, "n": 2}, "prompt"),
            ({"prompt": [-1]}, "prompt"),
            ({"prompt": [260]}, "prompt"),
            ({"prompt": ""}, "prompt"),
            ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ]
        for extra, param in completion_bad:
            status, error = await door.refusal("completions", **{"model": door.model, "prompt": "x", **extra})
            assert status == 400 and error["param"].startswith(param), (extra, error)


@pytest.mark.parametrize("levels", [240, 300, 900])
async def test_schemas_are_refused_where_they_are_nested_too_deep_to_be_handed_on(
    door: Door, levels: int
) -> None:
    """Long bodies are parsed in a thread: what fits its stack does not fit that of the event loop."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels // 2):
        schema = {"type": "object", "properties": {"a": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "deep", "schema": schema}}
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    parameters = {"name": "f", "parameters": schema}
    asked: list[tuple[str, dict[str, Any], str]] = [
        ("chat/completions", chat | {"response_format": form}, "response_format"),
        ("chat/completions", chat | {"tools": [{"type": "function", "function": parameters}]}, "tools"),
        ("completions", {"prompt": "x", "max_tokens": 1, "guided_json": schema}, "guided_json"),
        ("responses", {"input": "x", "tools": [{"type": "function", **parameters}]}, "tools"),
    ]
    async with aiohttp.ClientSession(f"http://{door.address}/v1/") as session:
        for path, body, param in asked:
            async with session.post(path, json={"model": door.model, **body}) as response:
                answer = await response.json()
                if levels <= MAX_DEPTH and param == "tools":
                    assert response.status == 200, answer
                else:  # no grammar is made of a form so deep, either
                    why = f"deeper than {MAX_DEPTH} levels" if levels > MAX_DEPTH else "cannot be enforced"
                    assert (response.status, answer["error"]["param"]) == (400, param), answer
                    assert why in answer["error"]["message"]


async def test_raw_bodies_urls_and_methods(door: Door) -> None:
    async with aiohttp.ClientSession(f"http://{door.address}") as session:
        half_pair = rb"""{"model": "m", "messages": [{"role": "user", "content": "\ud83d"}]}"""
        for body, status in (
            (b"{", 400),
            (b"[]", 400),
            (b"[" * 100_000, 400),
            (b"\xed\xa0\xbd", 400),
            (half_pair, 400),
            (b"x" * (5 << 20), 413),
        ):
            async with session.post("/v1/chat/completions", data=body) as response:
                assert response.status == status
                assert (await response.json())["error"]["message"]
        emoji = rb"""{"model": "%s", "prompt": "\ud83d\ude00", "max_tokens": 1}""" % door.model.encode()
        async with session.post("/v1/completions", data=emoji) as response:
            assert response.status == 200
        async with session.get("/v1/nothing") as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (404, "unknown_url")
            assert "/v1/chat/completions" in error["message"]
        async with session.get("/v1/chat/completions") as response:
            assert response.status == 405 and (await response.json())["error"]
        async with session.get("/health") as response:
            assert response.status == 200
        packed = {"Content-Encoding": "gzip"}  # last: the connection ends with it
        async with session.post("/v1/completions", data=b"no gzip", headers=packed) as response:
            assert response.status == 400 and (await response.json())["error"]["code"] == "invalid_body"


async def test_a_session_whose_name_is_no_text_is_refused_by_name(door: Door) -> None:
    host, _, port = door.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"model": door.model, "prompt": "hi", "max_tokens": 1}).encode()
    head = b"Host: x\r\nConnection: close\r\nX-Session-ID: caf\xe9\r\nContent-Length: %d\r\n\r\n" % len(body)
    writer.write(b"POST /v1/completions HTTP/1.1\r\n" + head + body)
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert b" 400 " in answer.partition(b"\r\n")[0]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["param"] == "X-Session-ID"


async def test_the_key_is_asked_for(model_folder: Path, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("sesame\n")
    async with opened(model_folder, openai={"api_key_file": key_file}) as door:
        for key in ("wrong", "sesame2", "é"):
            async with door.client(key if key.isascii() else "x") as client:
                with pytest.raises(openai.AuthenticationError):
                    await client.models.list()
        async with door.client("sesame") as client:
            assert (await client.models.list()).data
        status, error = await door.refusal(model=door.model, messages=[])
        assert status == 401 and error["code"] == "invalid_api_key"
        host, _, port = door.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sesame\xff\r\n\r\n")
        assert b" 401 " in await asyncio.wait_for(reader.readline(), 30), "bytes that are no text are no key"
        writer.close()
        async with aiohttp.ClientSession() as session, session.get(f"http://{door.address}/health") as answer:
            assert answer.status == 200, "load balancers have no key"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_that_leaves_ends_its_generation(door: Door, stream: bool) -> None:
    await door.engine.pause()
    body = {"model": door.model, "prompt": "hi", "max_tokens": 200, "ignore_eos": True, "stream": stream}
    async with aiohttp.ClientSession() as session:
        request = asyncio.create_task(session.post(f"http://{door.address}/v1/completions", json=body))
        await until(lambda: door.engine.info().waiting == 1)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    await until(lambda: door.engine.info().waiting == 0)
    assert door.engine.info().tokens_sampled == 0


async def test_faults_deadlines_and_overload_are_answers(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(model_folder, openai={"max_concurrent_requests": 1}) as door:
        await door.engine.pause()
        slow = asyncio.create_task(door.chat())
        await until(lambda: door.engine.info().waiting == 1)
        with pytest.raises(openai.RateLimitError) as busy:
            await door.chat()
        assert busy.value.response.headers["Retry-After"] == "1"
        slow.cancel()
        await until(lambda: door.under_way() == 0)
        door.allow(0.3)
        for asked in (door.chat(), door.plain.responses.create(model=door.model, input="hi")):
            with pytest.raises(openai.InternalServerError) as late:
                await asked
            assert late.value.status_code == 504
            assert late.value.response.headers["x-should-retry"] == "false"
        with pytest.raises(openai.InternalServerError) as unbegun:
            await door.chat(stream=True)
        assert unbegun.value.status_code == 504, "a stream that has told nothing has a status of its own"
        await door.engine.resume()

        async def one_word(request: Request) -> AsyncIterator[Delta]:
            yield Delta(0, [71, 72], [-1.0, -1.0], [Span(0, 2, 0)])
            await asyncio.Event().wait()

        monkeypatch.setattr(door.engine, "generate", one_word)
        door.allow(1.0)
        with pytest.raises(openai.APIError) as broken:
            async for _ in await door.chat(stream=True):
                pass
        assert broken.value.code == "timeout", "one that has told something ends with an event"

        def fault(*_: Any) -> None:
            raise RuntimeError("secret")

        monkeypatch.setattr(Prompts, "of", fault)
        door.allow(60)
        await until(lambda: door.under_way() == 0)
        status, error = await door.refusal(model=door.model, messages=[{"role": "user", "content": "x"}])
        assert status == 500 and "secret" not in json.dumps(error)


async def test_callers_that_send_or_read_too_slowly_are_given_up(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 8: whoever does not send its body, or does not read its answer, holds no place for ever."""
    limits = {"request_seconds": 0.3, "max_concurrent_requests": 1}
    async with opened(model_folder, openai=limits) as door:
        host, _, port = door.address.rpartition(":")

        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        async with asyncio.timeout(30):
            assert b" 504 " in await reader.readline()
        writer.close()

        asked, last_words = asyncio.Event(), answers._last_words

        async def once_asked(*args: Any) -> None:
            await asked.wait()  # it has its place for as long as this test looks at it
            await last_words(*args)

        monkeypatch.setattr(answers, "LAST_WORDS_SECONDS", 0.2)
        monkeypatch.setattr(answers, "_last_words", once_asked)
        door.allow(1.0)
        say(monkeypatch, door, "abcdefg", times=400_000)
        body = json.dumps({"model": door.model, "prompt": "hi", "stream": True}).encode()
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.to_thread(deaf.connect, (host, int(port)))
        deaf.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        await until(lambda: door.under_way() == 1)
        door.allow(60)
        status, _ = await door.refusal("completions", model=door.model, prompt="hi")
        assert status == 429, "it is still being answered"
        asked.set()
        await until(lambda: door.under_way() == 0)
        monkeypatch.undo()
        assert (await door.complete(max_tokens=1)).choices, "its place is free"
        deaf.close()


async def test_prompts_of_megabytes_are_refused_at_once(door: Door) -> None:
    long = "so " * (1 << 20)
    chat = {"messages": [{"role": "user", "content": long}]}
    for path, body in (("completions", {"prompt": long}), ("chat/completions", chat)):
        status, error = await door.refusal(path, model=door.model, **body)
        assert (status, error["code"]) == (400, "context_length_exceeded")
        assert "at least" in error["message"] and "at most 255" in error["message"]
        assert "this model's maximum context length is" in error["message"].lower(), "as clients look for it"


async def test_connections_are_bounded_and_silent_ones_end(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariants 7 and 8: whoever connects and says nothing holds no place for ever."""
    monkeypatch.setattr(server, "IDLE_SECONDS", 3.0)
    async with opened(model_folder, openai={"max_connections": 3}) as door, door.client() as client:
        host, _, port = door.address.rpartition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        status, error = await door.refusal("completions", model=door.model, prompt="hi")
        assert (status, error["code"]) == (429, "overloaded")
        with pytest.raises(openai.RateLimitError, match="3 connections are open"):
            await client.models.list()
        async with asyncio.timeout(30):
            for reader, writer in silent:
                assert await reader.read() == b"", "closed without a word"
                writer.close()
        assert (await client.models.list()).data


async def test_health_says_why_a_replica_is_not_ready(door: Door) -> None:
    door.health.set_not_ready(INFERENCE, "the canary is wrong")
    async with aiohttp.ClientSession() as session, session.get(f"http://{door.address}/health") as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
        assert "the canary is wrong" in (await answer.json())["error"]["message"]


async def test_drain_lets_running_requests_end(door: Door) -> None:
    await door.engine.pause()
    running = asyncio.create_task(door.complete(max_tokens=5))
    await until(lambda: door.engine.info().waiting == 1)
    door.health.drain()
    with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
        await door.complete(max_tokens=5)
    await door.engine.resume()
    assert (await running).usage.completion_tokens >= 1


async def test_a_drain_is_told_as_long_as_load_balancers_have_to_notice(model_folder: Path) -> None:
    """server.py 2: by a new connection, too; who leaves earlier does not wait for that."""
    async with opened(model_folder, server={"drain_delay_seconds": 60}) as door:
        door.health.drain()
        await asyncio.sleep(0.1)
        async with aiohttp.ClientSession() as session:
            body = {"model": door.model, "prompt": "a"}
            for asked in (
                session.get(f"http://{door.address}/health"),
                session.post(f"http://{door.address}/v1/completions", json=body),
            ):
                async with asked as answer:
                    assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
                    assert "draining" in await answer.text()
        left = time.monotonic()
    assert time.monotonic() - left < 30


async def test_a_replica_without_weights_says_when_to_ask_again(model_folder: Path) -> None:
    """Else a client's own two repetitions are over within seconds, before any weights can come."""
    async with opened(model_folder, weights_address="127.0.0.1:1") as door:
        with pytest.raises(openai.InternalServerError) as away:
            await door.chat()
        assert (away.value.status_code, away.value.code) == (503, "not_ready")
        assert away.value.response.headers["Retry-After"] == "5"
