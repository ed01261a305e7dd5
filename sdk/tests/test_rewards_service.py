"""RewardService of a script over real gRPC (quartet.rewards.service, promises 1 to 3)."""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from quartet.errors import QuartetError
from quartet.kit.build import SDK, release_of
from quartet.rewards.functions import RewardFunctions
from quartet.rewards.service import MAX_COMPLETIONS, MAX_PROMPTS
from quartet.rewards.tokenizer import TextTokenizer
from quartet.v1 import common_pb2
from quartet.v1 import envhost_service_pb2 as envhost
from quartet.v1 import reward_service_pb2 as pb
from served_rewards import CHATS, SECONDS, Client, group, serving

TRAIN, EVAL = envhost.SPLIT_TRAIN, envhost.SPLIT_EVAL


@pytest.fixture(scope="module")
def tokenizer(chat_model: Path) -> TextTokenizer:
    return TextTokenizer(str(chat_model))


def length(completions: list[Any], **_: Any) -> list[float]:
    return [len(one[0]["content"]) for one in completions]


async def silent(completions: list[Any], **_: Any) -> list[None]:
    return [None for _ in completions]


def test_it_describes_itself(socket_address: str, tokenizer: TextTokenizer) -> None:
    given = RewardFunctions([length, silent, length], [1, 0, -0.5])
    with serving(socket_address, tokenizer, given, evaluation=CHATS[:3]) as (client, _):
        said = client.describe()
        assert (said.train_size, said.eval_size, said.version) == (20, 3, release_of(SDK))
        assert [(one.name, one.weight) for one in said.functions] == [
            ("length", 1.0),
            ("silent", 0.0),
            ("length-2", -0.5),
        ]
        assert 1 <= len(said.digest) <= 64 and client.describe() == said
    digests = {said.digest}
    for functions, rows, evaluation in (
        (given, CHATS, None),
        (given, CHATS, CHATS[:2]),
        (given, CHATS[1:], CHATS[:3]),
        (length, CHATS, CHATS[:3]),
    ):
        with serving(socket_address, tokenizer, functions, rows, evaluation) as (client, _):
            digests.add(client.describe().digest)
    assert len(digests) == 5
    with serving(socket_address, tokenizer, given, evaluation=CHATS[:3]) as (client, _):
        assert client.describe().digest == said.digest


def test_prompts_of_both_splits(socket_address: str, tokenizer: TextTokenizer) -> None:
    texts = [{"prompt": "one"}, {"prompt": "two"}]
    with serving(socket_address, tokenizer, length, evaluation=texts) as (client, _):
        found = client.prompts(start=0, count=MAX_PROMPTS)
        assert [one.messages.messages[0].content for one in found] == [f"question {n}" for n in range(20)]
        assert found[4:6] == client.prompts(split=TRAIN, start=4, count=2)
        other = client.prompts(split=EVAL, start=0, count=5)
        assert [list(one.tokens.token_ids) for one in other] == [
            tokenizer.encode("one"),
            tokenizer.encode("two"),
        ]
        assert client.prompts(split=EVAL, start=2**64 - 1, count=5) == []
    with serving(socket_address, tokenizer, length) as (client, _):
        assert client.prompts(split=EVAL, start=0, count=5) == []


