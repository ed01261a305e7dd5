"""Which instance of an environment an attempt has, over real gRPC (quartet.rewards.instances)."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from counting_environments import ADDS, ENDS, Counter, begin, calls, ones, proceed, refusal
from quartet.rewards import instances
from quartet.rewards.instances import MAX_INSTANCES, Bounds
from quartet.rewards.tokenizer import TextTokenizer
from served_rewards import SECONDS, group, serving


@pytest.fixture(scope="module")
def tokenizer(chat_model: Path) -> TextTokenizer:
    return TextTokenizer(str(chat_model))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counter, "made", [])


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


def test_promise_1_of_instances_what_was_begun_anew_is_scored_anew(
    socket_address: str, tokenizer: TextTokenizer
) -> None:
    """A host whose worker died while it waited for rewards opens the group again, with the same ids: the
    rewards that come late are those of other answers."""
    begun, release, late = threading.Event(), threading.Event(), threading.Event()

    async def slow(completion_ids: list[list[int]], **_: Any) -> list[float]:
        if completion_ids == [[97]]:
            begun.set()
            assert await asyncio.to_thread(release.wait, SECONDS)
            late.set()
        return [float(len(ids)) for ids in completion_ids]

    def rewards(client: Any) -> list[float]:
        return [one.value for one in client.score(0, [[97, 98]], request_id="a")[0].scores]

    with serving(socket_address, tokenizer, slow, factory=Counter) as (client, ended):
        begin(client)
        first = client.stub.ScoreGroup.future(group(0, [[97]], request_id="a"), timeout=SECONDS)
        assert begun.wait(SECONDS)
        begin(client)
        release.set()
        assert first.result().rewards[0].scores[0].value == 1 and late.is_set()
        assert proceed(client, ADDS) == ["2"], "its conversation goes on"
        assert rewards(client) == rewards(client) == [2.0, 0.2]
        begun.clear(), release.clear()
        begin(client)
        first = client.stub.ScoreGroup.future(group(0, [[97]], request_id="a"), timeout=SECONDS)
        assert begun.wait(SECONDS)
        begin(client)
        assert rewards(client) == [2.0, 0.0], "also while the others are scored"
        release.set()
        assert first.result().rewards[0].scores[0].value == 1 and rewards(client) == [2.0, 0.0]
        assert ended == []


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
