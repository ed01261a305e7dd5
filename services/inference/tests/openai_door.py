"""A running OpenAI-compatible front, and the real client of that API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from quartet.kit.health import Health
from quartet.v1 import inference_service_pb2 as pb
from quartet_inference import app
from quartet_inference.config import InferenceConfig
from quartet_inference.engine import Delta, Finish, Reason, Request, Span
from quartet_inference.openai import server
from quartet_inference.openai.front import Front
from quartet_inference.prompts import Prompts

TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


class Door:
    """A running front, a client of it, and the engine behind it."""

    def __init__(self, address: str, model: str, front: Front, engine: Any, health: Health) -> None:
        self.address = address
        self.front = front
        self.encode = front._chat.encode
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

    def allow(self, seconds: float) -> None:
        """For each request from now on."""
        self.front._config = self.front._config.model_copy(update={"request_seconds": seconds})

    def under_way(self) -> int:
        """Requests that have a place."""
        return self.front._running

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
    health = Health()
    with watched() as caught:
        async with app.services(config, health):
            door = caught.door(folder, health)
            async with door.plain:
                yield door


class Caught:
    """The front that was started while it was watched for."""

    address: str
    front: Front

    def door(self, folder: Path, health: Health) -> Door:
        return Door(self.address, folder.name, self.front, self.front._engine, health)


@contextmanager
def watched() -> Iterator[Caught]:
    """Note where a front that is started meanwhile listens."""
    caught = Caught()
    original = server.serving

    @asynccontextmanager
    async def listening(front: Any, *arguments: Any) -> AsyncIterator[str]:
        async with original(front, *arguments) as address:
            caught.address, caught.front = address, front
            yield address

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "serving", listening)
        yield caught


@pytest.fixture
async def door(model_folder: Path) -> AsyncIterator[Door]:
    async with opened(model_folder) as one:
        yield one


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def say(patch: pytest.MonkeyPatch, door: Door, text: str, times: int = 1) -> None:
    """Let the engine write this text so many times, token by token, and end."""
    tokens = [*times * [*door.encode(text)], 258]

    async def generate(request: Request) -> AsyncIterator[Delta | Finish]:
        for start in range(0, len(tokens), 7):
            piece = tokens[start : start + 7]
            yield Delta(0, piece, [-1.0] * len(piece), [Span(start, len(piece), 0)])
        yield Finish(0, Reason.STOP, "", None, 0)

    patch.setattr(door.engine, "generate", generate)


def requests_seen(monkeypatch: pytest.MonkeyPatch) -> list[pb.GenerateRequest]:
    """The requests that the answerer gets from now on."""
    seen: list[pb.GenerateRequest] = []
    original = Prompts.of

    def spied(self: Prompts, request: pb.GenerateRequest) -> Any:
        seen.append(request)
        return original(self, request)

    monkeypatch.setattr(Prompts, "of", spied)
    return seen