def test_rewards_of_a_group(socket_address: str, tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode("hey<|im_end|>")

    def noted(completions: Any, completion_ids: Any, answer: Any, log_metric: Any, **_: Any) -> list[float]:
        assert (completion_ids, answer) == ([ids, [ids[0]]], ["7", "7"])
        log_metric("m", 0.5)
        return [1, 2]

    with serving(socket_address, tokenizer, [length, silent, noted]) as (client, ended):
        found = client.score(7, [ids, ids[:1]])
        assert [
            [score.value if score.HasField("value") else None for score in one.scores] for one in found
        ] == [
            [3.0, None, 1.0],
            [1.0, None, 2.0],
        ]
        assert [dict(one.metrics) for one in found] == [{"m": 0.5}] * 2 and ended == []
        assert client.score(7, [ids, ids[:1]]) == found, "it may be asked again"


def test_rewards_of_the_other_split_and_of_an_empty_answer(
    socket_address: str, tokenizer: TextTokenizer
) -> None:
    def seen(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        assert prompts == ["ab"] and completions == [""]
        return [5]

    with serving(socket_address, tokenizer, seen, evaluation=[{"prompt": "ab"}]) as (client, _):
        (found,) = client.score(0, [[]], split=EVAL)
        assert found.scores[0].value == 5


@pytest.mark.parametrize("count", [0, MAX_PROMPTS + 1, 2**32 - 1])
def test_counts_of_prompts_are_bounded(socket_address: str, tokenizer: TextTokenizer, count: int) -> None:
    with serving(socket_address, tokenizer, length) as (client, _):
        with pytest.raises(QuartetError) as caught:
            client.prompts(count=count)
        assert caught.value.reason == "INVALID_REQUEST"
        assert caught.value.metadata["field"] == "count" and "1 to 4096" in caught.value.message


def test_requests_that_are_none_are_refused_and_end_nothing(
    socket_address: str, tokenizer: TextTokenizer
) -> None:
    with serving(socket_address, tokenizer, length) as (client, ended):
        for answers in ([], [[1]] * (MAX_COMPLETIONS + 1)):
            refusal = client.refusal(0, answers)
            assert (refusal.reason, refusal.metadata["field"]) == ("INVALID_REQUEST", "completions")
        for split in (3, -1):
            assert client.refusal(0, [[1]], split=split).metadata["field"] == "split"
            with pytest.raises(QuartetError, match="INVALID_REQUEST: split"):
                client.prompts(split=split, count=1)
        for index, split in ((20, TRAIN), (2**64 - 1, TRAIN), (0, EVAL)):
            refusal = client.refusal(index, [[1]], split=split)
            assert (refusal.reason, refusal.metadata) == (
                "RESOURCE_UNKNOWN",
                {"name": f"{'eval' if split == EVAL else 'train'}[{index}]"},
            )
        assert len(client.score(0, [[1]] * MAX_COMPLETIONS)) == MAX_COMPLETIONS
        assert client.score(0, [[2**32 - 1]])[0].scores[0].value == 0, "tokens that the model has not"
        assert ended == []


def raw(client: Client, method: str, request: bytes) -> QuartetError:
    """What bytes are refused as."""
    from quartet.errors import from_rpc

    channel = client.channel
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/quartet.v1.RewardService/{method}")(request, timeout=SECONDS)
    return from_rpc(caught.value)


def test_a_newer_request_and_bytes_that_are_none_are_refused(
    socket_address: str, tokenizer: TextTokenizer
) -> None:
    with serving(socket_address, tokenizer, length) as (client, ended):
        newer = group(0, [[1]]).SerializeToString() + b"\xa2\x06\x01x"
        refusal = raw(client, "ScoreGroup", newer)
        assert (refusal.reason, refusal.metadata["field"]) == (
            "NOT_IMPLEMENTED",
            "ScoreGroupRequest, field 100",
        )
        assert raw(client, "ScoreGroup", b"\xff\xff").reason == "INVALID_REQUEST"
        assert raw(client, "Nothing", b"").reason == "NOT_IMPLEMENTED"
        assert ended == []


def test_promise_2_what_a_function_raises_ends_the_scoring_once(
    socket_address: str, tokenizer: TextTokenizer
) -> None:
    calls = list[str]()

    def wrong(answer: list[str], **_: Any) -> list[float]:
        calls.append(answer[0])
        if answer[0] == "3":
            raise LookupError(f"no {answer[0]}")
        return [1.0] * len(answer)

    line = wrong.__code__.co_firstlineno + 3
    with serving(socket_address, tokenizer, [silent, wrong]) as (client, ended):
        client.score(2, [[1]])
        refusal = client.refusal(3, [[1], [2]])
        assert (refusal.reason, refusal.metadata) == ("SCORER_FAILED", {"function": "wrong"})
        place = f"tests/test_rewards_service.py:{line} in wrong"
        assert refusal.message == f"reward function 'wrong': {place}: LookupError: no 3"
        for index in (4, 3, 0):
            again = client.refusal(index, [[1]])
            assert (again.reason, again.message) == ("SCORER_FAILED", refusal.message)
        assert calls == ["2", "3"], "nothing is called any more"
        assert client.describe().train_size == 20 and len(client.prompts(count=3)) == 3
    (error,) = ended
    assert type(error) is LookupError and str(error) == "no 3"
    frames = traceback.extract_tb(error.__traceback__)
    assert frames[-1].name == "wrong" and frames[-1].lineno == line, (
        "with its traceback, though it was answered"
    )


@pytest.mark.parametrize("answer", [[1.0], [1.0, float("nan")], [1.0, "x"]])
def test_promise_2_so_does_an_answer_that_is_none(
    socket_address: str, tokenizer: TextTokenizer, answer: list[Any]
) -> None:
    with serving(socket_address, tokenizer, lambda **_: answer) as (client, ended):
        refusal = client.refusal(0, [[1], [2]])
        assert refusal.reason == "SCORER_FAILED" and refusal.metadata == {"function": "<lambda>"}
        assert "(test_rewards_service.py:" in refusal.message and "it answered" in refusal.message
    (error,) = ended
    assert isinstance(error, ValueError) and str(error) == refusal.message


def test_promise_2_and_rows_that_cannot_be_read(socket_address: str, tokenizer: TextTokenizer) -> None:
    class Rows(list[Any]):
        broken = False

        def __getitem__(self, index: Any) -> Any:
            if self.broken:
                raise OSError("the disk is away")
            return super().__getitem__(index)

    rows = Rows(CHATS)
    with serving(socket_address, tokenizer, length, rows) as (client, ended):
        rows.broken = True
        with pytest.raises(QuartetError) as caught:
            client.prompts(count=1)
        assert caught.value.reason == "SCORER_FAILED" and caught.value.metadata == {
            "function": "train_dataset"
        }
        assert caught.value.message == "train_dataset cannot be read: OSError('the disk is away')"
        assert client.refusal(0, [[1]]).message == caught.value.message
    assert len(ended) == 1 and type(ended[0]) is OSError


def test_promise_2_of_several_failures_at_once_the_first_is_told(
    socket_address: str, tokenizer: TextTokenizer
) -> None:
    barrier = threading.Barrier(2)

    async def wrong(answer: list[str], **_: Any) -> list[float]:
        await asyncio.to_thread(barrier.wait, SECONDS)
        raise RuntimeError(answer[0])

    with serving(socket_address, tokenizer, wrong) as (client, ended):
        with ThreadPoolExecutor(2) as pool:
            told = list(pool.map(lambda index: client.refusal(index, [[1]]).message, (1, 2)))
        assert told[0] == told[1]
    assert len(ended) == 1 and told[0].endswith(f"RuntimeError: {ended[0]}")


def test_promise_1_a_slow_function_delays_no_answer(socket_address: str, tokenizer: TextTokenizer) -> None:
    began, release = threading.Event(), threading.Event()

    def slow(completions: list[Any], **_: Any) -> list[float]:
        began.set()
        assert release.wait(SECONDS)
        return [1.0] * len(completions)

    with serving(socket_address, tokenizer, slow) as (client, _), ThreadPoolExecutor(1) as pool:
        scored = pool.submit(client.score, 0, [[1]])
        assert began.wait(SECONDS)
        for _ in range(20):
            client.describe()
            client.prompts(count=20)
        assert not scored.done()
        release.set()
        assert scored.result(SECONDS)[0].scores[0].value == 1


def test_a_call_that_ran_out_of_time_is_left(socket_address: str, tokenizer: TextTokenizer) -> None:
    """One that has not had its turn is not made; what is under way ends by itself, and nothing failed."""
    began, release, called = threading.Event(), threading.Event(), list[str]()

    def slow(answer: list[str], **_: Any) -> list[float]:
        called.append(answer[0])
        began.set()
        assert release.wait(SECONDS)
        return [1.0] * len(answer)

    functions = RewardFunctions(slow)
    with serving(socket_address, tokenizer, functions) as (client, ended), ThreadPoolExecutor(1) as pool:
        scored = pool.submit(client.score, 0, [[1]])
        assert began.wait(SECONDS)
        with pytest.raises(grpc.RpcError) as caught:
            client.stub.ScoreGroup(group(1, [[1]]), timeout=0.2)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        give_up = time.monotonic() + SECONDS
        while not all(waiting.cancelled() for waiting, _ in functions.turns._waiting):
            assert time.monotonic() < give_up
            time.sleep(0.01)  # the server hears of it after its client
        release.set()
        assert scored.result(SECONDS) and client.score(2, [[1]])
        assert called == ["0", "2"] and ended == []


def test_many_groups_at_once(socket_address: str, tokenizer: TextTokenizer) -> None:
    async def answers(answer: list[str], **_: Any) -> list[float]:
        await asyncio.sleep(0)
        return [float(one) for one in answer]

    def also(answer: list[str], **_: Any) -> list[float]:
        return [float(one) for one in answer]

    with serving(socket_address, tokenizer, [answers, also]) as (client, _), ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda n: client.score(n % 20, [[1]] * 4), range(400)))
    assert [[score.value for one in rewards for score in one.scores] for rewards in found] == [
        [n % 20] * 8 for n in range(400)
    ]


