"""Environments of a script over real gRPC (quartet.rewards.environments)."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from counting_environments import ADDS, ENDS, Counter, begin, calls, ones, proceed, refusal
from quartet.config.model import ConfigError
from quartet.rewards.environments import Environments
from quartet.rewards.prompts import Prompts
from quartet.rewards.tokenizer import TextTokenizer
from quartet.v1 import envhost_service_pb2 as envhost
from served_rewards import CHATS, SECONDS, group, serving


@pytest.fixture(scope="module")
def tokenizer(chat_model: Path) -> TextTokenizer:
    return TextTokenizer(str(chat_model))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counter, "made", [])


def test_each_conversation_has_its_own_and_functions_are_given_them(
    socket_address: str, tokenizer: TextTokenizer
) -> None:
    """environments.py 1 to 4; with a tool of the script beside."""
    seen: list[Any] = []
    threads: set[int] = set()

    def noted(environments: list[Any], prompts: list[Any], **_: Any) -> list[float]:
        threads.add(threading.get_ident())
        seen.extend([list(environments), prompts])
        return [one.count for one in environments]

    def twice(n: int) -> int:
        """Doubles.

        Args:
            n: A number.
        """
        threads.add(threading.get_ident())
        return 2 * n

    serves = serving(socket_address, tokenizer, noted, evaluation=CHATS[:1], tools=[twice], factory=Counter)
    with serves as (client, ended):
        functions = client.describe().functions
        assert [(one.name, one.weight) for one in functions] == [("noted", 1.0), ("Counter", 1.0)]
        (prompt,) = client.prompts(count=1)
        assert prompt.opens and [one.name for one in prompt.tools] == ["twice", "add", "later"]
        assert len(Counter.made) == 1, "the one that was looked at"
        assert [begin(client, 3, member=member) for member in (0, 1)] == [" Begin.", " Begin."]
        many = calls(("add", '{"n": 2}'), ("later", "{}"), ("twice", '{"n": 4}'), ("_hidden", "{}"))
        said = proceed(client, many, index=3)
        assert said == ["2", "has 2", "8", "{'error': 'Tool _hidden not found.'}"]
        assert proceed(client, calls(("add", '{"n": 0}')), index=3, member=1) == ["{'error': 'no zero'}"]
        assert proceed(client, many, ADDS, index=3) == ["4"]
        assert proceed(client, many, ADDS, ENDS, index=3) == []
        rewards = client.score(3, [[1], [2]], request_id="a")
        assert [[one.value for one in reward.scores] for reward in rewards] == [[4, 0.4], [0, 0]]
        assert seen[0] == Counter.made[1:3] and ended == []
        asked = [{"role": "user", "content": "question 3 Begin."}]
        assert seen[1] == [asked, asked]
        assert begin(client, split=envhost.SPLIT_EVAL, attempt="e") == " Begin."
        assert len(Counter.made) == 3, "one whose group was scored is reset instead"
        assert Counter.made[2].resets == 2 and Counter.made[2].count == 0
    assert len(threads) == 1


def test_promise_1_one_of_another_class_has_its_own_methods(
    socket_address: str, tokenizer: TextTokenizer
) -> None:
    class Other:
        def reset(self, **_: Any) -> None: ...

        def twice(self, n: int) -> int:
            return 200 * n

    def twice(n: int) -> int:
        """Doubles.

        Args:
            n: A number.
        """
        return 2 * n

    kinds = iter((Counter, Counter, Other))
    serves = serving(socket_address, tokenizer, ones, tools=[twice], factory=lambda: next(kinds)())
    with serves as (client, ended):
        asked = calls(("add", '{"n": 2}'), ("later", "{}"), ("twice", '{"n": 4}'))
        told = []
        for member in range(2):
            begin(client, member=member)
            told.append(proceed(client, asked, member=member))
        lacks = ["{'error': 'Tool add not found.'}", "{'error': 'Tool later not found.'}", "800"]
        assert told == [["2", "has 2", "8"], lacks] and ended == []


def test_a_row_without_a_prompt_begins_with_an_empty_message(
    socket_address: str, tokenizer: TextTokenizer
) -> None:
    """As TRL has it: reset is not given that, and functions are."""
    datasets = pytest.importorskip("datasets")
    seen: list[Any] = []

    class Bare:
        def reset(self, **columns: Any) -> str:
            seen.append(columns)
            return "all of it"

    def noted(prompts: list[Any], **_: Any) -> list[float]:
        seen.append(prompts)
        return [0.0]

    digests = set()
    mixed = [{"answer": "7"}, {"answer": "7", "prompt": [{"role": "user", "content": "go"}]}]
    for rows in (mixed[:1], datasets.Dataset.from_list(mixed[:1]), mixed):
        with serving(socket_address, tokenizer, noted, rows, factory=Bare) as (client, ended):
            (prompt, *_) = client.prompts(count=1)
            assert [(one.role, one.content) for one in prompt.messages.messages] == [("user", "")]
            assert begin(client) == "all of it"
            client.score(0, [[1]], request_id="a")
            digests.add(client.describe().digest)
        assert seen == [{"answer": "7"}, [[{"role": "user", "content": "all of it"}]]] and ended == []
        seen.clear()
    assert len(digests) == 2
    with pytest.raises(ConfigError, match="has no column 'prompt', but answer"):
        Prompts("train_dataset", mixed[:1], tokenizer)


@pytest.mark.parametrize(
    ("told", "text"),
    [(None, ""), ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"), ("\ud800", "?")],
)
def test_what_reset_returns(socket_address: str, tokenizer: TextTokenizer, told: Any, text: str) -> None:
    """environments.py 2: functions are given it as TRL puts it."""
    seen: list[Any] = []

    def noted(prompts: list[Any], **_: Any) -> list[float]:
        seen.extend(prompts)
        return [0.0]

    class Other(Counter):
        pass

    Other.told = told
    with serving(socket_address, tokenizer, noted, factory=Other) as (client, _):
        assert begin(client) == text
        client.score(0, [[1]], request_id="a")
    asked = "question 0"
    whole = [{"type": "text", "text": asked}, *told] if isinstance(told, list) else asked + (told or "")
    assert seen == [[{"role": "user", "content": whole}]]


@pytest.mark.parametrize("told", [3, [{"type": "image", "image": 0}], "a" * ((1 << 20) + 1), KeyError("x")])
def test_what_reset_raises_or_should_not_return_ends_the_run(
    socket_address: str, tokenizer: TextTokenizer, told: Any
) -> None:
    class Other(Counter):
        def reset(self, **_: Any) -> Any:
            if isinstance(told, Exception):
                raise told
            return told

    with serving(socket_address, tokenizer, ones, factory=Other) as (client, ended):
        wrong = refusal(lambda: begin(client))
        assert (wrong.reason, wrong.metadata) == ("SCORER_FAILED", {"function": "environment_factory"})
        assert wrong.message.startswith("environment_factory 'Other': ")
        assert refusal(lambda: client.score(0, [[1]], request_id="a")).message == wrong.message
    (error,) = ended
    assert error is told if isinstance(told, Exception) else "reset returned" in str(error)


def test_without_methods_a_prompt_is_opened_and_answered_once(
    socket_address: str, tokenizer: TextTokenizer
) -> None:
    class Bare:
        def reset(self, answer: str, **_: Any) -> str:
            self.answer = answer
            return f" ({answer})"

        async def get_reward(self) -> float:
            return float(self.answer)

    with serving(socket_address, tokenizer, None, factory=Bare) as (client, _):
        described = client.describe()
        assert described.max_turns == 1 and [one.name for one in described.functions] == ["Bare"]
        assert begin(client, 7) == " (7)" and proceed(client, ENDS, index=7) == []
        assert client.score(7, [[1]], request_id="a")[0].scores[0].value == 7


def test_promise_5_of_own_tools_async_methods_come_behind_the_others(
    socket_address: str, tokenizer: TextTokenizer
) -> None:
    looked = threading.Event()

    class Slow(Counter):
        def wait(self) -> bool:
            """Waits."""
            return looked.wait(0.3)

        async def look(self) -> bool:
            """Looks."""
            looked.set()
            return True

    with serving(socket_address, tokenizer, ones, factory=Slow) as (client, _):
        begin(client)
        assert proceed(client, calls(("look", "{}"), ("wait", "{}"))) == ["True", "False"]


FORKS = """
import asyncio, os, sys
from quartet.rewards.environments import Environments

