"""Conversations with tools over real gRPC (quartet.rewards.service, promises 2 and 3; conversation.py)."""

from __future__ import annotations

import importlib.util
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from quartet.errors import QuartetError
from quartet.rewards.functions import RewardFunctions
from quartet.rewards.tokenizer import TextTokenizer
from quartet.v1 import common_pb2
from quartet.v1 import envhost_service_pb2 as envhost
from quartet.v1 import reward_service_pb2 as pb
from served_rewards import CHATS, SECONDS, group, serving

TRAIN, EVAL = envhost.SPLIT_TRAIN, envhost.SPLIT_EVAL


@pytest.fixture(scope="module")
def tokenizer(chat_model: Path) -> TextTokenizer:
    return TextTokenizer(str(chat_model))


def length(completions: list[Any], **_: Any) -> list[float]:
    return [len(one[0]["content"]) for one in completions]


def multiply(a: int, b: int) -> int:
    """Multiplies.

    Args:
        a: One.
        b: The other; 0 ends the run.
    """
    if not b:
        raise SystemExit("no zero")
    return a * b


def called(*arguments: tuple[int, int]) -> common_pb2.Message:
    """An answer that multiplies."""
    calls = [
        common_pb2.ToolCall(id=f"c{at}", name="multiply", arguments_json=f'{{"a": {a}, "b": {b}}}')
        for at, (a, b) in enumerate(arguments)
    ]
    return common_pb2.Message(role="assistant", content="so", tool_calls=calls)


def said(content: str) -> common_pb2.Message:
    return common_pb2.Message(role="assistant", content=content)


def test_with_tools_it_describes_them_and_goes_on(socket_address: str, tokenizer: TextTokenizer) -> None:
    with serving(socket_address, tokenizer, length, evaluation=CHATS[:1]) as (client, _):
        alone = client.describe()
        assert alone.max_turns == 1 and not client.prompts(count=1)[0].tools
    tools: dict[str, Any] = {"tools": [multiply], "most_calling": 2, "most_tokens": 10}
    with serving(socket_address, tokenizer, length, evaluation=CHATS[:1], **tools) as (client, ended):
        described = client.describe()
        assert described.max_turns == 3 and described.digest != alone.digest
        for split in (TRAIN, EVAL):
            (prompt,) = client.prompts(split=split, count=1)
            (tool,) = prompt.tools
            assert (tool.name, tool.description) == ("multiply", "Multiplies.")
            more = client.proceed(0, [called((6, 7), (10, 10))], 4, split=split)
            assert [(one.role, one.content, one.tool_call_id) for one in more.messages] == [
                ("tool", "42", "c0"),
                ("tool", "100", "c1"),
            ]
            assert more.max_tokens == 1, "10 - 4 - 5"
        assert client.proceed(0, [called((6, 7))], 4).max_tokens == 4
        nothing = pb.ContinueResponse()
        assert client.proceed(0, [called((6, 7))], 9) == client.proceed(0, [said("42")]) == nothing
        assert ended == []
    with serving(socket_address, tokenizer, length, evaluation=CHATS[:1], tools=[multiply]) as (client, _):
        assert client.describe().max_turns == 1024 and client.describe().digest == described.digest


