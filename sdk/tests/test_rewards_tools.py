"""Tools of a script, and how conversations with them go on (quartet.rewards.own_tools, conversation,
calling_template)."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy
import pytest
from quartet.config import ConfigError
from quartet.rewards import calling_template
from quartet.rewards.conversation import MAX_TURNS, Conversation
from quartet.rewards.functions import Failed
from quartet.rewards.own_loop import OwnLoop
from quartet.rewards.own_tools import MAX_DEFINITIONS_BYTES, MAX_RESULTS_BYTES, OF_TRANSFORMERS, Tools
from quartet.rewards.tokenizer import TextTokenizer
from quartet.rewards.turns import Turns
from quartet.trl.sampling import MAX_CALLING
from quartet.v1 import common_pb2

SECONDS = 60.0


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.

    Returns:
        Their sum.
    """
    return a + b


def fail(why: str, kind: Literal["value", "exit"] = "value") -> str:
    """Raises.

    Args:
        why: What it says.
        kind: What it raises.
    """
    raise SystemExit(why) if kind == "exit" else ValueError(why)


async def later(text: str) -> str:
    """Says it a moment later.

    Args:
        text: What it says.
    """
    await asyncio.sleep(0)
    if text == "exit":
        raise SystemExit(text)
    return f"later {text}"


def documented(answer: Callable[..., Any], name: str = "own", text: str = "Answers.") -> Any:
    """A tool without arguments."""

    def tool() -> str:
        return answer()  # type: ignore[no-any-return]

    tool.__name__, tool.__doc__ = name, text
    return tool


def message(*calls: tuple[str, Any]) -> common_pb2.Message:
    """An answer that makes these calls; arguments that are text are as a model wrote them."""
    return common_pb2.Message(
        role="assistant",
        tool_calls=[
            common_pb2.ToolCall(
                id=f"call{number}",
                name=name,
                arguments_json=given if isinstance(given, str) else json.dumps(given),
            )
            for number, (name, given) in enumerate(calls)
        ],
    )


def tools(*given: Any, turns: Turns | None = None) -> Tools:
    return Tools(list(given), turns or Turns(), OwnLoop())


async def results(made: Tools, *calls: tuple[str, Any]) -> list[str]:
    found = await made.answer(message(*calls))
    assert not isinstance(found, Failed), found
    assert [(one.role, one.name, one.tool_call_id) for one in found] == [
        ("tool", name, f"call{number}") for number, (name, _) in enumerate(calls)
    ]
    return [one.content for one in found]


def test_promise_1_they_are_shown_by_their_schemas() -> None:
    from transformers.utils import get_json_schema  # type: ignore[attr-defined]

    made = tools(add, fail, later)
    for one, function in zip(made.definitions, (add, fail, later), strict=True):
        schema = get_json_schema(function)["function"]
        shown = {
            "name": one.name,
            "description": one.description,
            "parameters": json.loads(one.parameters_json),
        }
        assert shown == {key: value for key, value in schema.items() if key != "return"}
        assert list(json.loads(one.parameters_json)) == list(schema["parameters"]), "in its order, too"


def undocumented(a: int) -> int:
    return a


def unhinted(a) -> int:  # type: ignore[no-untyped-def]
    """A.

    Args:
        a: b
    """
    return 0


def half(a: int, b: int) -> int:
    """A.

    Args:
        a: b
    """
    return 0


class Callable_:
    """With a docstring."""

    def __call__(self) -> None:
        """Nothing."""