class Room:
    number = 0

    def reset(self, **columns): ...

    {begin} get_reward(self):
        with open(sys.argv[1], "a") as file:
            file.write(f"{{os.getpid()}}\\n")
        if self.number == 0 and not os.fork():
            return 9.0
        return 1.0

environments = Environments(Room)
made = [environments.make() for _ in range(4)]
for number, one in enumerate(made):
    one.number = number
found = environments.reward(environments=made)
print(asyncio.run(found) if "{begin}" == "async def" else found)
"""


@pytest.mark.parametrize("begin", ["def", "async def"])
def test_promise_3_what_a_get_reward_forks_does_not_go_on_with_the_next(tmp_path: Path, begin: str) -> None:
    words = [sys.executable, "-c", FORKS.format(begin=begin), str(tmp_path / "pids")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=True)
    assert done.stdout == "[1.0, 1.0, 1.0, 1.0]\n"
    assert len(set((tmp_path / "pids").read_text().split())) == 1


def test_a_last_message_without_content_has_no_place_for_what_reset_returns(
    socket_address: str, tokenizer: TextTokenizer
) -> None:
    calling = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "add", "arguments": {}}}],
    }
    rows = [{"prompt": [{"role": "user", "content": "x"}, calling]}]
    with (
        pytest.raises(ConfigError, match=r"\[-1\] has no content, and what reset\(\) returns is appended"),
        serving(socket_address, tokenizer, ones, rows, factory=Counter),
    ):
        pass


def test_promise_6_the_digest_has_what_a_class_inherits_and_what_a_partial_gives() -> None:
    class Room:
        def __init__(self, *sizes: Any, **named: Any) -> None: ...

        def reset(self, **_: Any) -> None: ...

    class Base(Room): ...

    class Other(Room):
        """Something else."""

    class Of(Base): ...

    inherited = Environments(Of).digest
    Of.__bases__ = (Other,)
    assert Environments(Of).digest != inherited
    Of.__bases__ = (Base,)
    assert Environments(Of).digest == inherited

    given = [
        (1,), (2,), ("1",), ([1, 2],), ({1, 2},), ({"a": 1},), ({"a": 2},), (None,), (ones,), (group,),
        (Room,),
    ]  # fmt: skip
    digests = {Environments(functools.partial(Room, *one)).digest for one in given}
    assert len(digests) == len(given)
    first, second = (Environments(functools.partial(Room, size=object())).digest for _ in range(2))
    assert first == second, "where an object lies says nothing"
    itself: list[Any] = []
    itself.append(itself)
    assert Environments(functools.partial(Room, itself)).digest


def test_the_digest_has_the_class(socket_address: str, tokenizer: TextTokenizer) -> None:
    class Bare:
        def reset(self, **_: Any) -> None:
            """Begins."""

    class Other:
        def reset(self, **_: Any) -> None:
            """Begins otherwise."""

    Other.__name__ = "Bare"
    digests = set()
    for factory in (None, Bare, Other, Bare):
        with serving(socket_address, tokenizer, ones, factory=factory) as (client, _):
            digests.add(client.describe().digest)
    assert len(digests) == 3
    assert group(0, [[1]]).request_id == ""