def test_who_edits_the_script_meanwhile_changes_nothing_of_what_is_served(
    socket_address: str, tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    """The file has the next run's functions then, and these are still called."""
    script = tmp_path / "script_of_today.py"
    written = (
        "def one(completions, **_):\n    return [1.0] * len(completions)\n\n\n"
        'def today() -> str:\n    """Says which day it is."""\n    return "monday"\n'
    )
    script.write_text(written)
    found = importlib.util.spec_from_file_location(script.stem, script)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    with serving(socket_address, tokenizer, module.one, tools=[module.today]) as (client, _):
        begun = client.describe().digest
        for other in (written.replace("1.0", "2.0"), written.replace("monday", "tuesday"), "if\n"):
            script.write_text(other)
            assert client.describe().digest == begun


def test_promise_3_without_tools_nothing_goes_on(socket_address: str, tokenizer: TextTokenizer) -> None:
    with serving(socket_address, tokenizer, length) as (client, _):
        assert client.proceed(0, [called((6, 7))]) == pb.ContinueResponse()


def test_what_cannot_be_continued_is_refused(socket_address: str, tokenizer: TextTokenizer) -> None:
    with serving(socket_address, tokenizer, length, tools=[multiply]) as (client, ended):
        result = common_pb2.Message(role="tool", content="42")
        wrong: list[tuple[dict[str, Any], str, dict[str, str]]] = [
            ({"index": 20, "messages": [said("a")]}, "RESOURCE_UNKNOWN", {"name": "train[20]"}),
            ({"index": 0, "messages": [said("a")], "split": EVAL}, "RESOURCE_UNKNOWN", {"name": "eval[0]"}),
            ({"index": 0, "messages": [said("a")], "split": 3}, "INVALID_REQUEST", {"field": "split"}),
            ({"index": 0, "messages": []}, "INVALID_REQUEST", {"field": "messages"}),
            ({"index": 0, "messages": [called((1, 2)), result]}, "INVALID_REQUEST", {"field": "messages"}),
        ]
        for request, reason, about in wrong:
            with pytest.raises(QuartetError) as caught:
                client.proceed(**request)
            assert caught.value.reason == reason
            assert caught.value.metadata.items() >= about.items()
        assert ended == []


def test_functions_are_given_conversations(socket_address: str, tokenizer: TextTokenizer) -> None:
    """And what TRL counts of them is a metric of each, whatever they log."""
    seen: list[Any] = []

    def noted(completions: list[Any], completion_ids: list[Any], log_metric: Any, **_: Any) -> list[float]:
        seen.extend([completions, completion_ids])
        log_metric("tools/call_frequency", 99)
        log_metric("own", 0.5)
        return [1.0] * len(completions)

    result = common_pb2.Message(role="tool", content="42", name="multiply", tool_call_id="c0")
    failed = common_pb2.Message(role="tool", content="{'error': \"can't\"}", name="multiply")
    thought = common_pb2.Message(role="assistant", content="a", reasoning_content="b")
    half = common_pb2.Message(
        role="assistant", tool_calls=[common_pb2.ToolCall(id="x", name="f", arguments_json="{")]
    )
    request = group(3, [[1, 2, 3], [4], [5]])
    request.completions[0].messages.extend([called((6, 7), (6, 8)), result, failed, said("42")])
    request.completions[0].message.CopyFrom(said("42"))
    request.completions[1].message.CopyFrom(thought)
    request.completions[2].message.CopyFrom(half)
    with serving(socket_address, tokenizer, noted, tools=[multiply]) as (client, _):
        found = client.stub.ScoreGroup(request, timeout=SECONDS).rewards
    assert [dict(one.metrics) for one in found] == [
        {"own": 0.5, "tools/call_frequency": count, "tools/failures": failed}
        for count, failed in ((2, 1), (0, 0), (1, 0))
    ]
    calls = [{"name": "multiply", "arguments": {"a": 6, "b": b}} for b in (7, 8)]
    assert seen == [
        [
            [
                {
                    "role": "assistant",
                    "content": "so",
                    "tool_calls": [{"type": "function", "function": function} for function in calls],
                },
                {"role": "tool", "name": "multiply", "content": "42"},
                {"role": "tool", "name": "multiply", "content": "{'error': \"can't\"}"},
                {"role": "assistant", "content": "42"},
            ],
            [{"role": "assistant", "content": "a", "reasoning_content": "b"}],
            [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{"}}],
                }
            ],
        ],
        [[1, 2, 3], [4], [5]],
    ]


def test_promise_2_a_tool_that_ends_the_run_ends_it_once(
    socket_address: str, tokenizer: TextTokenizer
) -> None:
    with serving(socket_address, tokenizer, length, tools=[multiply]) as (client, ended):
        assert [one.content for one in client.proceed(0, [called((1, 2))]).messages] == ["2"]
        with pytest.raises(QuartetError) as caught:
            client.proceed(0, [called((1, 2), (1, 0))])
        told = caught.value.message
        assert (caught.value.reason, caught.value.metadata) == ("SCORER_FAILED", {"function": "multiply"})
        assert told.startswith("tool 'multiply': ") and "SystemExit: no zero" in told
        with pytest.raises(QuartetError, match="no zero"):
            client.proceed(1, [called((1, 2))])
        assert client.refusal(1, [[1]]).message == told
    (error,) = ended
    assert type(error) is SystemExit


def test_tools_and_functions_take_turns_and_wait_for_nobody_that_is_gone(
    socket_address: str, tokenizer: TextTokenizer
) -> None:
    """A tool waits while a function has the thread; one whose caller has gone is not called."""
    began, release = threading.Event(), threading.Event()
    calls: list[str] = []

    def slow(completions: list[Any], **_: Any) -> list[float]:
        began.set()
        assert release.wait(SECONDS)
        calls.append("function")
        return [1.0] * len(completions)

    def tool(n: int) -> str:
        """Notes it.

        Args:
            n: A number.
        """
        calls.append(f"tool {n}")
        return ""

    def asking(n: int) -> common_pb2.Message:
        call = common_pb2.ToolCall(id="c", name="tool", arguments_json=f'{{"n": {n}}}')
        return common_pb2.Message(role="assistant", tool_calls=[call])

    functions = RewardFunctions(slow)
    serves = serving(socket_address, tokenizer, functions, tools=[tool])
    with serves as (client, ended), ThreadPoolExecutor(2) as pool:
        scored = pool.submit(client.score, 0, [[1]])
        assert began.wait(SECONDS)
        with pytest.raises(grpc.RpcError) as caught:
            client.stub.Continue(pb.ContinueRequest(messages=[asking(1)], token_count=1), timeout=0.2)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        give_up = time.monotonic() + SECONDS
        while not all(waiting.cancelled() for waiting, _ in functions.turns._waiting):
            assert time.monotonic() < give_up
            time.sleep(0.01)  # the server hears of it after its client
        continued = pool.submit(client.proceed, 0, [asking(2)])
        release.set()
        assert scored.result(SECONDS) and continued.result(SECONDS).messages
    assert calls == ["function", "tool 2"] and ended == []
