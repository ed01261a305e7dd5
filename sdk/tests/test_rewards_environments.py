"""Environments of a script over real gRPC (quartet.rewards.environments, instances.py)."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from quartet.config.model import ConfigError
from quartet.errors import QuartetError
from quartet.rewards import instances
from quartet.rewards.environments import Environments
from quartet.rewards.instances import MAX_INSTANCES, Bounds
from quartet.rewards.prompts import Prompts
from quartet.rewards.tokenizer import TextTokenizer
from quartet.v1 import common_pb2
from quartet.v1 import envhost_service_pb2 as envhost
from quartet.v1 import reward_service_pb2 as pb
from served_rewards import CHATS, SECONDS, Client, group, serving


@pytest.fixture(scope="module")
def tokenizer(chat_model: Path) -> TextTokenizer:
    return TextTokenizer(str(chat_model))


class Counter:
    """Counts how often it is called."""

    made: ClassVar[list[Counter]] = []
    told: Any = " Begin."

    def __init__(self) -> None:
        self.made.append(self)
        self.count, self.resets = -1, 0

    def reset(self, prompt: Any, answer: str, **columns: Any) -> Any:
        assert prompt[0]["content"] == f"question {answer}" and not columns
        prompt[0]["content"] = answer = ""
        self.count, self.resets = 0, self.resets + 1
        return self.told

    def get_reward(self) -> float:
        return self.count / 10

    def add(self, n: int) -> int:
        """Adds.

        Args:
            n: How many; 0 is an error.
        """
        if not n:
            raise ValueError("no zero")
        self.count += n
        return self.count

    async def later(self) -> str:
        """Looks."""
        return f"has {self.count}"

    def _hidden(self) -> str:
        """Nobody calls it."""
        return ""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counter, "made", [])


def calls(*made: tuple[str, str]) -> common_pb2.Message:
    """An answer with these calls."""
    found = [
        common_pb2.ToolCall(id=f"c{at}", name=name, arguments_json=arguments)
        for at, (name, arguments) in enumerate(made)
    ]
    return common_pb2.Message(role="assistant", tool_calls=found)


ADDS = calls(("add", '{"n": 2}'))
ENDS = common_pb2.Message(role="assistant", content="done")


def begin(client: Client, index: int = 0, attempt: str = "a", member: int = 0, **more: Any) -> str:
    asked = pb.OpenRequest(run_id="run", index=index, request_id=attempt, member=member, **more)
    return str(client._ask(client.stub.Open, asked).text)


def proceed(client: Client, *messages: Any, index: int = 0, attempt: str = "a", member: int = 0) -> list[str]:
    found = client.proceed(index, messages, request_id=attempt, member=member)
    return [one.content for one in found.messages]


def refusal(call: Any) -> QuartetError:
    with pytest.raises(QuartetError) as caught:
        call()
    return caught.value


def ones(completions: list[Any], **_: Any) -> list[float]:
    return [1.0] * len(completions)


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


def test_promise_2_of_instances_nothing_is_done_twice(socket_address: str, tokenizer: TextTokenizer) -> None:
    """An answer that was lost on the way is asked for again, also while it is made."""
    began, release = threading.Event(), threading.Event()

    class Slow(Counter):
        def wait(self) -> int:
            """Waits."""
            began.set()
            assert release.wait(SECONDS)
            self.count += 1
            return self.count

    scored: list[Any] = []

    def noted(environments: list[Any], **_: Any) -> list[float]:
        scored.append(environments)
        return [one.count for one in environments]

    waits = calls(("wait", "{}"))
    with (
        serving(socket_address, tokenizer, noted, factory=Slow) as (client, ended),
        ThreadPoolExecutor(2) as pool,
    ):
        begin(client)
        asked = [pool.submit(proceed, client, waits) for _ in range(2)]
        assert began.wait(SECONDS)
        release.set()
        assert [one.result(SECONDS) for one in asked] == [["1"], ["1"]] and proceed(client, waits) == ["1"]
        assert proceed(client, waits, ADDS) == proceed(client, waits, ADDS) == ["3"]
        for number, messages in ((1, [waits]), (4, [waits, ADDS, ENDS, ENDS])):
            wrong = refusal(lambda messages=messages: proceed(client, *messages))
            assert (wrong.reason, wrong.metadata["value"]) == ("INVALID_REQUEST", f"{number} answers")
        first = client.score(0, [[1]], request_id="a")
        assert client.score(0, [[1]], request_id="a") == first and len(scored) == 1
        begin(client)
        assert client.score(0, [[1]], request_id="a")[0].scores[0].value == 0, "it was begun anew"
        assert ended == []


def test_promise_2_of_instances_a_group_whose_caller_goes_away_is_scored_once(
    socket_address: str, tokenizer: TextTokenizer
) -> None:
    begun, release, scored = threading.Event(), threading.Event(), list[int]()

    def slow(environments: list[Counter], **_: Any) -> list[float]:
        scored.append(len(environments))
        begun.set()
        assert release.wait(SECONDS)
        return [1.0] * len(environments)

    with serving(socket_address, tokenizer, slow, factory=Counter) as (client, _):
        begin(client)
        asked = group(0, [[97]], request_id="a")
        first = client.stub.ScoreGroup.future(asked, timeout=SECONDS)
        assert begun.wait(SECONDS)
        first.cancel()
        again = client.stub.ScoreGroup.future(asked, timeout=SECONDS)
        release.set()
        assert [one.value for one in again.result().rewards[0].scores] == [1.0, 0.0]
        assert client.stub.ScoreGroup(asked, timeout=SECONDS) == again.result()
    assert scored == [1]


def test_of_a_group_that_is_scored_the_members_that_failed_are_over_too(
    socket_address: str, tokenizer: TextTokenizer
) -> None:
    with serving(socket_address, tokenizer, ones, factory=Counter) as (client, _):
        for attempt in "abc":
            for member in range(2):
                begin(client, attempt=attempt, member=member)
            client._ask(client.stub.ScoreGroup, group(0, [[97]], request_id=attempt))
            assert refusal(lambda of=attempt: proceed(client, ENDS, attempt=of, member=1)).reason == (
                "RESOURCE_UNKNOWN"
            )
    # Of each of them the one of the scored member is taken again, and of the other, which may be busy, none.
    assert len(Counter.made) == 1 + 4


def test_promise_1_of_instances_an_attempt_that_begins_anew_has_another_one(
    socket_address: str, tokenizer: TextTokenizer
) -> None:
    with serving(socket_address, tokenizer, ones, factory=Counter) as (client, _):
        begin(client)
        assert proceed(client, ADDS) == ["2"]
        begin(client)
        assert proceed(client, ADDS) == ["2"] and [one.count for one in Counter.made[1:]] == [2, 2]


def test_promise_3_of_instances_what_is_not_known_is_told(
    socket_address: str, tokenizer: TextTokenizer, caplog: Any
) -> None:
    """And promise 4: what is let go is not known any more."""
    bounds = Bounds(most=2)
    with serving(socket_address, tokenizer, ones, factory=Counter, bounds=bounds) as (client, ended):
        assert refusal(lambda: begin(client, attempt="")).metadata["field"] == "request_id"
        assert refusal(lambda: begin(client, index=20)).metadata["name"] == "train[20]"
        for member in (0, 1):
            begin(client, member=member)
        assert proceed(client, ADDS) == ["2"], "so that the other one is let go"
        begin(client, member=2)
        assert "more than 2 environments are under way" in caplog.text
        assert proceed(client, ADDS, ENDS) == [] and proceed(client, ADDS, member=2) == ["2"]
        for call in (
            lambda: proceed(client, ADDS, member=1),
            lambda: proceed(client, ADDS, attempt="b"),
            lambda: client.score(0, [[1], [1]], request_id="a"),
            lambda: client.score(0, [[1]]),
        ):
            gone = refusal(call)
            assert gone.reason == "RESOURCE_UNKNOWN" and gone.metadata["name"].startswith("conversation ")
        assert ended == []


def test_promise_4_of_instances_attempts_of_which_nobody_asks_are_let_go(
    socket_address: str, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """When they are over, without a word; and nothing before that."""
    now = [0.0]
    monkeypatch.setattr(instances, "time", SimpleNamespace(monotonic=lambda: now[0]))
    bounds = Bounds(lasts_s=100)
    with serving(socket_address, tokenizer, ones, factory=Counter, bounds=bounds) as (client, ended):
        for attempt in "ab":
            begin(client, attempt=attempt)
        kept = [weakref.ref(Counter.made.pop()) for _ in "ba"]
        now[0] = 90.0
        assert proceed(client, ADDS) == ["2"], "that of a goes on"
        now[0] = 100.0
        begin(client, attempt="c")
        assert proceed(client, ADDS, attempt="b") == ["2"], "it is not over yet"
        now[0] = 150.0
        begin(client, attempt="d")
        assert proceed(client, ADDS) == ["2"], "it was asked for since"
        now[0] = 200.0
        assert proceed(client, ADDS, attempt="b") == ["2"]
        now[0] = 251.0
        begin(client, attempt="e")
        gc.collect()
        assert [one() is None for one in kept] == [False, True]
        assert refusal(lambda: proceed(client, ADDS, ADDS)).reason == "RESOURCE_UNKNOWN"
        assert proceed(client, ADDS, attempt="b") == proceed(client, ADDS, attempt="e") == ["2"]
        assert ended == [] and not caplog.text


def test_bounds_follow_the_run() -> None:
    assert Bounds.of(1024, 600.0) == Bounds(MAX_INSTANCES, 1200.0)
    assert Bounds.of(5000, 10.0) == Bounds(10000, 20.0)


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


def test_what_is_being_begun_is_not_known_yet(socket_address: str, tokenizer: TextTokenizer) -> None:
    """instances.py 3: whoever asks then has lost the way; and of two that begin it the later one counts."""
    began, release = threading.Event(), threading.Event()

    class Slow(Counter):
        def reset(self, **columns: Any) -> Any:
            began.set()
            assert release.wait(SECONDS)
            return super().reset(**columns)

    with serving(socket_address, tokenizer, ones, factory=Slow) as (client, _), ThreadPoolExecutor(1) as pool:
        beginning = pool.submit(begin, client)
        assert began.wait(SECONDS)
        try:
            assert refusal(lambda: proceed(client, ADDS)).reason == "RESOURCE_UNKNOWN"
        finally:
            release.set()
        assert beginning.result(SECONDS) == " Begin." and proceed(client, ADDS) == ["2"]


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
