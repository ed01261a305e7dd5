"""The prompts of a RewardService, fetched when they are asked for.

1. What is held is bounded, however many prompts there are: at most KEPT_BYTES, those that were asked for
   last.
2. Members of a group that begin at once fetch their prompt once.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Final

from quartet.v1 import envhost_service_pb2, reward_service_pb2

from quartet_envhost.rewarded.asked import ANSWER_S, LOADING, ROLLOUT, Asked

# Of groups under way, whose members come one after the other where they are tried again: thousands of usual
# prompts. One that was let go costs a call.
KEPT_BYTES: Final = 16 * 1024 * 1024
# Prompts in one answer: with the longest ones it has as many as fit.
PAGE: Final = 256

_Key = tuple[envhost_service_pb2.Split, int]


class Prompts:
    """Of both splits."""

    def __init__(self, asked: Asked) -> None:
        """Fetch none yet."""
        self._asked = asked
        self._kept: OrderedDict[_Key, reward_service_pb2.RewardPrompt] = OrderedDict()
        self._kept_bytes = 0
        self._coming: dict[_Key, asyncio.Task[reward_service_pb2.RewardPrompt]] = {}

    async def get(
        self, split: envhost_service_pb2.Split, index: int, deadline: float
    ) -> reward_service_pb2.RewardPrompt:
        """One that is there. Raises QuartetError and BrokenContract."""
        key = (split, index)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        if key not in self._coming:
            self._coming[key] = task = asyncio.create_task(self._fetch(key, deadline))
            task.add_done_callback(lambda ended: self._came(key, ended))
        return await asyncio.shield(self._coming[key])

    async def listed(
        self, split: envhost_service_pb2.Split, start: int, count: int
    ) -> AsyncIterator[reward_service_pb2.RewardPrompt]:
        """So many that are there; nothing of them is kept. Raises likewise."""
        at, end = start, start + count
        while at < end:
            deadline = time.monotonic() + ANSWER_S
            for prompt in await self._asked.prompts(split, at, min(PAGE, end - at), deadline, LOADING):
                at += 1
                yield prompt

    def _came(self, key: _Key, ended: asyncio.Task[reward_service_pb2.RewardPrompt]) -> None:
        del self._coming[key]
        if not ended.cancelled():
            ended.exception()  # which nobody is told where all have stopped waiting

    async def _fetch(self, key: _Key, deadline: float) -> reward_service_pb2.RewardPrompt:
        (prompt,) = await self._asked.prompts(*key, 1, deadline, ROLLOUT)
        self._kept[key] = prompt
        self._kept_bytes += prompt.ByteSize()
        while self._kept_bytes > KEPT_BYTES:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.ByteSize()
        return prompt