class Answering:
    """Answers whatever it is asked."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer

    def __call__(self) -> None:
        """Nothing."""

    def __getattr__(self, name: str) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer or self


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (numpy.array([add, later]), "tools = ndarray is refused: give a list of functions"),
        ([add, Answering()], "tools[1] = Answering is refused: give a function, with type hints"),
        ([add, Answering("name")], "tools[1] = "),
        (
            [add, Answering(ZeroDivisionError("asked"))],
            "tools[1] = Answering is refused: looked at, it raises ZeroDivisionError: asked; give a function",
        ),
        (add, "tools = function is refused: give a list of functions"),
        ([3], "tools[0] = int is refused: give a function, with type hints and a docstring"),
        ([Callable_], "tools[0] = the class Callable_ is refused: give a function"),
        ([Callable_()], "tools[0] = Callable_ is refused: give a function"),
        ([functools.partial(add, b=2)], "tools[0] = partial is refused: give a function"),
        ([add, later, add], "tools[2] is the second tool called 'add' (test_rewards_tools.py:"),
        ([add, undocumented], "tools[1] = undocumented (test_rewards_tools.py:"),
        ([undocumented], "is refused: Cannot generate JSON schema for undocumented because it has no docst"),
        ([unhinted], "is refused: Argument a is missing a type hint in function unhinted; give it"),
        ([half], "the docstring has no description for the argument 'b'; give it type hints, and a docst"),
        (
            [documented(add, text="x" * (MAX_DEFINITIONS_BYTES + 1))],
            f"at most {MAX_DEFINITIONS_BYTES} travel with a prompt; shorten their docstrings",
        ),
    ],
)
def test_what_is_no_tool_is_refused(given: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Tools(given, Turns(), OwnLoop())
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


def test_without_transformers_they_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, OF_TRANSFORMERS, None)
    with pytest.raises(ConfigError, match="and it is not installed; pip install transformers"):
        tools(add)


def test_a_digest_is_of_names_schemas_and_source() -> None:
    def other(a: int, b: int = 1) -> int:
        """Adds two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a - b

    was = tools(add, later).digest
    assert tools(add, later).digest == was
    other.__name__ = "add"
    renamed = documented(add, "another")
    digests = {
        was,
        *(tools(*given).digest for given in ([add], [later, add], [other, later], [add, renamed])),
    }
    assert len(digests) == 5


async def test_promise_2_results_come_in_the_order_of_the_calls() -> None:
    made = tools(add, fail, later)
    assert await results(
        made, ("later", {"text": "a"}), ("add", {"a": 1}), ("later", {"text": "b"}), ("add", {"a": 2, "b": 3})
    ) == ["later a", "2", "later b", "5"]
    assert await results(made) == []


async def test_promise_2_coroutines_run_side_by_side_and_wait_for_no_turn() -> None:
    met = asyncio.Event()
    began, release = threading.Event(), threading.Event()

    async def first() -> str:
        """Waits for the second."""
        await met.wait()
        return "first"

    async def second() -> str:
        """Comes, and lets the one go that has the turn."""
        met.set()
        release.set()
        return "second"

    def slow() -> str:
        began.set()
        assert release.wait(SECONDS)
        return "slow"

    made = tools(first, second, documented(slow))
    assert await results(made, ("first", {}), ("own", {}), ("second", {})) == ["first", "slow", "second"]
    assert began.is_set()


async def test_promise_2_the_others_are_called_in_turn_in_the_lent_thread() -> None:
    seen: list[tuple[int, int]] = []

    def noted(n: int) -> None:
        """Notes it.

        Args:
            n: A number.
        """
        seen.append((n, threading.get_ident()))

    turns, ended = Turns(), threading.Event()
    lent = threading.Thread(target=turns.lend, args=(ended,))
    lent.start()
    try:
        made = tools(noted, turns=turns)
        many = (results(made, *(("noted", {"n": 10 * of + n}) for n in range(3))) for of in range(8))
        assert await asyncio.gather(*many) == [["None"] * 3] * 8
    finally:
        ended.set()
        lent.join(SECONDS)
    assert {thread for _, thread in seen} == {lent.ident}
    assert [n for n, _ in seen] == [10 * of + n for of in range(8) for n in range(3)]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (("fail", {"why": "no 'such' thing"}), {"error": "no 'such' thing"}),
        (("later", {"txt": 1}), {"error": "later() got an unexpected keyword argument 'txt'"}),
        (("add", {}), {"error": "add() missing 1 required positional argument: 'a'"}),
        (("none", {"a": 1}), {"error": "Tool none not found."}),
        (("add", "[1]"), None),
        (("add", '{"a": '), None),
        (("add", "[" * 100_000), None),
    ],
)
async def test_promise_3_what_goes_wrong_is_told(call: tuple[str, Any], told: Any) -> None:
    found = await results(tools(add, fail, later), ("add", {"a": 1}), call, ("later", {"text": "x"}))
    assert (found[0], found[2]) == ("2", "later x")
    assert found[1] == str(told) if told is not None else found[1].startswith("{'error': ")


