"""How a conversation with tools goes on: with the results of the calls in an answer, as long as TRL's
GRPOTrainer would go on.

1. It ends where an answer calls nothing, after `most_calling` answers whose calls were answered, and where
   the tokens after the prompt are `most_tokens`. None of either: 1023 such answers, any number of tokens.
2. Results are counted as the tokens of their text. Those that do not fit into what is left are dropped, all
   of an answer: it is the last one, as it is. Else the next answer has what is left after them, one token at
   least.
3. Nothing is kept between two calls: an equal one calls the tools again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from quartet.rewards.functions import Failed
from quartet.rewards.own_tools import Tools, is_error
from quartet.rewards.tokenizer import TextTokenizer
from quartet.v1 import common_pb2, reward_service_pb2

#: DescribeRewardsResponse.max_turns says so.
MAX_TURNS: Final = 1024


@dataclass(frozen=True)
class Conversation:
    """The conversations of a script with tools."""

    tools: Tools
    tokenizer: TextTokenizer
    #: TRL's max_tool_calling_iterations and max_completion_length.
    most_calling: int | None = None
    most_tokens: int | None = None

    @property
    def max_turns(self) -> int:
        """Answers in one, at most. Who has tools says more than one, also where no call is answered."""
        return MAX_TURNS if self.most_calling is None else max(2, self.most_calling + 1)

    def calls(self, messages: Sequence[common_pb2.Message]) -> int:
        """How many TRL counts: those of answers that were not the last that there may be."""
        answers = [one for one in messages if one.role == "assistant"]
        return sum(len(one.tool_calls) for one in answers[: self._most_calling])

    def failures(self, messages: Sequence[common_pb2.Message]) -> int:
        """How many of these calls were answered with an error. Results that were dropped are not there."""
        return sum(one.role == "tool" and is_error(one.content) for one in messages)

    async def after(
        self, messages: Sequence[common_pb2.Message], token_count: int
    ) -> reward_service_pb2.ContinueResponse | Failed:
        """What comes after the last of these, which is an answer."""
        answers = sum(one.role == "assistant" for one in messages)
        left = None if self.most_tokens is None else self.most_tokens - token_count
        is_over = answers > self._most_calling or (left is not None and left <= 0)
        if is_over or not messages[-1].tool_calls:
            return reward_service_pb2.ContinueResponse()
        results = await self.tools.answer(messages[-1])
        if isinstance(results, Failed):
            return results
        if left is None:
            return reward_service_pb2.ContinueResponse(messages=results)
        counted = await asyncio.to_thread(self._tokens, results, left)
        if counted > left:
            return reward_service_pb2.ContinueResponse()
        return reward_service_pb2.ContinueResponse(messages=results, max_tokens=max(1, left - counted))

    @property
    def _most_calling(self) -> int:
        return MAX_TURNS - 1 if self.most_calling is None else self.most_calling

    def _tokens(self, results: Sequence[common_pb2.Message], enough: int) -> int:
        """Of their text; no further than it takes to see that they are too many."""
        counted = 0
        for one in results:
            counted += len(self.tokenizer.encode(one.content))
            if counted > enough:
                break
        return counted
