"""The stub policy of benchmarks/rollouts.py as a process: over gRPC for the environment host, over HTTP for
Verifiers' environment server. Prints both addresses as a line of JSON and serves until stdin ends.

    python benchmarks/stub_policy.py [--delay SECONDS]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from aiohttp import web
from quartet.kit.health import Health
from quartet.kit.logs import configure
from quartet.kit.server import ServerConfig, Service, start
from quartet.v1 import common_pb2, inference_service_pb2, inference_service_pb2_grpc

sys.path.insert(0, str(Path(__file__).resolve().parent / "four_turns"))

from policy import LOGPROBS, PROMPT, SAMPLED, TEXT

NAME = "quartet.v1.InferenceService"
CHAT = json.dumps(
    {
        "id": "chat",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": TEXT}}],
        "usage": {
            "prompt_tokens": len(PROMPT),
            "completion_tokens": len(SAMPLED),
            "total_tokens": len(PROMPT) + len(SAMPLED),
        },
    }
).encode()


class StubInference(inference_service_pb2_grpc.InferenceServiceServicer):
    """Generate, and nothing else."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s

    async def Generate(
        self, request: inference_service_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_service_pb2.GenerateResponse]:
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        prompt = [*request.tokens.token_ids, *PROMPT]
        start = inference_service_pb2.GenerateStart(prompt_token_ids=prompt, prefix_kept=True)
        for index in range(request.n):
            yield self._completion(index, len(prompt), start if index == 0 else None)

    def _completion(
        self, index: int, prompt_tokens: int, start: inference_service_pb2.GenerateStart | None
    ) -> inference_service_pb2.GenerateResponse:
        return inference_service_pb2.GenerateResponse(
            start=start,
            delta=inference_service_pb2.GenerateDelta(
                index=index,
                token_ids=SAMPLED,
                logprobs=LOGPROBS,
                spans=[{"start": 0, "length": len(SAMPLED), "policy_version": 1}],
            ),
            finish=inference_service_pb2.GenerateFinish(
                index=index,
                finish_reason="FINISH_REASON_STOP",
                message=common_pb2.Message(role="assistant", content=TEXT),
                usage=common_pb2.Usage(prompt_tokens=prompt_tokens, completion_tokens=len(SAMPLED)),
            ),
        )


async def serve(delay_s: float) -> None:
    """Serve both until stdin ends."""
    configure("stub-policy", "warning")

    async def chat(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=CHAT, content_type="application/json")

    application = web.Application()
    application.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    health = Health()
    health.set_ready(NAME)
    add: Any = inference_service_pb2_grpc.add_InferenceServiceServicer_to_server
    server = await start([Service(NAME, add, StubInference(delay_s))], ServerConfig(), health)
    port = runner.addresses[0][1]
    print(json.dumps({"grpc": server.address, "http": f"http://127.0.0.1:{port}/v1"}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(0)
    await runner.cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, default=0.0)
    asyncio.run(serve(parser.parse_args().delay))
