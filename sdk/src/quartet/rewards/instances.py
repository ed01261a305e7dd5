"""The conversations of a script with environments that are under way: of each its environment, by the attempt
at its group and its member.

1. An Open makes one of its own, or takes one whose group was scored, and resets it; another Open of the same
   conversation begins it anew, with another one. A scoring of its group that is under way then is of the
   conversation before: neither its rewards nor its end are those of the new one.
2. The calls of an answer are made once: who asks again is given what was answered first, also while these are
   made. So is a group scored once; of what was said of those that are, the last KEPT_REWARDS are kept.
3. A conversation that is not here is RESOURCE_UNKNOWN: its group is tried anew.
4. At most `most` are under way. Of more the one that was asked for longest ago is let go, which is said. One
   that nobody asked for within `lasts_s`, in which every attempt is over, is let go without a word: nobody
   tells of an attempt that failed.
5. Belongs to the loop that serves.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from quartet.errors import QuartetError, refused
from quartet.rewards.conversation import Conversation
from quartet.rewards.environments import FACTORY, RESET, Environments, methods_of, text_of
from quartet.rewards.functions import Failed
from quartet.rewards.turns import Turns
from quartet.v1 import common_pb2, reward_service_pb2

#: What a run has under way, and as much again of attempts that failed: nobody says that they are over.
SPARE: Final = 2
#: Whatever a run has under way.
MAX_INSTANCES: Final = 4096
#: An answer that was lost is asked for again within seconds.
KEPT_REWARDS: Final = 64

logger = logging.getLogger("quartet.rewards")


@dataclass(frozen=True)
class Bounds:
    """Of what is kept (4)."""

    most: int = MAX_INSTANCES
    lasts_s: float = math.inf

    @classmethod
    def of(cls, max_concurrent: int, rollout_timeout_s: float) -> Bounds:
        """Of a run that has so many rollouts under way. Answers have that time, and their rewards as much."""
        return cls(max(MAX_INSTANCES, SPARE * max_concurrent), 2 * rollout_timeout_s)


#: Of who tells nothing of a run.
USUAL: Final = Bounds()


@dataclass
class Instance:
    """An environment in a conversation."""

    #: On the monotonic clock.
    asked_at: float
    made: Any = None
    #: What its reset returned.
    said: Any = None
    is_open: bool = False
    #: How it goes on, with its own methods; None where there is nothing to call.
    conversation: Conversation | None = None
    #: Of the answer of that number the calls are made, or were.
    answer: int = 0
    answered: asyncio.Task[reward_service_pb2.ContinueResponse | Failed] | None = None


class Instances:
    """Those of one service."""

    def __init__(
        self,
        environments: Environments,
        turns: Turns,
        conversation: Conversation | None,
        bounds: Bounds = USUAL,
    ) -> None:
        """Makes none yet."""
        self._environments, self._turns, self._conversation = environments, turns, conversation
        self._bounds = bounds
        self._under_way: OrderedDict[tuple[str, int], Instance] = OrderedDict()
        self._spare: list[Any] = []
        self._rewarded: OrderedDict[str, tuple[list[int], reward_service_pb2.ScoreGroupResponse]] = (
            OrderedDict()
        )
        self._scoring: dict[
            tuple[str, tuple[int, ...]], asyncio.Task[reward_service_pb2.ScoreGroupResponse]
        ] = {}
        self._is_said = False

    async def open(self, attempt: str, member: int, row: Mapping[str, Any], where: str) -> str | Failed:
        """What is appended to the prompt; `where` the row is."""
        if not attempt:
            raise refused("request_id", "", "say of which attempt at a group the member is")
        self._rewarded.pop(attempt, None)
        for asked in [asked for asked in self._scoring if asked[0] == attempt]:
            del self._scoring[asked]
        # From now on, so that of two the later one is the conversation.
        instance = self._under_way[attempt, member] = Instance(time.monotonic())
        self._under_way.move_to_end((attempt, member))
        self._bound()

        def begin() -> str | Failed:
            self._turns.doing(f"{FACTORY} for {where}")
            try:
                made = instance.made = self._spare.pop() if self._spare else self._environments.make()
                kind = type(made).__name__
                self._turns.doing(f"method {RESET!r} of {kind} for {where}")
                instance.said = self._environments.reset(made, row)
                if self._conversation is not None:
                    tools = self._conversation.tools.of(methods_of(made), kind, where)
                    instance.conversation = replace(self._conversation, tools=tools)
                self._turns.leave_child()
            except BaseException as error:  # noqa: BLE001 - whatever a script raises is its own
                self._turns.leave_child(error)
                return self._environments.failed(error)
            instance.is_open = True
            return text_of(instance.said)

        return await self._turns.call(begin)

    async def after(
        self, attempt: str, member: int, messages: Sequence[common_pb2.Message], token_count: int
    ) -> reward_service_pb2.ContinueResponse | Failed:
        """What comes after the last of these, which is an answer. Errors: INVALID_REQUEST,
        RESOURCE_UNKNOWN."""
        instance = self._known(attempt, member)
        if instance.conversation is None:
            return reward_service_pb2.ContinueResponse()
        number = sum(one.role == "assistant" for one in messages)
        if number == instance.answer + 1:
            instance.answer = number
            made = instance.conversation.after(messages, token_count)
            instance.answered = asyncio.create_task(made)
        elif number != instance.answer:
            raise refused("messages", f"{number} answers", f"the next one is number {instance.answer + 1}")
        assert instance.answered is not None
        return await asyncio.shield(instance.answered)

    def of(self, attempt: str, members: Sequence[int]) -> list[Instance]:
        """Those of a group. Errors: RESOURCE_UNKNOWN."""
        return [self._known(attempt, member) for member in members]

    async def scored(
        self,
        attempt: str,
        members: Sequence[int],
        score: Callable[[], Coroutine[Any, Any, reward_service_pb2.ScoreGroupResponse]],
    ) -> reward_service_pb2.ScoreGroupResponse:
        """The rewards of these, scored now where they were not. Raises what that raises."""
        of, rewards = self._rewarded.get(attempt, (None, None))
        if rewards is not None and of == members:
            return rewards
        asked = attempt, tuple(members)
        if (task := self._scoring.get(asked)) is None:
            task = self._scoring[asked] = asyncio.create_task(score())
            task.add_done_callback(partial(self._settle, attempt, members))
        return await asyncio.shield(task)

    def _settle(
        self,
        attempt: str,
        members: Sequence[int],
        ended: asyncio.Task[reward_service_pb2.ScoreGroupResponse],
    ) -> None:
        """A scoring has ended, well or not."""
        asked = attempt, tuple(members)
        if self._scoring.get(asked) is not ended:
            return  # it was begun anew meanwhile
        del self._scoring[asked]
        if not ended.cancelled() and ended.exception() is None:
            self._close(attempt, members, ended.result())

    def _close(
        self, attempt: str, members: Sequence[int], rewards: reward_service_pb2.ScoreGroupResponse
    ) -> None:
        """They are scored: what they had may be reset for others. With them the others of their group are
        over, whose calls may still be under way."""
        for key in [key for key in self._under_way if key[0] == attempt]:
            instance = self._under_way.pop(key)
            if key[1] in members and instance.is_open:
                self._spare.append(instance.made)
        self._rewarded[attempt] = list(members), rewards
        if len(self._rewarded) > KEPT_REWARDS:
            self._rewarded.popitem(last=False)

    def _known(self, attempt: str, member: int) -> Instance:
        instance = self._under_way.get((attempt, member))
        if instance is None or not instance.is_open:
            name = f"conversation {attempt}/{member}"
            raise QuartetError(
                "RESOURCE_UNKNOWN", f"there is no {name} here: its environment is gone; open it", name=name
            )
        instance.asked_at = time.monotonic()
        self._under_way.move_to_end((attempt, member))
        return instance

    def _bound(self) -> None:
        # In the order in which they were asked for.
        over = time.monotonic() - self._bounds.lasts_s
        while next(iter(self._under_way.values())).asked_at < over:
            self._under_way.popitem(last=False)
        if len(self._under_way) <= self._bounds.most:
            return
        self._under_way.popitem(last=False)
        if not self._is_said:
            self._is_said = True
            logger.warning(
                "more than %d environments are under way: those that were asked for longest ago are let go, "
                "and their groups are tried anew",
                self._bounds.most,
            )
