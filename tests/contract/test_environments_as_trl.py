"""Environments of a script act, and are shown to reward functions, as by TRL's GRPOTrainer: its own code over
the same rows and the same answers (quartet.rewards.environments, instances)."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from quartet.rewards.conversation import Conversation
from quartet.rewards.environments import Environments, opened
from quartet.rewards.functions import Failed, RewardFunctions, Scores
from quartet.rewards.instances import Instances
from quartet.rewards.messages import given_of
from quartet.rewards.own_tools import Tools
from quartet.rewards.prompts import Prompts
from quartet.rewards.tokenizer import TextTokenizer
from quartet.v1 import common_pb2, reward_service_pb2

pytest.importorskip("trl", reason="TRL is a development dependency")
# Importing it takes most of that.
pytestmark = pytest.mark.slow

COUNT = 4
ROWS = [
    {"prompt": [{"role": "system", "content": "play"}, {"role": "user", "content": "go:"}], "start": n}
    for n in (3, 5)
]
#: Of each member its answers, each the calls that it makes.
ANSWERS: list[list[list[tuple[str, dict[str, Any]]]]] = [
    [[("move", {"by": 2}), ("look", {}), ("double", {"n": 4})], [("move", {"by": -1})], []],
    [[]],
    [[("look", {}), ("move", {"by": 0}), ("reset", {}), ("get_reward", {}), ("_own", {}), ("move", {})], []],
    [[("move", {"by": 5})], [("look", {}), ("look", {})], []],
]


#: Rows without a prompt.
BARE: list[dict[str, Any]] = [{"start": n} for n in (3, 5)]


def double(n: int) -> int:
    """Doubles.

    Args:
        n: A number.
    """
    return 2 * n


class Walk:
    """Has a place; says where it begins to every second one that it is reset for."""

    seen: ClassVar[list[Any]] = []
    resets: ClassVar[Any] = itertools.count()

    def reset(self, prompt: Any, start: int, **columns: Any) -> str | None:
        self.seen.append((copy.deepcopy(prompt), start, sorted(columns)))
        self.at = start
        return f" from {start}" if next(self.resets) % 2 else None

    def move(self, by: int) -> int:
        """Moves.

        Args:
            by: How far.
        """
        if not by:
            raise LookupError("it's here")
        self.at += by
        return self.at

    async def look(self) -> dict[str, int]:
        """Says where it is."""
        return {"at": self.at}

    def _own(self) -> None:
        """Nobody calls it."""

    def get_reward(self) -> float:
        return self.at / 2


class Begun(Walk):
    """Says all that is asked."""

    def reset(self, start: int, **columns: Any) -> str | None:  # type: ignore[override]
        return super().reset(None, start, **columns)


class Still:
    """Of another class: what it lacks is not found, and it has no reward of its own."""

    def reset(self, start: int, **_: Any) -> str:
        self.at = start
        return "stay"

    async def look(self) -> str:
        """Says where it is."""
        return f"still at {self.at}"


def spy(seen: list[Any]) -> Any:
    def noted(prompts: Any, completions: Any, environments: Any, start: Any, **_: Any) -> list[float]:
        seen.append(copy.deepcopy((prompts, completions, start, [one.at for one in environments])))
        return [float(one.at) for one in environments]

    return noted


def messages_of(calls: Sequence[tuple[str, dict[str, Any]]], number: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": f"so {number}"}
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in calls
        ]
    return message


def one_after_another(*kinds: type) -> Any:
    """A factory of objects of these classes."""
    left = iter(kinds)
    return lambda: next(left)()


def of_trl(
    model: Path, output: Path, patch: pytest.MonkeyPatch, rows: Any, factory: Any
) -> tuple[list[Any], Any, Any]:
    """What a function was given, the rewards of each function, and the tools as they are shown."""
    from datasets import Dataset
    from transformers.utils.chat_template_utils import get_json_schema
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer

    settings = {"report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    args = GRPOConfig(
        output_dir=str(output),
        per_device_train_batch_size=COUNT,
        num_generations=COUNT,
        shuffle_dataset=False,
        max_completion_length=2000,
        **settings,
    )
    seen: list[Any] = []
    # Of what reads answers, which are given here as they would be read.
    patch.setattr(grpo_trainer, "add_response_schema", lambda tokenizer: tokenizer)
    trainer: Any = GRPOTrainer(
        model=str(model),
        reward_funcs=[spy(seen)],
        args=args,
        train_dataset=Dataset.from_list(rows),
        tools=[double],
        environment_factory=factory,
    )
    # An answer is told by its first token: its member, and its number.
    turns = dict.fromkeys(range(COUNT), 0)

    def generate(asked: list[list[int]], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        if not any(turns.values()):
            going_on = list(range(COUNT))
        else:
            going_on = [one for one in turns if turns[one] and ANSWERS[one][turns[one] - 1]]
        assert len(asked) == len(going_on)
        ids = [[10 + 10 * one + turns[one]] for one in going_on]
        for one in going_on:
            turns[one] += 1
        return ids, None

    def parse(_: Any, ids: list[int], **__: Any) -> dict[str, Any]:
        member, number = divmod(ids[0] - 10, 10)
        return messages_of(ANSWERS[member][number], number)

    trainer.model.config.max_position_embeddings = 1 << 20
    trainer._generate_single_turn, trainer._tokenizer.response_schema = generate, {"type": "object"}
    patch.setattr(grpo_trainer, "parse_response", parse)
    rewards: list[Any] = []
    calculate = trainer._calculate_rewards
    trainer._calculate_rewards = lambda *given: rewards.append(calculate(*given)) or rewards[-1]
    trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))
    return seen, rewards[0].T.tolist(), [get_json_schema(tool)["function"] for tool in trainer.tools]


async def of_ours(model: Path, rows: Any, factory: Any) -> tuple[list[Any], Any, Any]:
    """As an environment host asks for it."""
    seen: list[Any] = []
    environments, tokenizer = Environments(factory), TextTokenizer(str(model))
    functions = RewardFunctions([spy(seen)], own=environments.reward)
    tools = Tools([double], functions.turns, functions.loop, environments.methods)
    under_way = Instances(environments, functions.turns, Conversation(tools, tokenizer, None, 2000))
    prompts = Prompts("train_dataset", rows, tokenizer, tools=tools.definitions, opens=True)
    said: list[list[common_pb2.Message]] = []
    for member in range(COUNT):
        assert not isinstance(await under_way.open("a", member, prompts.row(0), "row 0"), Failed)
    for member, answers in enumerate(ANSWERS):
        said.append([])
        for number, calls in enumerate(answers):
            message = messages_of(calls, number)
            made = [
                common_pb2.ToolCall(id="c", name=name, arguments_json=json.dumps(arguments))
                for name, arguments in calls
            ]
            said[-1].append(common_pb2.Message(role="assistant", content=message["content"], tool_calls=made))
            more = await under_way.after("a", member, said[-1], number + 1)
            assert isinstance(more, reward_service_pb2.ContinueResponse)
            said[-1] += more.messages
    instances = under_way.of("a", range(COUNT))
    group = prompts.group(0, [[1]] * COUNT, said)
    for at, one in enumerate(instances):
        group.prompts[at] = opened(group.prompts[at], one.said)
    object.__setattr__(group, "environments", [one.made for one in instances])
    scores = await functions.score(group)
    assert isinstance(scores, Scores), scores
    assert [given_of(one) for one in said[1]] == [{"role": "assistant", "content": "so 0"}]
    shown = [
        {"name": one.name, "description": one.description, "parameters": json.loads(one.parameters_json)}
        for one in tools.definitions
    ]
    return seen, scores.values, shown


@pytest.mark.parametrize("which", ["one class", "two classes, and rows without prompts"])
async def test_environments_act_the_same(
    which: str, untrained_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what a factory makes is of several classes."""
    is_one, found = which == "one class", []
    rows = ROWS if is_one else BARE
    kinds = [Walk] * COUNT if is_one else [Begun, Begun, Still, Begun]
    for whose in ("theirs", "ours"):
        monkeypatch.setattr(Walk, "seen", [])
        monkeypatch.setattr(Walk, "resets", itertools.count())
        if whose == "theirs":
            factory = one_after_another(*kinds)
            seen, rewards, shown = of_trl(untrained_model, tmp_path / "out", monkeypatch, rows, factory)
            shown = [{key: one[key] for key in ("name", "description", "parameters")} for one in shown]
        else:
            # There the one that is looked at is the first of these.
            factory = one_after_another(kinds[0], *kinds)
            seen, rewards, shown = await of_ours(untrained_model, rows, factory)
        order = sorted(shown, key=lambda one: str(one["name"]))
        numbers = [[None if one is None or one != one else one for one in row] for row in rewards]
        found.append((seen, numbers, order, Walk.seen))
    theirs, ours = found
    # There results of async methods come last.
    for seen, *_ in found:
        for messages in seen[0][1]:
            assert messages[0]["role"] == "assistant"
    assert in_their_order(ours[0]) == theirs[0]
    assert ours[1:] == theirs[1:]
    assert theirs[0][0][3] == [4, 3, 3, 8] and len(theirs[3]) == kinds.count(kinds[0])
    if not is_one:
        assert "Tool move not found." in str(theirs[0][0][1][2]) and theirs[1][1] == [2.0, 1.5, None, 4.0]
        assert [one[-1]["content"] for one in theirs[0][0][0]] == ["", " from 3", "stay", ""]


def in_their_order(seen: list[Any]) -> list[Any]:
    """With the results of async methods behind the others of their answer."""
    (prompts, completions, start, places) = seen[0]
    sorted_ = []
    for messages in completions:
        told: list[Any] = []
        for is_tool, run in itertools.groupby(messages, lambda one: one["role"] == "tool"):
            results = list(run)
            told += sorted(results, key=lambda one: one["name"] == "look") if is_tool else results
        sorted_.append(told)
    return [(prompts, sorted_, start, places)]
