"""An InferenceService for tests, shaped like the real one: a character tokenizer, a chat template,
versions, deltas.

What it answers is a function of the conversation's last message; how it fails is set by attributes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

from quartet.errors import QuartetError
from quartet.kit.health import Health
from quartet.kit.server import RunningServer, ServerConfig, Service, start
from quartet.v1 import common_pb2, inference_service_pb2, inference_service_pb2_grpc

OPEN, CLOSE = 1, 2
DELTA_TOKENS = 32
NAME = "quartet.v1.InferenceService"
#: Lists in lists that no reader of JSON follows; Python 3.13's goes on to 10,000.
TOO_DEEP = 12_000


def encode(text: str) -> list[int]:
    """Characters as tokens."""
    return [ord(char) + 16 for char in text]


def decode(tokens: list[int]) -> str:
    """Tokens as characters, control tokens left out."""
    return "".join(chr(token - 16) for token in tokens if token >= 16)


def render(messages: Any) -> list[int]:
    """The chat template, without the opening of the next turn."""
    tokens: list[int] = []
    for message in messages:
        tokens += [OPEN, *encode(f"{message.role}\n{message.content}"), CLOSE]
    return tokens


OPENING = [OPEN, *encode("assistant\n")]


def reverse(request: inference_service_pb2.GenerateRequest, last: str) -> str:
    """The right answer of reverse-text."""
    return f"<reversed_text>{last[::-1]}</reversed_text>"


def says(*replies: str) -> Callable[[Any, str], str]:
    """A policy that says these, in the order of asking."""
    left = iter(replies)
    return lambda request, last: next(left)


class ScriptedInference(inference_service_pb2_grpc.InferenceServiceServicer):
    """Answers Generate by a script."""

    def __init__(self) -> None:
        self.requests: list[inference_service_pb2.GenerateRequest] = []
        self.version = 3
        self.running = 0
        self.behave()

    def behave(self) -> None:
        """Answer as the right answer of reverse-text, at once, and forget what was asked."""
        self.requests.clear()
        self.answer: Callable[[inference_service_pb2.GenerateRequest, str], str] = reverse
        self.delay_s = 0.0
        # Of which weights its versions are; 0: it does not tell.
        self.weights_id = 0
        # What a request waits for; where that is a run, until shortly before its deadline.
        self.waits_for = ""
        # A template that renders later turns anew, without what was said before.
        self.forgets = False
        # Errors to raise before answering, first one first.
        self.errors: list[QuartetError] = []
        # Answers still to be torn after their first delta.
        self.torn = 0
        # Of a call's completions, by index: begun only once the event is set.
        self.held: dict[int, asyncio.Event] = {}
        # The index of a completion before which a call fails, once.
        self.breaks_before: int | None = None

    @property
    def seeds(self) -> list[int]:
        """Of every completion that was asked for with one."""
        seeds: list[int] = []
        for request in self.requests:
            seeds += request.completion_seeds
            seeds += [request.sampling.seed] if request.sampling.HasField("seed") else []
        return seeds

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        self.running += request.n
        try:
            if self.errors:
                raise self.errors.pop(0)
            while self.waits_for:
                if self.waits_for.startswith("run") and context.time_remaining() < 0.25:
                    raise QuartetError("RUN_NOT_SERVED", f"run {request.run_id} is not served")
                yield inference_service_pb2.GenerateResponse(
                    heartbeat=common_pb2.Heartbeat(), waits_for=self.waits_for
                )
                await asyncio.sleep(0.05)
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            for index in range(request.n):
                if index == self.breaks_before:
                    self.breaks_before = None
                    raise QuartetError("INTERNAL", "the decode step failed")
                if index in self.held:
                    await self.held[index].wait()
                for frame in self._frames(request, index):
                    yield frame
                    if self.torn and frame.HasField("delta"):
                        self.torn -= 1
                        raise QuartetError("NOT_READY", "the replica is being stopped")
        finally:
            self.running -= request.n

    def _frames(self, request: Any, index: int) -> list[Any]:
        """Of one of the completions; the first has the start."""
        resumed = request.resumed_tokens
        if resumed:
            prompt = list(request.tokens.token_ids)[:-resumed]
            last = decode(prompt[prompt.index(OPEN) :]).removesuffix("assistant\n").rpartition("user\n")[2]
        elif request.HasField("tokens") and not request.tokens.tail_messages:
            prompt = list(request.tokens.token_ids)
            last = decode(prompt)
        elif request.HasField("tokens"):
            earlier = [] if self.forgets else request.tokens.token_ids
            prompt = [*earlier, *render(request.tokens.tail_messages), *OPENING]
            last = request.tokens.tail_messages[-1].content
        else:
            prompt = [*render(request.messages.messages), *OPENING]
            last = request.messages.messages[-1].content
        said = self.answer(request, last)
        tokens = [*encode(said), CLOSE]
        limit = request.sampling.max_tokens or len(tokens)
        cut = len(tokens) > limit
        tokens = tokens[:limit]
        assert tokens[:resumed] == list(request.tokens.token_ids)[len(prompt) :] or not resumed
        start = inference_service_pb2.GenerateStart(
            prompt_token_ids=() if resumed else prompt, prefix_kept=not self.forgets
        )
        frames = [] if index else [inference_service_pb2.GenerateResponse(start=start)]
        for at in range(resumed, len(tokens), DELTA_TOKENS):
            part = tokens[at : at + DELTA_TOKENS]
            frames.append(
                inference_service_pb2.GenerateResponse(
                    delta=inference_service_pb2.GenerateDelta(
                        index=index,
                        token_ids=part,
                        logprobs=[-0.1 * (1 + token % 7) for token in part],
                        # The second delta is sampled by newer weights, as after an update in flight.
                        spans=[{"start": at, "length": len(part), "policy_version": self.version + (at > 0)}],
                        weights=[
                            {"policy_version": self.version + (at > 0), "weights_id": self.weights_id}
                            for _ in range(bool(self.weights_id))
                        ],
                    )
                )
            )
        text = decode(tokens)
        message = common_pb2.Message(role="assistant", content=text)
        call = re.fullmatch(r"call (\w+) (.*)", text)
        if call and request.tools:
            message.content = ""
            message.tool_calls.add(id=f"call_{len(prompt)}", name=call[1], arguments_json=call[2])
        reason = "LENGTH" if cut else "TOOL_CALLS" if message.tool_calls else "STOP"
        frames.append(
            inference_service_pb2.GenerateResponse(
                finish=inference_service_pb2.GenerateFinish(
                    index=index,
                    finish_reason=f"FINISH_REASON_{reason}",
                    message=message,
                    usage=common_pb2.Usage(prompt_tokens=len(prompt), completion_tokens=len(tokens)),
                )
            )
        )
        return frames


async def serve_scripted(scripted: ScriptedInference, address: str = "127.0.0.1:0") -> RunningServer:
    """Serve it on loopback."""
    health = Health()
    health.set_ready(NAME)
    add: Any = inference_service_pb2_grpc.add_InferenceServiceServicer_to_server
    return await start([Service(NAME, add, scripted)], ServerConfig(address=address), health)
