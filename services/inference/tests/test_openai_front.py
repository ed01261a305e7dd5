"""The OpenAI-compatible front, by the real client of that API."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from quartet.kit.health import Health
from quartet.v1 import inference_service_pb2 as pb
from quartet_inference import app
from quartet_inference.answering import Answerer
from quartet_inference.config import InferenceConfig
from quartet_inference.engine import Delta, Finish, Reason, Request, ServedWeights, Span
from quartet_inference.openai import answers, server

Make = Callable[..., Any]
SEEDED: dict[str, Any] = {"seed": 7, "max_tokens": 40, "temperature": 1.0}
TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


class Door:
    """A running front, a client of it, and the engine behind it."""

    def __init__(self, address: str, model: str, engine: Any, encode: Any, health: Health) -> None:
        self.address = address
        self.encode = encode
        self.model = model
        self.engine = engine
        self.health = health
        self.plain = self.client()  # open as long as streams are read

    def client(self, key: str = "none", **more: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"http://{self.address}/v1", api_key=key, max_retries=0, timeout=30, **more
        )

    async def chat(self, text: str = "hi", **more: Any) -> Any:
        messages: Any = [{"role": "user", "content": text}]
        return await self.plain.chat.completions.create(**{"model": self.model, "messages": messages, **more})

    async def complete(self, **more: Any) -> Any:
        return await self.plain.completions.create(**{"model": self.model, "prompt": "hi", **more})

    async def refusal(self, path: str = "chat/completions", **body: Any) -> tuple[int, dict[str, Any]]:
        """Status and error of a raw request."""
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"http://{self.address}/v1/{path}", json=body) as response,
        ):
            answer = await response.json()
            assert set(answer) == {"error"}, answer
            assert set(answer["error"]) == {"message", "type", "param", "code"}
            return response.status, answer["error"]


@asynccontextmanager
async def opened(folder: Path, **settings: Any) -> AsyncIterator[Door]:
    openai_settings = {"address": "127.0.0.1:0", **settings.pop("openai", {})}
    config = InferenceConfig.model_validate(
        {
            "model": folder,
            "max_model_len": 256,
            "embedded": {"kv_cache_bytes": 1 << 24, "max_num_seqs": 8},
            "openai": openai_settings,
            **settings,
        }
    )
    caught: dict[str, Any] = {}
    original = server.serving

    @asynccontextmanager
    async def listening(front: Any, *arguments: Any) -> AsyncIterator[str]:
        async with original(front, *arguments) as address:
            caught.update(address=address, engine=front._engine, encode=front._chat.encode)
            yield address

    health = Health()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "serving", listening)
        async with app.services(config, health):
            door = Door(caught["address"], folder.name, caught["engine"], caught["encode"], health)
            async with door.plain:
                yield door


@pytest.fixture
async def door(model_folder: Path) -> AsyncIterator[Door]:
    async with opened(model_folder) as one:
        yield one


async def test_chat_whole_and_streamed_are_equal(door: Door) -> None:
    whole = await door.chat(**SEEDED, n=3, logprobs=True, extra_body={"return_token_ids": True})
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.system_fingerprint == f"{door.model}@0"
    usage = whole.usage
    assert usage.completion_tokens == sum(len(c.token_ids) for c in whole.choices)
    assert usage.prompt_tokens == len(whole.prompt_token_ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    for choice in whole.choices:
        assert len(choice.logprobs.content) == len(choice.token_ids)
        assert all(entry.logprob <= 0 for entry in choice.logprobs.content)
        assert choice.policy_versions == [{"start": 0, "length": len(choice.token_ids), "policy_version": 0}]
        assert (choice.finish_reason == "stop") == (choice.token_ids[-1] == 258)

    stream = await door.chat(
        **SEEDED,
        n=3,
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    )
    text, ids, ends, logprobs = ["", "", ""], [[], [], []], {}, [[], [], []]  # type: ignore[var-annotated]
    last = None
    async for chunk in stream:
        last = chunk
        for choice in chunk.choices:
            text[choice.index] += choice.delta.content or ""
            ids[choice.index] += getattr(choice, "token_ids", None) or []
            if choice.logprobs:
                logprobs[choice.index] += [entry.logprob for entry in choice.logprobs.content]
            if choice.finish_reason:
                assert choice.index not in ends
                ends[choice.index] = choice.finish_reason
    assert last is not None and last.choices == []
    assert (last.usage.prompt_tokens, last.usage.total_tokens) == (usage.prompt_tokens, usage.total_tokens)
    assert last.usage.prompt_tokens_details.cached_tokens > usage.prompt_tokens_details.cached_tokens
    for choice in whole.choices:
        assert text[choice.index] == choice.message.content
        assert ids[choice.index] == choice.token_ids
        assert logprobs[choice.index] == pytest.approx([e.logprob for e in choice.logprobs.content], abs=1e-6)
        assert ends[choice.index] == choice.finish_reason


async def test_completions_of_texts_and_tokens(door: Door) -> None:
    by_text = await door.complete(**SEEDED, logprobs=0, extra_body={"return_token_ids": True})
    (choice,) = by_text.choices
    assert choice.prompt_token_ids == [71, 72] or len(choice.prompt_token_ids) == 2
    by_tokens = await door.complete(**{**SEEDED, "prompt": choice.prompt_token_ids})
    assert by_tokens.choices[0].text == choice.text and choice.text
    assert "".join(choice.logprobs.tokens).replace("<|im_end|>", "").startswith(choice.text[:3])
    assert len(choice.logprobs.token_logprobs) == len(choice.token_ids)

    both = await door.complete(**{**SEEDED, "prompt": ["hi", "ho"]}, n=2)
    assert [c.index for c in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == choice.text and both.usage.prompt_tokens == 4
    streamed = await door.complete(**{**SEEDED, "prompt": ["hi", "ho"]}, n=2, stream=True)
    text = [""] * 4
    async for chunk in streamed:
        for piece in chunk.choices:
            text[piece.index] += piece.text
    assert text == [c.text for c in both.choices]
    assert (await door.complete()).usage.completion_tokens <= 16, "the documented default"


async def test_stop_penalties_and_extras(door: Door) -> None:
    plain = await door.complete(**SEEDED, extra_body={"ignore_eos": True, "return_token_ids": True})
    text = plain.choices[0].text
    stop = next(c for c in text[3:] if c.isascii() and c.isprintable())
    for stream in (False, True):
        answer = await door.complete(
            **SEEDED, stop=[stop, "never"], stream=stream, extra_body={"ignore_eos": True}
        )
        chunks = [chunk async for chunk in answer] if stream else [answer]
        told = "".join(c.choices[0].text for c in chunks if c.choices)
        assert told == text[: text.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert chunks[-1].choices[0].stop_reason == stop
    greedy = [
        (await door.complete(temperature=0, max_tokens=20, extra_body=extra)).choices[0].text
        for extra in ({}, {"top_k": 1}, {"min_p": 1.0}, {"top_k": -1}, {"repetition_penalty": 1.0})
    ]
    assert len(set(greedy)) == 1
    assert (await door.complete(**SEEDED, extra_body={"top_k": 1})).choices[0].text[:5] == greedy[0][:5]
    penalised = await door.complete(temperature=0, max_tokens=20, frequency_penalty=2.0)
    assert penalised.choices[0].text != greedy[0]
    token = plain.choices[0].token_ids[4]
    by_token = await door.complete(
        **SEEDED, extra_body={"stop_token_ids": [token], "ignore_eos": True, "return_token_ids": True}
    )
    assert (
        by_token.choices[0].token_ids == plain.choices[0].token_ids[:5]
        or token in (plain.choices[0].token_ids[:4])
    )


async def test_a_negative_seed_repeats(door: Door) -> None:
    texts = {(await door.complete(**{**SEEDED, "seed": -3})).choices[0].text for _ in range(2)}
    assert len(texts) == 1


BAD: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({"top_logprobs": 3, "logprobs": True}, 400, "top_logprobs", "unsupported_parameter"),
    ({"logit_bias": {"5": 1}}, 400, "logit_bias", "unsupported_parameter"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format", "unsupported_parameter"),
    ({"tools": [TOOL], "tool_choice": "required"}, 400, "tool_choice", "unsupported_parameter"),
    ({"frobnicate": 1}, 400, "frobnicate", "unsupported_parameter"),
    ({"chat_template_kwargs": {"a": 1}}, 400, "chat_template_kwargs", "unsupported_parameter"),
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
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, 400,
     "tools[0].function.strict", "unsupported_parameter"),
    ({"model": "another"}, 404, "model", "model_not_found"),
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
        harmless = {"user": "me", "store": False, "metadata": {"a": "b"}, "service_tier": "auto"}
        neutral: dict[str, Any] = {
            "parallel_tool_calls": True,
            "response_format": {"type": "text"},
            "top_logprobs": None,
            "logit_bias": {},
        }
        assert (await door.chat(max_tokens=2, **harmless, **neutral)).choices
        completion_bad: list[tuple[dict[str, Any], str]] = [
            ({"echo": True}, "echo"),
            ({"logprobs": 2}, "logprobs"),
            ({"suffix": "x"}, "suffix"),
            ({"prompt": []}, "prompt"),
            ({"prompt": [[1], ["a"]]}, "prompt"),
            ({"prompt": ["x"] * 129, "n": 2}, "prompt"),
            ({"prompt": [-1]}, "prompt"),
            ({"prompt": [260]}, "tokens.token_ids"),
        ]
        for extra, param in completion_bad:
            status, error = await door.refusal("completions", **{"model": door.model, "prompt": "x", **extra})
            assert status == 400 and error["param"].startswith(param), (extra, error)


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
            assert response.status == 404 and (await response.json())["error"]["code"] == "unknown_url"
        async with session.get("/v1/chat/completions") as response:
            assert response.status == 405 and (await response.json())["error"]
        async with session.get("/health") as response:
            assert response.status == 200
        packed = {"Content-Encoding": "gzip"}  # last: the connection ends with it
        async with session.post("/v1/completions", data=b"no gzip", headers=packed) as response:
            assert response.status == 400 and (await response.json())["error"]["code"] == "invalid_body"


async def test_models_are_the_policy(door: Door) -> None:
    async with door.client() as client:
        (model,) = (await client.models.list()).data
        assert (model.id, model.max_model_len) == (door.model, 256)  # type: ignore[attr-defined]
        assert (await client.models.retrieve(door.model)).id == door.model
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("another")


async def test_a_served_adapter_is_a_model(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    info = replace(door.engine.info(), adapters=(ServedWeights("run-7", 3, b"d"),))
    monkeypatch.setattr(door.engine, "info", lambda: info)
    say(monkeypatch, door, "hello")
    asked: list[Request] = []
    written = door.engine.generate

    def spied(request: Request) -> Any:
        asked.append(request)
        return written(request)

    monkeypatch.setattr(door.engine, "generate", spied)
    cards = (await door.plain.models.list()).data
    assert [(card.id, card.policy_version) for card in cards] == [  # type: ignore[attr-defined]
        (door.model, 0),
        ("run-7", 3),
    ]
    answer = await door.chat(model="run-7", extra_body={"min_policy_version": 3})
    assert answer.choices[0].message.content == "hello" and answer.system_fingerprint == "run-7@3"
    assert (asked[0].run_id, asked[0].min_version) == ("run-7", 3)


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
        assert b" 401 " in await asyncio.wait_for(reader.readline(), 5), "bytes that are no text are no key"
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


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_faults_deadlines_and_overload_are_answers(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"request_seconds": 0.3, "max_concurrent_requests": 1}
    async with opened(model_folder, openai=limits) as door:
        await door.engine.pause()
        slow = asyncio.create_task(door.chat())
        await until(lambda: door.engine.info().waiting == 1)
        with pytest.raises(openai.RateLimitError) as busy:
            await door.chat()
        assert busy.value.response.headers["Retry-After"] == "1"
        with pytest.raises(openai.InternalServerError) as late:
            await slow
        assert late.value.status_code == 504
        stream = await door.chat(stream=True)
        with pytest.raises(openai.APIError) as broken:
            async for _ in stream:
                pass
        assert broken.value.code == "timeout"
        await door.engine.resume()

        def fault(*_: Any) -> None:
            raise RuntimeError("secret")

        monkeypatch.setattr(Answerer, "_prompt_of", fault)
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
        async with asyncio.timeout(5):
            assert b" 504 " in await reader.readline()
        writer.close()

        monkeypatch.setattr(answers, "LAST_WORDS_SECONDS", 0.2)
        say(monkeypatch, door, "abcdefg" * 400_000)
        body = json.dumps({"model": door.model, "prompt": "hi", "stream": True}).encode()
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.to_thread(deaf.connect, (host, int(port)))
        deaf.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        await asyncio.sleep(0.2)
        status, _ = await door.refusal("completions", model=door.model, prompt="hi")
        assert status == 429, "it is still being answered"
        await asyncio.sleep(1.0)
        monkeypatch.undo()
        assert (await door.complete(max_tokens=1)).choices, "its place is free"
        deaf.close()


async def test_drain_lets_running_requests_end(door: Door) -> None:
    await door.engine.pause()
    running = asyncio.create_task(door.complete(max_tokens=5))
    await until(lambda: door.engine.info().waiting == 1)
    door.health.drain()
    await asyncio.sleep(0.05)
    with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
        await door.complete(max_tokens=5)
    await door.engine.resume()
    assert (await running).usage.completion_tokens >= 1


async def test_tools_thinking_and_calls_come_in_their_fields(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the random model never writes is put into its mouth; everything around is real."""
    seen: list[pb.GenerateRequest] = []
    original = Answerer._prompt_of

    def spied(self: Answerer, request: pb.GenerateRequest) -> Any:
        seen.append(request)
        return original(self, request)

    monkeypatch.setattr(Answerer, "_prompt_of", spied)
    written = 'Well.\n<tool_call>\n{"name": "add", "arguments": {"a":  1}}\n</tool_call>'
    say(monkeypatch, door, written)
    answer = await door.chat(tools=[TOOL], max_tokens=200)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Well."
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a":  1}')
    assert [tool.name for tool in seen[-1].tools] == ["add"]

    stream = await door.chat(tools=[TOOL], max_tokens=200, stream=True)
    content, calls, reason = "", [], None
    async for chunk in stream:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        calls += delta.tool_calls or []
        reason = chunk.choices[0].finish_reason or reason
    assert (content, reason) == ("Well.", "tool_calls")
    assert [(c.index, c.function.name, c.function.arguments) for c in calls] == [(0, "add", '{"a":  1}')]

    refused_tools = await door.chat(tools=[TOOL], tool_choice="none", max_tokens=200)
    assert refused_tools.choices[0].message.content == written
    assert refused_tools.choices[0].message.tool_calls is None and not seen[-1].tools

    history: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]},
        choice.message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "2"},
    ]
    await door.chat(messages=history, max_tokens=2)
    sent = seen[-1].messages.messages
    assert [m.role for m in sent] == ["system", "user", "assistant", "tool"]
    assert sent[1].content == "1+1?" and sent[2].tool_calls[0].arguments_json == '{"a":  1}'
    assert sent[3].tool_call_id == call.id


def say(patch: pytest.MonkeyPatch, door: Door, text: str) -> None:
    """Let the engine write this text, token by token, and end."""
    tokens = [*door.encode(text), 258]

    async def generate(request: Request) -> AsyncIterator[Delta | Finish]:
        for start in range(0, len(tokens), 7):
            piece = tokens[start : start + 7]
            yield Delta(0, piece, [-1.0] * len(piece), [Span(start, len(piece), 0)])
        yield Finish(0, Reason.STOP, "", None, 0)

    patch.setattr(door.engine, "generate", generate)
