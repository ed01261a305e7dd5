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
