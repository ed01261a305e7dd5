"""An InferenceService that samples by the contract, for tests and benchmarks of its clients.

The model is deterministic: a token depends on everything before it, the seed and the position, so a token
that is lost, doubled or drawn at another position of its seed changes all later ones.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from loopback import LOOPBACK
from quartet.errors import QuartetError
from quartet.kit.health import Health
from quartet.kit.server import RunningServer, ServerConfig, Service, start
from quartet.seeds import completion_seeds
from quartet.v1 import common_pb2, rollout_pb2
from quartet.v1 import inference_service_pb2 as pb
from quartet.v1 import inference_service_pb2_grpc as rpc

NAME = "quartet.v1.InferenceService"


def next_token(tokens: list[int], position: int, seed: int) -> int:
    return zlib.crc32(repr((tokens, position, seed)).encode()) % 997 + 10


def logprob(token: int) -> float:
    return -float(token % 64) / 64  # exact in float32


def experts_of(tokens: list[int]) -> bytes:
    """Of two layers, one expert each."""
    return bytes(number for token in tokens for number in (token % 256, token % 7))


class ScriptedReplica(rpc.InferenceServiceServicer):
    """Samples by the contract; `before_piece` may raise or wait, given the tokens sampled so far."""

    def __init__(self, version: int = 1) -> None:
        self.version = version
        self.weights_id = 0
        self.piece_tokens = 4
        self.requests: list[pb.GenerateRequest] = []
        # Why it waits for weights, for as long as it does.
        self.held_up = ""
        # What it waits for, for as long as it does.
        self.waits_for = ""
        self.running = 0
        self.sampled: list[tuple[int, ...]] = []  # every token ever sampled, with all that preceded it
        self.before_piece: Callable[[int], Any] = lambda _sampled: None
        self.keeps_prefix = True
        # Before a part of the experts that a completion tells, given the position of its first.
        self.before_experts: Callable[[int], Any] = lambda _position: None
        self.health = Health()
        self.health.set_ready(NAME)
        self.server: RunningServer | None = None
        self.address = ""

    async def begin(self, address: str = f"{LOOPBACK}:0") -> None:
        add: Any = rpc.add_InferenceServiceServicer_to_server
        self.server = await start([Service(NAME, add, self)], ServerConfig(address=address), self.health)
        self.address = self.server.address

    async def end(self) -> None:
        if self.server is not None:
            server, self.server = self.server, None
            await server.stop(0)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        self.running += 1
        try:
            async for frame in self._frames(request):
                yield frame
        finally:
            self.running -= 1

    async def _frames(self, request: Any) -> AsyncIterator[Any]:
        if request.HasField("exact_policy_version") and request.exact_policy_version != self.version:
            raise QuartetError("VERSION_UNAVAILABLE", f"version {self.version} is served")
        told = [ord(c) for m in request.messages.messages for c in m.content]
        told = told or [*request.tokens.token_ids] + [
            ord(c) for m in request.tokens.tail_messages for c in m.content
        ]
        rendered = bool(request.messages.messages or request.tokens.tail_messages)
        resumed = request.resumed_tokens
        assert not resumed or request.n == 1
        while self.held_up or self.waits_for:
            yield pb.GenerateResponse(
                heartbeat=common_pb2.Heartbeat(), held_up=self.held_up, waits_for=self.waits_for
            )
            await asyncio.sleep(0.05)
        yield pb.GenerateResponse(
            start=pb.GenerateStart(
                prompt_token_ids=told if rendered else (), prefix_kept=self.keeps_prefix or not rendered
            )
        )
        limit = request.sampling.max_tokens
        lanes = [list(told) for _ in range(request.n)]
        first = len(told) - resumed
        for at in range(resumed, limit, self.piece_tokens):
            for index, tokens in enumerate(lanes):
                waited = self.before_piece(at)
                if waited is not None:
                    await waited
                yield self._piece(request, index, tokens, first, min(at + self.piece_tokens, limit))
        for index, tokens in enumerate(lanes):
            for part in self._experts(request, index, tokens):
                yield part
            text = " ".join(map(str, tokens[first:]))
            yield pb.GenerateResponse(
                finish=pb.GenerateFinish(
                    index=index,
                    finish_reason=pb.FINISH_REASON_LENGTH,
                    message=common_pb2.Message(role="assistant", content=text),
                    usage=common_pb2.Usage(prompt_tokens=len(told), completion_tokens=limit - resumed),
                )
            )

    def _experts(self, request: Any, index: int, tokens: list[int]) -> Iterator[Any]:
        if not request.HasField("experts_from"):
            return
        rendered = bool(request.messages.messages or request.tokens.tail_messages)
        begin = request.experts_from if self.keeps_prefix or not rendered else 0
        for first in range(begin, len(tokens) - 1, self.piece_tokens):
            self.before_experts(first)
            numbers = experts_of(tokens[first : min(first + self.piece_tokens, len(tokens) - 1)])
            told = rollout_pb2.RoutedExperts(start=first, layers=2, slots=1, width=1, numbers=numbers)
            yield pb.GenerateResponse(experts=pb.GenerateExperts(index=index, experts=told))

    def _piece(self, request: Any, index: int, tokens: list[int], first: int, until: int) -> Any:
        at = len(tokens) - first
        while len(tokens) - first < until:
            position = len(tokens) - first
            # Unseeded completions of one request differ, as they would by chance.
            unseeded = [10_000 + index for index in range(request.n)]
            seed = request.sampling.seed
            seeds = completion_seeds(seed, request.n) if seed else request.completion_seeds or unseeded
            tokens.append(next_token(tokens, position, seeds[index]))
            self.sampled.append(tuple(tokens))
        new = tokens[first + at :]
        span = rollout_pb2.PolicySpan(start=at, length=len(new), policy_version=self.version)
        delta = pb.GenerateDelta(index=index, token_ids=new, logprobs=map(logprob, new), spans=[span])
        if self.weights_id:
            delta.weights.add(policy_version=self.version, weights_id=self.weights_id)
        return pb.GenerateResponse(delta=delta)


def undisturbed(text: str = "hello", max_tokens: int = 22, seed: int = 10_000) -> list[int]:
    tokens = [ord(c) for c in text]
    for position in range(max_tokens):
        tokens.append(next_token(tokens, position, seed))
    return tokens[len(text) :]
