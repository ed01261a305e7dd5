"""The conversations of a script with environments that are under way: of each its environment, by the attempt
at its group and its member.

1. An Open makes one of its own, or takes one whose group was scored, and resets it; another Open of the same
   conversation begins it anew, with another one.
2. The calls of an answer are made once: who asks again is given what was answered first, also while these are
   made. So is a group scored once; of what was said of those that are, the last KEPT_REWARDS are kept.
3. A conversation that is not here is RESOURCE_UNKNOWN: its group is tried anew.
4. At most MAX_INSTANCES are under way. Of more the one that was asked for longest ago is let go, which is
   said.
5. Belongs to the loop that serves.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from quartet.errors import QuartetError, refused
from quartet.rewards.conversation import Conversation
from quartet.rewards.environments import Environments, text_of
from quartet.rewards.functions import Failed
from quartet.rewards.turns import Turns
from quartet.v1 import common_pb2, reward_service_pb2

#: More than a run has under way; of attempts that failed elsewhere nobody says that they are over.
MAX_INSTANCES: Final = 4096
#: An answer that was lost is asked for again within seconds.
KEPT_REWARDS: Final = 64

logger = logging.getLogger("quartet.rewards")


@dataclass
class Instance:
    """An environment in a conversation."""

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

    def __init__(self, environments: Environments, turns: Turns, conversation: Conversation | None) -> None:
        """Makes none yet."""
        self._environments, self._turns, self._conversation = environments, turns, conversation
        self._under_way: OrderedDict[tuple[str, int], Instance] = OrderedDict()
        self._spare: list[Any] = []
        self._rewarded: OrderedDict[str, tuple[list[int], reward_service_pb2.ScoreGroupResponse]] = (
            OrderedDict()
        )
        self._scoring: dict[
            tuple[str, tuple[int, ...]], asyncio.Task[reward_service_pb2.ScoreGroupResponse]
        ] = {}
        self._is_said = False

    async def open(self, attempt: str, member: int, row: Mapping[str, Any]) -> str | Failed:
        """What is appended to the prompt."""
        if not attempt:
            raise refused("request_id", "", "say of which attempt at a group the member is")
        self._rewarded.pop(attempt, None)
        # From now on, so that of two the later one is the conversation.
        instance = self._under_way[attempt, member] = Instance()
        self._under_way.move_to_end((attempt, member))
        self._bound()

        def begin() -> str | Failed:
            try:
                instance.made = self._spare.pop() if self._spare else self._environments.make()
                instance.said = self._environments.reset(instance.made, row)
                if self._conversation is not None:
                    tools = self._conversation.tools.of(instance.made)
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
            task.add_done_callback(lambda _: self._scoring.pop(asked))
        return await asyncio.shield(task)

    def close(
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
        self._under_way.move_to_end((attempt, member))
        return instance

    def _bound(self) -> None:
        if len(self._under_way) <= MAX_INSTANCES:
            return
        self._under_way.popitem(last=False)
        if not self._is_said:
            self._is_said = True
            logger.warning(
                "more than %d environments are under way: those that were asked for longest ago are let go, "
                "and their groups are tried anew",
                MAX_INSTANCES,
            )
