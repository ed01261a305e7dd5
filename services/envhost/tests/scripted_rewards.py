"""A RewardService for tests, by real gRPC: what it has, says of it and does wrong are attributes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from quartet.errors import QuartetError
from quartet.kit.health import Health
from quartet.kit.server import RunningServer, ServerConfig, Service, start
from quartet.v1 import envhost_service_pb2, reward_service_pb2_grpc
from quartet.v1 import reward_service_pb2 as pb
from scripted_inference import encode

NAME = "quartet.v1.RewardService"
WORDS = ("red", "green", "blue", "yellow")
# A field that no release has.
UNKNOWN = b"\xa0\x06\x01"


def asks(word: str, **more: Any) -> pb.RewardPrompt:
    """A conversation, of one message."""
    conversation = {"messages": [{"role": "user", "content": word}]}
    return pb.RewardPrompt(
        messages=conversation, key=f"key of {word}"[:64], data_json=f'{{"answer": "{word}"}}', **more
    )


def goes_on(word: str) -> pb.RewardPrompt:
    """Exact tokens."""
    return pb.RewardPrompt(tokens={"token_ids": encode(word)}, key=f"tokens of {word}")


class ScriptedRewards(reward_service_pb2_grpc.RewardServiceServicer):
    """Rewards an answer with its length, and counts its vowels."""

    def __init__(self) -> None:
        self.behave()

    def behave(self) -> None:
        """Have WORDS to train on and one to evaluate with, and score at once."""
        train, held_out = [asks(word) for word in WORDS], [asks("black")]
        self.splits = {envhost_service_pb2.SPLIT_TRAIN: train, envhost_service_pb2.SPLIT_EVAL: held_out}
        self.described = pb.DescribeRewardsResponse(
            train_size=len(train),
            eval_size=len(held_out),
            functions=[{"name": "length", "weight": 2.0}, {"name": "vowels"}],
            digest="of words",
            version="7",
        )
        self.pages: list[pb.GetPromptsRequest] = []
        self.groups: list[pb.ScoreGroupRequest] = []
        self.continued: list[pb.ContinueRequest] = []
        self.opened: list[pb.OpenRequest] = []
        # What a member alone is told.
        self.opens: Callable[[pb.OpenRequest], pb.OpenResponse] = lambda _: pb.OpenResponse()
        # What a conversation goes on with; nothing, where it is over.
        self.goes_on: Callable[[pb.ContinueRequest], pb.ContinueResponse] = lambda _: pb.ContinueResponse()
        self.cancelled = 0
        # Of the next calls of Open, Continue and ScoreGroup, first one first.
        self.errors: list[QuartetError] = []
        # Before a group is scored, and before a conversation goes on or a prompt is told.
        self.hold: asyncio.Event | None = None
        self.holds_before: asyncio.Event | None = None
        # What is done to an answer before it is sent.
        self.spoil: Callable[[pb.ScoreGroupResponse], Any] = lambda answer: None
        # Prompts are sent up to the one that exceeds it.
        self.page_bytes = 1 << 20
        # What a prompt of a split is, where they are not listed.
        self.prompt: Callable[[int], pb.RewardPrompt] | None = None

    async def DescribeRewards(self, request: Any, context: Any) -> pb.DescribeRewardsResponse:
        return self.described

    async def GetPrompts(self, request: pb.GetPromptsRequest, context: Any) -> pb.GetPromptsResponse:
        self.pages.append(request)
        await self._held(self.holds_before)
        if self.prompt is not None:
            page = pb.GetPromptsResponse()
            for number in range(request.start, request.start + request.count):
                page.prompts.append(self.prompt(number))
                if page.ByteSize() > self.page_bytes:
                    break
            return page
        found = self.splits[request.split][request.start : request.start + request.count]
        return pb.GetPromptsResponse(prompts=found)

    async def Open(self, request: pb.OpenRequest, context: Any) -> pb.OpenResponse:
        self.opened.append(request)
        if self.errors:
            raise self.errors.pop(0)
        await self._held(self.holds_before)
        return self.opens(request)

    async def Continue(self, request: pb.ContinueRequest, context: Any) -> pb.ContinueResponse:
        self.continued.append(request)
        if self.errors:
            raise self.errors.pop(0)
        await self._held(self.holds_before)
        return self.goes_on(request)

    async def ScoreGroup(self, request: pb.ScoreGroupRequest, context: Any) -> pb.ScoreGroupResponse:
        self.groups.append(request)
        if self.errors:
            raise self.errors.pop(0)
        await self._held(self.hold)
        answer = pb.ScoreGroupResponse()
        for one in request.completions:
            vowels = sum(letter in "aeiou" for letter in one.message.content)
            scores: list[Any] = [{"value": len(one.message.content)}, {"value": vowels}]
            answer.rewards.add(scores=scores, metrics={"tokens": len(one.token_ids)})
        self.spoil(answer)
        return answer

    async def _held(self, event: asyncio.Event | None) -> None:
        try:
            if event is not None:
                await event.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


async def serve_rewards(rewards: ScriptedRewards, address: str = "127.0.0.1:0", **more: Any) -> RunningServer:
    """Serve it on this machine."""
    health = Health()
    health.set_ready(NAME)
    add: Any = reward_service_pb2_grpc.add_RewardServiceServicer_to_server
    return await start([Service(NAME, add, rewards)], ServerConfig(address=address, **more), health)
