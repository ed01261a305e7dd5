"""A RewardService as it is asked, over one channel.

1. Whatever goes wrong is a QuartetError whose message names the address and what to do, or BrokenContract.
2. Equal requests may be sent again: what may pass (PASSING) is tried again, within the time that the caller
   has and a named budget.
3. A service that was away, and is there again, is described once more before it is asked for anything else:
   `is_back` is told what it says of itself now. It was away where a call said so, and where its connection is
   gone when it is asked, also if nothing was asked meanwhile.
4. Of a service that is away there is a line in the log, and one when it is back.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import grpc
from quartet.errors import QuartetError
from quartet.kit.call import RetryBudget, unary
from quartet.kit.channel import connect
from quartet.unreachable import is_of_tls
from quartet.v1 import envhost_service_pb2, reward_service_pb2, reward_service_pb2_grpc

from quartet_envhost.rewarded.described import (
    BrokenContract,
    Described,
    check_continued,
    check_opened,
    check_prompt,
    read,
)
from quartet_envhost.rewarded.place import Place

# What another try may get past: the service is away, is full, or something that it waited for was.
PASSING: Final = frozenset({"NOT_READY", "OVERLOADED", "DEADLINE"})
# While an environment is loaded, or somebody lists its tasks: two seconds or so. Who starts both at once is
# let in, who wrote a wrong address reads it soon.
LOADING: Final = RetryBudget(max_attempts=6, initial_backoff_s=0.1, max_backoff_s=1.0)
# While a rollout has time left, or for some 25 minutes of refusals: a service that is started anew costs no
# rollout.
ROLLOUT: Final = RetryBudget(max_attempts=1000, initial_backoff_s=0.1, max_backoff_s=3.0)
# To describe itself, or to list a page of prompts, however much it has to read for that.
ANSWER_S: Final = 60.0
# How gRPC says that a message is beyond a limit, and whose.
_TOO_LARGE: Final = re.compile(r"(\w+: \w+) message larger than max \((\d+) vs\. (\d+)\)")


class Asked:
    """A service at a place. Belongs to the loop that it is made on."""

    def __init__(self, place: Place, is_back: Callable[[Described], None]) -> None:
        """Connect when it is asked first. Raises ConfigError: a file of its security cannot be read."""
        self.address = place.address
        self._is_back = is_back
        self._channel = connect(place.address, security=place.security)
        make_stub: Any = reward_service_pb2_grpc.RewardServiceStub
        self._stub = make_stub(self._channel)
        self._was_away = self._is_described = self._is_told = False

    async def close(self) -> None:
        """Ask nothing more."""
        await self._channel.close()

    async def describe(self) -> Described:
        """What it says of itself."""
        request = reward_service_pb2.DescribeRewardsRequest()
        deadline = time.monotonic() + ANSWER_S
        described = read(await self._ask(self._stub.DescribeRewards, request, deadline, LOADING))
        self._is_described = True
        return described

    async def prompts(
        self,
        split: envhost_service_pb2.Split,
        start: int,
        count: int,
        deadline: float,
        budget: RetryBudget,
    ) -> list[reward_service_pb2.RewardPrompt]:
        """Prompts from a number on that is in the split: one at least, and `count` at most."""
        request = reward_service_pb2.GetPromptsRequest(split=split, start=start, count=count)
        said: reward_service_pb2.GetPromptsResponse
        said = await self._ask(self._stub.GetPrompts, request, deadline, budget)
        named = envhost_service_pb2.Split.Name(split).removeprefix("SPLIT_").lower()
        if not 1 <= len(said.prompts) <= count:
            raise BrokenContract(
                f"it sent {len(said.prompts)} {named} prompts, asked for {count} from number {start} on"
            )
        for number, prompt in enumerate(said.prompts, start):
            check_prompt(prompt, f"{named} prompt {number}")
        return list(said.prompts)

    async def opened(
        self, request: reward_service_pb2.OpenRequest, deadline: float
    ) -> reward_service_pb2.OpenResponse:
        """What a member alone is told."""
        said: reward_service_pb2.OpenResponse
        try:
            said = await self._ask(self._stub.Open, request, deadline, ROLLOUT)
        except QuartetError as error:
            if error.reason != "NOT_IMPLEMENTED" or "field" in error.metadata:
                raise
            raise BrokenContract("a prompt of it opens, and it has no Open; implement that") from error
        check_opened(said)
        return said

    async def continued(
        self, request: reward_service_pb2.ContinueRequest, deadline: float
    ) -> reward_service_pb2.ContinueResponse:
        """What comes after an answer; no messages where nothing does."""
        said: reward_service_pb2.ContinueResponse
        try:
            said = await self._ask(self._stub.Continue, request, deadline, ROLLOUT)
        except QuartetError as error:
            if error.reason != "NOT_IMPLEMENTED" or "field" in error.metadata:
                raise
            raise BrokenContract("it has max_turns above 1, and no Continue; implement that") from error
        check_continued(said)
        return said

    async def score(
        self, request: reward_service_pb2.ScoreGroupRequest, deadline: float
    ) -> reward_service_pb2.ScoreGroupResponse:
        """The rewards of a group, as they are told."""
        said: reward_service_pb2.ScoreGroupResponse
        said = await self._ask(self._stub.ScoreGroup, request, deadline, ROLLOUT)
        return said

    async def _ask(self, method: Any, request: Any, deadline: float, budget: RetryBudget) -> Any:
        for attempt in itertools.count(1):
            try:
                if self._is_described and self._channel.get_state() is not grpc.ChannelConnectivity.READY:
                    self._was_away = True
                if self._was_away:
                    said = await self._call(
                        self._stub.DescribeRewards, reward_service_pb2.DescribeRewardsRequest(), deadline
                    )
                    self._is_back(read(said))
                    self._was_away = False
                    self._say_back()
                return await self._call(method, request, deadline)
            except QuartetError as error:
                if error.reason == "NOT_READY":
                    self._was_away = True
                    self._say_away(error)
                pause_s = budget.delay_s(attempt, error)
                is_last = attempt >= budget.max_attempts or time.monotonic() + pause_s >= deadline
                if error.reason not in PASSING or is_last:
                    raise self._told(error) from error
            await asyncio.sleep(pause_s)
        raise AssertionError("attempts are counted without an end")

    async def _call(self, method: Any, request: Any, deadline: float) -> Any:
        return await unary(method, request, timeout_s=max(0.001, deadline - time.monotonic()))

    def _say_away(self, error: QuartetError) -> None:
        # While it is loaded whoever loads it is told.
        if self._is_described and not self._is_told:
            self._is_told = True
            _say(
                f"RewardService at {self.address} is away, and asked again until it is back: {error.message}"
            )

    def _say_back(self) -> None:
        if self._is_told:
            self._is_told = False
            _say(f"RewardService at {self.address} is back")

    def _told(self, error: QuartetError) -> QuartetError:
        """The same, with who was asked and what to do."""
        said, metadata = error.message, error.metadata
        is_bare = "grpc_code" in metadata  # of gRPC itself, or of a service that knows no reasons
        match error.reason:
            case "NOT_READY" if is_bare and is_of_tls(said):
                text = (
                    f"RewardService at {self.address} cannot be called: {said}; these are keys of "
                    "args.security"
                )
            case "NOT_READY" if is_bare:
                text = (
                    f"nothing serves RewardService at {self.address} ({said}); start it, or name its address"
                )
            case "NOT_IMPLEMENTED" if "field" not in metadata:
                text = (
                    f"what is served at {self.address} does not implement RewardService ({said}); name the "
                    "address of a service that does"
                )
            case "UNAUTHENTICATED":
                text = (
                    f"RewardService at {self.address} does not let this host in ({said}); name a file with "
                    "its token by args.security.token_file"
                )
            case "INVALID_REQUEST" if (found := _TOO_LARGE.search(said)) is not None:
                whose, size, limit = found.groups()
                text = f"RewardService at {self.address} {_of_size(whose, size, limit)}"
            case "DEADLINE" if is_bare:
                text = f"RewardService at {self.address} did not answer in time ({said})"
            case _:
                text = f"RewardService at {self.address}: {said}"
        told = QuartetError(error.reason, text, retry_after_ms=error.retry_after_ms)
        told.metadata = metadata
        return told


def _of_size(whose: str, size: str, limit: str) -> str:
    """What to do about a message that is too large."""
    if whose == "SERVER: Received":
        return (
            f"takes messages of {limit} bytes, and what it is asked has {size}; raise that "
            "(grpc.max_receive_message_length of its server)"
        )
    return f"answers in {size} bytes, more than a message may have ({limit}); let it say less at once"


def _say(line: str) -> None:
    """Into the log of the worker's host."""
    print(line, file=sys.stderr, flush=True)
