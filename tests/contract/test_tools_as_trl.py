"""Conversations with tools are those of TRL's GRPOTrainer: its own loop over the same answers gives the same
messages and counts (quartet.rewards.own_tools, conversation, messages)."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import random
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from quartet.rewards.conversation import Conversation
from quartet.rewards.functions import Failed
from quartet.rewards.messages import given_of
from quartet.rewards.own_loop import OwnLoop
from quartet.rewards.own_tools import Tools
from quartet.rewards.tokenizer import TextTokenizer
from quartet.rewards.turns import Turns
from quartet.v1 import common_pb2

pytest.importorskip("trl", reason="TRL is a development dependency")
# Importing it takes most of that.
pytestmark = pytest.mark.slow

PROMPT = [{"role": "user", "content": "?"}]
#: What its tools are called with; of the last four each is an error. Those that are async come last: there
#: their results do, too.
CALLS = [
    ("add", {"a": 1, "b": 2.5}),
    ("repeat", {"text": "é<|im_end|>", "times": 9}),
    ("repeat", {"text": {"a": [1, None]}}),
    ("repeat", {"text": "b"}),
    ("add", {"a": 1}),
    ("add", {"a": 1, "b": "x"}),
    ("repeat", {"txt": ""}),
    ("missing", {"a": "'"}),
]
ASYNC = [("later", {"n": 3}), ("later", {"n": 0}), ("later", {"n": 4})]


def add(a: int, b: float) -> float:
    """Adds.

    Args:
        a: One.
        b: Another.
    """
    return a + b


def repeat(text: str, times: int = 1) -> Any:
    """Repeats.

    Args:
        text: What.
        times: How often; once is told as it is.
    """
    return text * times if times > 1 else {"text": text}


async def later(n: int) -> float:
    """Divides by it.

    Args:
        n: A number.
    """
    await asyncio.sleep(0)
    return 12 / n


class Answers:
    """The answers of a model, in an order that only the seed decides, each as many tokens."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def next(self, room: int | None) -> tuple[dict[str, Any], list[int], bool]:
        """As a message of TRL's, its tokens, and whether it was cut to the room that there is."""
        content = f"so {self._random.random()}"[: self._random.randint(1, 12)]
        ids = list(content.encode())
        calls = self._random.sample(CALLS, self._random.choice((0, 1, 1, 2)))
        calls += self._random.sample(ASYNC, self._random.choice((0, 0, 1, 2)))
        if room is not None and len(ids) > room:
            return {"role": "assistant", "content": content[:room]}, ids[:room], True
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": name, "arguments": arguments}}
                for name, arguments in calls
            ]
        return message, ids, False


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    from quartet.cli.tiny.files import PHRASES, write_model_files

    folder = tmp_path_factory.mktemp("tools") / "model"
    write_model_files(folder, PHRASES)
    return TextTokenizer(str(folder))


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Of TRL's async tools."""
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, daemon=True)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join(60)
    made.close()


Limits = tuple[int | None, int]


def of_trl(
    limits: Limits, seed: int, tokenizer: TextTokenizer, loop: asyncio.AbstractEventLoop
) -> tuple[list[Any], int, int]:
    """By its own loop: the messages, and how many calls it counts, and how many that failed."""
    import sys

    from trl import GRPOTrainer
    from trl.trainer import grpo_trainer

    answers, (most_calling, most_tokens) = Answers(seed), limits
    parsed: dict[tuple[int, ...], dict[str, Any]] = {}

    def generate(whole: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        # More than fits is cut by the loop itself: cut here as the engine's answer, it is the same.
        message, ids, _cut = answers.next(most_tokens - len(whole[0]))
        parsed[tuple(ids)] = message
        return [ids], None

    stub = SimpleNamespace(
        max_tool_calling_iterations=sys.maxsize if most_calling is None else most_calling,
        max_completion_length=most_tokens,
        _sync_tool_dicts=[{"add": add, "repeat": repeat}],
        _async_tool_dicts=[{"later": later}],
        async_loop=loop,
        _get_tool_suffix_ids=lambda messages: [
            id for one in messages for id in tokenizer.encode(one["content"])
        ],
        use_vllm=False,
        _is_vlm=False,
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=1 << 30)),
        environment_factories=None,
        tools=[add, repeat, later],
        _tokenizer=None,
        _generate_single_turn=generate,
    )
    first, ids, _cut = answers.next(most_tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo_trainer, "parse_response", lambda _, ids, **__: copy.deepcopy(parsed[tuple(ids)]))
        _, (messages,), _, _, counted, failed, _ = GRPOTrainer._tool_call_loop(
            stub, [list(PROMPT)], [[]], [ids], [[first]], None, None, {}
        )
    return messages, counted, failed


async def of_ours(limits: Limits, seed: int, tokenizer: TextTokenizer) -> tuple[list[Any], int, int]:
    """As an environment host asks for it."""
    answers, numbers = Answers(seed), itertools.count()
    conversation = Conversation(Tools([add, repeat, later], Turns(), OwnLoop()), tokenizer, *limits)
    said: list[common_pb2.Message] = []
    tokens, most = 0, limits[1]
    while True:
        message, ids, cut = answers.next(most)
        said.append(sent(message, numbers))
        tokens += len(ids)
        if cut:
            break
        more = await conversation.after(said, tokens)
        assert not isinstance(more, Failed)
        if not more.messages:
            break
        said += more.messages
        tokens += sum(len(tokenizer.encode(one.content)) for one in more.messages)
        if tokens == limits[1]:
            break  # there is no room for an answer; ours has one token all the same
        most = more.max_tokens
    return [given_of(one) for one in said], conversation.calls(said), conversation.failures(said)


def sent(message: dict[str, Any], numbers: Iterator[int]) -> common_pb2.Message:
    return common_pb2.Message(
        role="assistant",
        content=message["content"],
        tool_calls=[
            common_pb2.ToolCall(
                id=str(next(numbers)),
                name=call["function"]["name"],
                arguments_json=json.dumps(call["function"]["arguments"]),
            )
            for call in message.get("tool_calls", ())
        ],
    )


@pytest.mark.parametrize("limits", [(None, 60), (None, 400), (0, 400), (1, 400), (3, 120)])
async def test_conversations_are_the_same(
    tokenizer: TextTokenizer, loop: asyncio.AbstractEventLoop, limits: Limits
) -> None:
    turns, counts, failures = set(), 0, 0
    for seed in range(200):
        theirs = of_trl(limits, seed, tokenizer, loop)
        messages, counted, failed = await of_ours(limits, seed, tokenizer)
        assert (messages, counted) == theirs[:2], f"seed {seed}"
        # What had no room has been dropped, and nobody can tell any more what of it was an error.
        is_whole = sum(one["role"] == "tool" for one in messages) == counted
        assert failed == theirs[2] if is_whole else failed <= theirs[2], f"seed {seed}"
        failures += failed
        turns.add(sum(one["role"] == "assistant" for one in theirs[0]))
        counts += theirs[1]
    assert len(turns) > 1 or limits[0] == 0, "some of them go on"
    assert (counts and failures) or limits[0] == 0