@pytest.mark.parametrize("call", [("fail", {"why": "out", "kind": "exit"}), ("later", {"text": "exit"})])
async def test_promise_3_what_is_no_exception_fails(call: tuple[str, Any]) -> None:
    found = await tools(add, fail, later).answer(message(("add", {"a": 1}), call))
    assert isinstance(found, Failed) and isinstance(found.error, SystemExit)
    assert found.function == call[0] and found.told.startswith(f"tool {call[0]!r}: ")
    assert "test_rewards_tools.py:" in found.told and "SystemExit" in found.told


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, "None"),
        ({"a": [1]}, "{'a': [1]}"),
        ([1, "b"], "[1, 'b']"),
        ([], "[]"),
        ([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}], "a b"),
        ("é\ud800", "é?"),
    ],
)
async def test_results_are_text(result: Any, text: str) -> None:
    assert await results(tools(documented(lambda: result)), ("own", {})) == [text]


class Unsayable:
    def __str__(self) -> str:
        raise LookupError("no text")


@pytest.mark.parametrize(
    ("result", "why"),
    [
        ([{"type": "text", "text": "a"}, {"type": "image", "image": 3}], "has a part of type 'image', and"),
        ([{"type": "text", "text": 3}], "has a part of type 'text', and the model is given only text"),
        ([{"type": "text", "text": "a"}, "b"], "has a part of type 'str'"),
        (Unsayable(), "no text"),
    ],
)
async def test_promise_4_what_is_no_text_is_an_error(result: Any, why: str) -> None:
    (found,) = await results(tools(documented(lambda: result)), ("own", {}))
    assert found.startswith("{'error': ") and why in found