def test_a_group_with_all_that_functions_may_log_fits_into_a_message(
    socket_address: str, tokenizer: TextTokenizer
) -> None:
    def talks(completions: list[Any], log_metric: Any, **_: Any) -> list[float]:
        for number in range(99):
            log_metric(f"{number}" + "é" * 200, number)
        return [0.1] * len(completions)

    with serving(socket_address, tokenizer, [talks] * 8) as (client, _):
        assert len(client.score(0, [[1]] * MAX_COMPLETIONS)) == MAX_COMPLETIONS


def test_the_contract_says_these_bounds() -> None:
    proto = (Path(__file__).parents[2] / "protos/quartet/v1/reward_service.proto").read_text()
    assert f"1 to {MAX_PROMPTS}." in proto and f"1 to {MAX_COMPLETIONS}:" in proto
    assert pb.DESCRIPTOR.services_by_name["RewardService"].full_name == "quartet.v1.RewardService"


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
    thought = common_pb2.Message(role="assistant", content="a", reasoning_content="b")
    half = common_pb2.Message(
        role="assistant", tool_calls=[common_pb2.ToolCall(id="x", name="f", arguments_json="{")]
    )
    request = group(3, [[1, 2, 3], [4], [5]])
    request.completions[0].messages.extend([called((6, 7)), result, said("42")])
    request.completions[0].message.CopyFrom(said("42"))
    request.completions[1].message.CopyFrom(thought)
    request.completions[2].message.CopyFrom(half)
    with serving(socket_address, tokenizer, noted, tools=[multiply]) as (client, _):
        found = client.stub.ScoreGroup(request, timeout=SECONDS).rewards
    assert [dict(one.metrics) for one in found] == [
        {"own": 0.5, "tools/call_frequency": count} for count in (1, 0, 1)
    ]
    function = {"name": "multiply", "arguments": {"a": 6, "b": 7}}
    assert seen == [
        [
            [
                {
                    "role": "assistant",
                    "content": "so",
                    "tool_calls": [{"type": "function", "function": function}],
                },
                {"role": "tool", "name": "multiply", "content": "42"},
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
