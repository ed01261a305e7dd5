"""The environment "reward-service": prompts that the policy answers, and a RewardService that anybody serves,
which goes on with the conversation (turns.py) and rewards it.

1. `args` name where it is served (place.py), and are no part of what it is: equal digests of the service are
   equal digests of the environment, wherever it is asked.
2. Training and evaluation examples are its prompts of that split; without evaluation prompts the training
   ones are for both. They are fetched as they are needed (prompts.py).
3. The members of a request are scored together (groups.py); a member that failed is not among them.
4. Where a service was away and comes back as another one, this process ends: the worker that comes in its
   place loads what is there, and tells its digest.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

from google.protobuf import json_format
from google.protobuf.message import Message
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.kit import tracing
from quartet.v1 import envhost_service_pb2, reward_service_pb2, rollout_pb2

from quartet_envhost import consists, failures
from quartet_envhost.frames import MAX_MESSAGE_BYTES
from quartet_envhost.groups import Groups, OutOfTime
from quartet_envhost.no_task import no_task
from quartet_envhost.own_code import OwnCode
from quartet_envhost.rewarded.asked import Asked
from quartet_envhost.rewarded.described import BrokenContract, Described, data_of
from quartet_envhost.rewarded.outcome import rollout_of
from quartet_envhost.rewarded.place import place_of
from quartet_envhost.rewarded.play import Failed, Play
from quartet_envhost.rewarded.prompts import Prompts
from quartet_envhost.rewarded.scoring import score
from quartet_envhost.rewarded.turns import converse
from quartet_envhost.rewarded.waited import EARLIER_S, failure_of
from quartet_envhost.sampler import Sampler
from quartet_envhost.together import time_limit_s

#: As EnvironmentInfo.api says it.
API: Final = "rewards"
# Of this process, where the service became another one.
ANOTHER_CODE: Final = 3
_TRAIN, _EVAL = envhost_service_pb2.SPLIT_TRAIN, envhost_service_pb2.SPLIT_EVAL


class HostedEnvironment:
    """The environment with a channel to its service."""

    def __init__(self, env_id: str, args: dict[str, Any], own: OwnCode) -> None:
        """Connect to nothing yet. Raises QuartetError(INVALID_CONFIG)."""
        self._id = env_id
        place = place_of(env_id, args)
        try:
            self._asked = Asked(place, self._check_same)
        except ConfigError as error:
            raise QuartetError("INVALID_CONFIG", f"environment {env_id!r}: args.security: {error}") from error
        self._prompts = Prompts(self._asked)
        self._groups = Groups(self._score)
        self._described: Described | None = None

    @contextlib.asynccontextmanager
    async def serving(self, stall_s: float, lost: Callable[[str], None]) -> AsyncIterator[None]:
        """Close the channel at the end. It is never `lost`: every rollout asks the service anew."""
        try:
            yield
        finally:
            await self._asked.close()

    async def describe(self) -> envhost_service_pb2.EnvironmentInfo:
        """The description, with sizes and digests."""
        with self._unavailable():
            self._described = said = await self._asked.describe()
        info = envhost_service_pb2.EnvironmentInfo(
            id=self._id,
            version=said.version,
            api=API,
            train_size=said.train_size,
            eval_size=said.eval_size or said.train_size,
            group_scoring=True,
            rewards=[one.name for one in said.functions if one.weight],
            metrics=[one.name for one in said.functions if not one.weight],
            weights={one.name: one.weight for one in said.functions if one.weight},
        )
        info.examples_digest = await consists.of_examples(info, self.tasks)
        info.digest = consists.digest_of(*said.identity, *(() if said.digest else (info.examples_digest,)))
        return info

    async def tasks(
        self, request: envhost_service_pb2.GetTasksRequest
    ) -> envhost_service_pb2.GetTasksResponse:
        """The examples asked for, in the order of the service."""
        split, size = self._split(request.split)
        response = envhost_service_pb2.GetTasksResponse()
        count = max(0, min(request.count, size - request.start))
        room = MAX_MESSAGE_BYTES
        with self._unavailable():
            index = request.start
            async for prompt in self._prompts.listed(split, request.start, count):
                data = _data_json(prompt) if request.include_data else ""
                response.tasks.add(index=index, key=prompt.key, data_json=data)
                index += 1
                room -= len(data)
                if room < 0:  # it is refused for that, and need not have the rest
                    break
        return response

    async def run(
        self, sampler: Sampler, request: envhost_service_pb2.RunRolloutsRequest
    ) -> rollout_pb2.Rollout:
        """Run the first member of the request. Raises QuartetError(RESOURCE_UNKNOWN): no such task."""
        split, size = self._split(request.split)
        index = request.task_index
        if index >= size:
            raise no_task(self._id, index, size)
        started = time.monotonic()
        play = Play(request, started + request.timeout_ms / 1000, started + time_limit_s(request))
        failure = None

        async def played() -> Play:
            await self._play(play, sampler, split)
            return play

        try:
            await self._groups.scored(request, played)
        except OutOfTime as error:
            failure = failures.failure(failures.TIMEOUT, str(error), retryable=False)
        except Failed as error:
            failure = error.failure
        rollout = rollout_of(play, self._known.functions, failure)
        rollout.timing.total_ms = round(1000 * (time.monotonic() - started))
        return rollout

    async def _play(self, play: Play, sampler: Sampler, split: envhost_service_pb2.Split) -> None:
        """Up to the last answer. Raises Failed."""
        deadline = play.answer_by - EARLIER_S
        try:
            prompt = await self._prompts.get(split, play.request.task_index, deadline)
        except BrokenContract as error:
            raise Failed(
                failures.failure(failures.ENVIRONMENT, self._broken(error), retryable=False)
            ) from error
        except QuartetError as error:
            raise Failed(failure_of(error, deadline, "there is no prompt")) from error
        play.prompt = prompt
        await converse(play, sampler, self._asked, split, self._known.max_turns)

    async def _score(self, plays: list[Play]) -> None:
        split, _ = self._split(plays[0].request.split)
        with tracing.span("scoring", rollouts=len(plays)):
            await score(self._asked, len(self._known.functions), split, plays)

    def _split(self, split: int) -> tuple[envhost_service_pb2.Split, int]:
        """Which prompts are asked for, and how many there are of them (2)."""
        if split == _EVAL and self._known.eval_size:
            return _EVAL, self._known.eval_size
        return _TRAIN, self._known.train_size

    @property
    def _known(self) -> Described:
        assert self._described is not None, "it is described before anything else is asked"
        return self._described

    def _check_same(self, now: Described) -> None:
        """The service is back (4)."""
        if self._described is None or now.identity == self._described.identity:
            return
        before = self._described
        print(
            f"RewardService at {self._asked.address} came back as another one: {before} -> {now}; its worker "
            "is started anew",
            file=sys.stderr,
            flush=True,
        )
        os._exit(ANOTHER_CODE)

    def _broken(self, error: BrokenContract) -> str:
        return f"RewardService at {self._asked.address} breaks its contract: {error}"

    @contextlib.contextmanager
    def _unavailable(self) -> Iterator[None]:
        """What goes wrong inside keeps the environment from being loaded, or its tasks from being listed."""
        try:
            yield
        except BrokenContract as error:
            text = self._broken(error)
            raise QuartetError("ENVIRONMENT_UNAVAILABLE", text, env_id=self._id) from error
        except QuartetError as error:
            if error.reason in ("NOT_IMPLEMENTED", "UNAUTHENTICATED"):
                key = "args.address" if error.reason == "NOT_IMPLEMENTED" else "args.security"
                text = f"environment {self._id!r}: {error.message}"
                raise QuartetError("INVALID_CONFIG", text, key=key, value=self._asked.address) from error
            text = f"environment {self._id!r}: {error.message}"
            raise QuartetError("ENVIRONMENT_UNAVAILABLE", text, env_id=self._id) from error


def _data_json(prompt: reward_service_pb2.RewardPrompt) -> str:
    """An example for people, and for programs that play: its prompt, beside what the service says of it."""
    if prompt.HasField("messages"):
        asked: dict[str, Any] = {"prompt": [_told(one) for one in prompt.messages.messages]}
    else:
        asked = {"prompt_token_ids": list(prompt.tokens.token_ids)}
    if prompt.tools:
        asked["tools"] = [_told(one) for one in prompt.tools]
    return json.dumps({**data_of(prompt, "the prompt"), **asked})


def _told(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return found
