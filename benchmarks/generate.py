"""Generate over gRPC against the same engine over OpenAI's HTTP API, requests per second.

One server process answers both: the real service, the real front, one chat template, and in the place of the
model a stub that hands out prepared tokens at once, so that what is measured is all that is not the model.
Each request asks for NEW_TOKENS tokens with their ids and log-probabilities, as training needs them, after a
chat message or after given tokens. Both sides are read as programs read them: Generate by the SDK's channel,
the OpenAI API by the `openai` client. Bar: 1.5 times its requests per second at 1, 32 and 256 in flight, and
as much against a bare aiohttp client that checks nothing and reads the same stream. Without a bar, the limit
of HTTP: the same client for the answer as one JSON. Rounds are taken by turns, the best counts.

    python benchmarks/generate.py [--json FILE]
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import aiohttp
import openai
import uvloop
from figures import Figure, arguments, report
from quartet.kit.channel import connect
from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb
from quartet.v1 import inference_service_pb2_grpc as rpc

IN_FLIGHT = (1, 32, 256)
NEW_TOKENS, PIECE = 128, 32
PROMPT_TOKENS = 256
ROUNDS = 3
ROUND_SECONDS = 1.5
QUESTION = "Reverse the text character-by-character: the quick brown fox jumps over the lazy dog."
BAR = ">= 1.5"

Call = Callable[[], Awaitable[None]]


def stub_engine(end_tokens: frozenset[int]) -> Any:
    """An engine whose every answer is the same tokens, as fast as they can be handed out."""
    from quartet_inference.engine import Delta, EngineInfo, Finish, Reason, Request, ServedWeights, Span

    tokens = [32 + i % 90 for i in range(NEW_TOKENS)]
    logprobs = [-0.01 * i - 0.123456 for i in range(NEW_TOKENS)]
    info = EngineInfo(
        name="stub",
        dtype="float32",
        max_model_len=4096,
        max_num_seqs=256,
        vocab_size=1 << 20,
        end_token_ids=tuple(end_tokens),
        served=ServedWeights("", 0, b""),
        running=0,
        waiting=0,
        tokens_sampled=0,
        updates_applied=0,
        last_update_pause_ms=0.0,
        paused=False,
    )

    class Stub:
        def info(self) -> EngineInfo:
            return info

        async def generate(self, request: Request) -> AsyncIterator[Delta | Finish]:
            for start in range(0, NEW_TOKENS, PIECE):
                end = start + PIECE
                await asyncio.sleep(0)  # the model's next steps
                yield Delta(0, tokens[start:end], logprobs[start:end], [Span(start, PIECE, 0)])
            yield Finish(0, Reason.LENGTH, "", None, 0)

    return Stub()


async def serve(folder: Path) -> None:
    """The server process: prints both addresses, serves until it is ended."""
    from quartet.kit import logs
    from quartet.kit.health import Health
    from quartet.kit.server import ServerConfig, Service, start
    from quartet_inference.adapters import Adapters
    from quartet_inference.answering import Answerer
    from quartet_inference.chat import Chat
    from quartet_inference.openai.config import OpenAiConfig
    from quartet_inference.openai.front import Front
    from quartet_inference.openai.server import serving
    from quartet_inference.own_model import OwnModel
    from quartet_inference.service import InferenceServicer
    from quartet_inference.updates import ServedNews

    logs.configure("inference", "warning")
    chat, health = Chat(folder), Health()
    engine = stub_engine(chat.end_tokens)
    news = ServedNews(engine)
    answerer = Answerer(engine, chat, news, 1.0)
    adapters = Adapters(engine, news, OwnModel(engine, folder), on_demand=False)
    add = rpc.add_InferenceServiceServicer_to_server
    servicer = InferenceServicer(engine, answerer, adapters, str(folder))
    server = await start(
        [Service("quartet.v1.InferenceService", add, servicer)], ServerConfig(reflection=False), health
    )
    config = OpenAiConfig(address="127.0.0.1:0", model_name="m")
    front = Front(config, engine, answerer, chat, health, str(folder))
    async with serving(front, config, health, 0.0) as address:
        print(json.dumps([server.address, address]), flush=True)
        await asyncio.Event().wait()


def over_grpc(stub: Any, request: pb.GenerateRequest) -> Call:
    async def call() -> None:
        ids: list[int] = []
        logprobs: list[float] = []
        finish = None
        async for frame in stub.Generate(request, timeout=60):
            if frame.HasField("delta"):
                ids.extend(frame.delta.token_ids)
                logprobs.extend(frame.delta.logprobs)
            if frame.HasField("finish"):
                finish = frame.finish
        assert finish is not None and finish.message.content and len(ids) == len(logprobs) == NEW_TOKENS

    return call


def over_http(session: aiohttp.ClientSession, path: str, body: dict[str, Any], streamed: bool) -> Call:
    chat = path.endswith("chat/completions")

    def values_of(logprobs: dict[str, Any]) -> list[float]:
        return [entry["logprob"] for entry in logprobs["content"]] if chat else logprobs["token_logprobs"]

    async def whole() -> None:
        async with session.post(path, json=body) as response:
            assert response.status == 200, await response.text()
            (choice,) = (await response.json())["choices"]
        text = choice["message"]["content"] if chat else choice["text"]
        assert text and len(choice["token_ids"]) == len(values_of(choice["logprobs"])) == NEW_TOKENS

    async def pieces() -> None:
        ids: list[int] = []
        logprobs: list[float] = []
        text = finish = ""
        async with session.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                (choice,) = json.loads(line[6:])["choices"]
                text += choice["delta"].get("content", "") if chat else choice["text"]
                ids += choice.get("token_ids", ())
                logprobs += values_of(choice["logprobs"]) if choice["logprobs"] else ()
                finish = choice["finish_reason"] or finish
        assert text and finish and len(ids) == len(logprobs) == NEW_TOKENS

    return pieces if streamed else whole


def by_openai(client: openai.AsyncOpenAI, path: str, body: dict[str, Any]) -> Call:
    chat = path.endswith("chat/completions")
    create: Any = client.chat.completions.create if chat else client.completions.create
    arguments = {**body, "extra_body": {"return_token_ids": True}}
    del arguments["return_token_ids"]

    async def call() -> None:
        answer = await create(**arguments)
        assert len(answer.choices[0].token_ids) == NEW_TOKENS

    return call


async def rate(call: Call, in_flight: int) -> float:
    """Requests per second with so many under way."""
    end = time.perf_counter() + ROUND_SECONDS
    done = 0

    async def worker() -> None:
        nonlocal done
        while time.perf_counter() < end:
            await call()
            done += 1

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(in_flight)))
    return done / (time.perf_counter() - began)


async def measure(grpc_address: str, http_address: str) -> list[Figure]:
    """All figures."""
    figures = []
    prompt = [32 + i % 90 for i in range(PROMPT_TOKENS)]
    sampling = common_pb2.SamplingParams(max_tokens=NEW_TOKENS)
    message = common_pb2.Message(role="user", content=QUESTION)
    extras = {"model": "m", "max_tokens": NEW_TOKENS, "return_token_ids": True}
    chat_body = {**extras, "messages": [{"role": "user", "content": QUESTION}], "logprobs": True}
    workloads = {
        "chat": (
            pb.GenerateRequest(messages=pb.MessagesPrompt(messages=[message]), sampling=sampling),
            ("/v1/chat/completions", chat_body),
        ),
        "tokens": (
            pb.GenerateRequest(tokens=pb.TokensPrompt(token_ids=prompt), sampling=sampling),
            ("/v1/completions", {**extras, "prompt": prompt, "logprobs": 0}),
        ),
    }
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        connect(grpc_address) as channel,
        aiohttp.ClientSession(f"http://{http_address}", connector=connector) as session,
        openai.AsyncOpenAI(base_url=f"http://{http_address}/v1", api_key="none", timeout=60) as client,
    ):
        stub = rpc.InferenceServiceStub(channel)
        for name, (request, (path, body)) in workloads.items():
            calls = {
                "gRPC": over_grpc(stub, request),
                "openai client": by_openai(client, path, body),
                "bare HTTP": over_http(session, path, body, streamed=False),
                "bare HTTP stream": over_http(session, path, body, streamed=True),
            }
            for in_flight in IN_FLIGHT:
                best = dict.fromkeys(calls, 0.0)
                for _ in range(ROUNDS):
                    for kind, call in calls.items():
                        best[kind] = max(best[kind], await rate(call, in_flight))
                title = f"{name}, {in_flight} in flight"
                for kind, value in best.items():
                    figures.append(Figure(f"{title}: {kind}", value, "requests/s"))
                for kind in list(calls)[1:]:
                    bar = "" if kind == "bare HTTP" else BAR
                    figures.append(Figure(f"{title}: gRPC / {kind}", best["gRPC"] / best[kind], "times", bar))
    return figures


async def run() -> list[Figure]:
    """Start the server and measure."""
    from quartet.cli.tiny.files import write_model_files

    with tempfile.TemporaryDirectory(prefix="quartet-generate-") as name:
        folder = Path(name)
        write_model_files(folder)
        command = [sys.executable, __file__, "--serve", str(folder)]
        with (folder / "log").open("wb") as log:
            server = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=log
            )
        assert server.stdout is not None
        try:
            while not (line := await server.stdout.readline()).startswith(b"["):
                assert line, f"the server ended:\n{(folder / 'log').read_text()}"
            return await measure(*json.loads(line))
        finally:
            server.terminate()
            await server.wait()


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--serve", type=Path, help="be the server (for the benchmark's own use)")
    options = parser.parse_args()
    if options.serve is not None:
        uvloop.run(serve(options.serve))
        return
    report(asyncio.run(run()), options.json)


if __name__ == "__main__":
    main()
