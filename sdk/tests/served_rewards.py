"""A script's RewardService, served as a script does it, and asked as the environment host asks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest
from quartet.errors import QuartetError, from_rpc
from quartet.rewards.conversation import Conversation
from quartet.rewards.environments import Environments
from quartet.rewards.functions import RewardFunctions
from quartet.rewards.instances import USUAL, Bounds
from quartet.rewards.own_tools import Tools
from quartet.rewards.prompts import Prompts
from quartet.rewards.serving import served
from quartet.rewards.tokenizer import TextTokenizer
from quartet.v1 import reward_service_pb2 as pb
from quartet.v1 import reward_service_pb2_grpc as rpc

#: Longer than anything here takes on a loaded machine.
SECONDS = 60.0
CHATS = [{"prompt": [{"role": "user", "content": f"question {n}"}], "answer": str(n)} for n in range(20)]


class Client:
    """The calls of RewardService, whose refusals are QuartetErrors."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        make: Any = rpc.RewardServiceStub
        self.stub = make(channel)

    def describe(self) -> pb.DescribeRewardsResponse:
        return self._ask(self.stub.DescribeRewards, pb.DescribeRewardsRequest())

    def prompts(self, **request: Any) -> list[pb.RewardPrompt]:
        return list(self._ask(self.stub.GetPrompts, pb.GetPromptsRequest(**request)).prompts)

    def score(
        self, index: int, answers: Sequence[Sequence[int]], **request: Any
    ) -> list[pb.CompletionReward]:
        answered = self._ask(self.stub.ScoreGroup, group(index, answers, **request))
        return list(answered.rewards)

    def proceed(self, index: int, messages: Sequence[Any], token_count: int = 1, **request: Any) -> Any:
        """What comes after the last of the messages."""
        asked = pb.ContinueRequest(index=index, messages=messages, token_count=token_count, **request)
        return self._ask(self.stub.Continue, asked)

    def refusal(self, index: int, answers: Sequence[Sequence[int]], **request: Any) -> QuartetError:
        with pytest.raises(QuartetError) as caught:
            self.score(index, answers, **request)
        return caught.value

    def _ask(self, method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=SECONDS)
        except grpc.RpcError as error:
            refused = from_rpc(error)
        raise refused


def group(index: int, answers: Sequence[Sequence[int]], **request: Any) -> pb.ScoreGroupRequest:
    """Answers to one prompt, each its tokens."""
    completions = [pb.RewardedCompletion(member=at, token_ids=ids) for at, ids in enumerate(answers)]
    return pb.ScoreGroupRequest(run_id="run", index=index, completions=completions, **request)


@contextlib.contextmanager
def channel_to(address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(SECONDS)
        yield channel


@contextlib.contextmanager
def serving(
    address: str,
    tokenizer: TextTokenizer,
    functions: Any,
    rows: Any = CHATS,
    evaluation: Any = None,
    tools: Sequence[Any] = (),
    most_calling: int | None = None,
    most_tokens: int | None = None,
    factory: Any = None,
    bounds: Bounds = USUAL,
    **settings: Any,
) -> Iterator[tuple[Client, list[BaseException]]]:
    """A client of it, and what it was ended with."""
    ended: list[BaseException] = []
    environments = None if factory is None else Environments(factory)
    if environments is not None:
        settings["own"] = environments.reward
    rewards = functions if isinstance(functions, RewardFunctions) else RewardFunctions(functions, **settings)
    methods = {} if environments is None else environments.methods
    made = Tools(list(tools), rewards.turns, rewards.loop, methods)
    shown = made.definitions
    conversation = Conversation(made, tokenizer, most_calling, most_tokens) if shown else None
    more: dict[str, Any] = {"tools": shown, "opens": environments is not None}
    train = Prompts("train_dataset", rows, tokenizer, **more)
    other = None if evaluation is None else Prompts("eval_dataset", evaluation, tokenizer, **more)
    serves = served(rewards, train, other, address, ended.append, conversation, environments, bounds)
    with serves, channel_to(address) as channel:
        yield Client(channel), ended