async def test_promise_4_results_are_bounded_together() -> None:
    def long(count: int) -> str:
        """Says much.

        Args:
            count: How much.
        """
        return "é" * (count // 2)

    half, whole = {"count": MAX_RESULTS_BYTES // 2}, {"count": MAX_RESULTS_BYTES}
    made = tools(long)
    assert [len(one) for one in await results(made, ("long", whole))] == [MAX_RESULTS_BYTES // 2]
    first, large, second, small = await results(
        made, ("long", half), ("long", whole), ("long", half), ("long", {"count": 2})
    )
    assert len(first) == len(second) == MAX_RESULTS_BYTES // 4
    assert f"has {MAX_RESULTS_BYTES} bytes, and the results of an answer {MAX_RESULTS_BYTES} at most" in large
    assert small.startswith("{'error': 'the result has 2 bytes")


@pytest.fixture(scope="module")
def tokenizer(chat_model: Path) -> TextTokenizer:
    return TextTokenizer(str(chat_model))


def conversation(tokenizer: TextTokenizer, most_calling: int | None, most_tokens: int | None) -> Conversation:
    return Conversation(tools(add, fail), tokenizer, most_calling, most_tokens)


CALLING, TALKING = message(("add", {"a": 41})), common_pb2.Message(role="assistant", content="42")
#: "42" are as many tokens.
RESULT = common_pb2.Message(role="tool", content="42", name="add", tool_call_id="call0")


@pytest.mark.parametrize(
    ("limits", "messages", "token_count", "most"),
    [
        ((None, None), [CALLING], 10**6, 0),
        ((None, 10), [CALLING], 5, 3),
        ((None, 10), [CALLING], 7, 1),
        ((None, 10), [CALLING], 8, 1),
        ((None, 10), [CALLING], 9, None),
        ((None, 10), [CALLING], 10, None),
        ((None, 10), [CALLING], 11, None),
        ((None, None), [TALKING], 1, None),
        ((1, None), [CALLING], 1, 0),
        ((0, None), [CALLING], 1, None),
        ((1, None), [CALLING, RESULT, CALLING], 1, None),
        ((2, None), [CALLING, RESULT, CALLING], 1, 0),
        ((2, None), [CALLING, RESULT, TALKING], 1, None),
        ((None, None), [CALLING, RESULT] * (MAX_TURNS - 2) + [CALLING], 1, 0),
        ((None, None), [CALLING, RESULT] * (MAX_TURNS - 1) + [CALLING], 1, None),
    ],
)
async def test_a_conversation_goes_on_until_a_limit(
    tokenizer: TextTokenizer,
    limits: tuple[int | None, int | None],
    messages: list[common_pb2.Message],
    token_count: int,
    most: int | None,
) -> None:
    """conversation.py 1, 2. None: it is over."""
    found = await conversation(tokenizer, *limits).after(messages, token_count)
    assert not isinstance(found, Failed)
    assert list(found.messages) == ([] if most is None else [RESULT])
    assert found.max_tokens == (most or 0)


async def test_an_error_without_a_text_is_told_to_the_policy() -> None:
    """own_tools.py 3: whatever its class."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("and that")

    def raises() -> None:
        raise Mute

    (result,) = await tools(documented(raises)).answer(message(("own", {})))  # type: ignore[misc]
    assert result.content == "{'error': '(it has no text: its __str__ raises)'}"


async def test_where_it_is_over_no_tool_is_called(tokenizer: TextTokenizer) -> None:
    calls: list[int] = []
    made = tools(documented(lambda: calls.append(1)))
    asking = message(("own", {}))
    for limits, count in (((0, None), 1), ((None, 10), 10)):
        found = await Conversation(made, tokenizer, *limits).after([asking], count)
        assert not isinstance(found, Failed) and not found.messages and calls == []
    await Conversation(made, tokenizer).after([asking], 1)
    assert calls == [1]


@pytest.mark.parametrize(
    ("most_calling", "turns", "counted"), [(None, 1024, 4), (3, 4, 4), (2, 3, 3), (1, 2, 1), (0, 2, 0)]
)
def test_calls_are_counted_as_there_and_turns_are_told(
    tokenizer: TextTokenizer, most_calling: int | None, turns: int, counted: int
) -> None:
    made = conversation(tokenizer, most_calling, None)
    two = message(("add", {"a": 1}), ("none", {}))
    assert made.calls([CALLING, RESULT, two, RESULT, RESULT, CALLING]) == counted
    assert made.calls([TALKING]) == 0
    assert made.max_turns == turns and MAX_CALLING == MAX_TURNS - 1


def test_templates_have_to_show_calls_and_results(
    chat_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calling_template.check(str(chat_model))
    (told,) = (one.getMessage() for one in caplog.records)
    assert told.startswith(f"tools: the chat template of the model in {chat_model} shows no definitions")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    template = tmp_path / "chat_template.jinja"
    shows = "{% for tool in tools or [] %}{{ tool }}{% endfor %}"
    whole = shows + (
        "{% for m in messages %}{{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
        "{{ c['function']['name'] }}ARGUMENTS{% endfor %}{% endfor %}"
    )
    for arguments in (
        "{{ c['function']['arguments'] | tojson }}",
        "{% if c['function']['arguments'] is not string %}{{ raise_exception('text') }}{% endif %}"
        "{{ c['function']['arguments'] }}",
    ):
        template.write_text(whole.replace("ARGUMENTS", arguments))
        calling_template.check(str(tmp_path))
    assert len(caplog.records) == 1, "these show them"
    for drops in (
        whole.replace("ARGUMENTS", ""),
        "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        "{% for m in messages if m['role'] != 'tool' %}{{ m }}{% endfor %}",
        "{{ raise_exception('no tools') }}",
    ):
        template.write_text(drops)
        with pytest.raises(ConfigError, match=r"^tools are refused: the chat template of the model in "):
            calling_template.check(str(tmp_path))
