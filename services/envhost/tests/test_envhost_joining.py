"""The first turns of a group, asked for in one call."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

import pytest
import pytest_asyncio
import scripted_inference
from quartet.errors import QuartetError, refused
from quartet.inference import STUCK
from quartet.replicas import Replicas
from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb
from quartet_envhost import joining
from quartet_envhost.joining import FirstTurn, FirstTurns

LONG = 60.0


class Group:
    """Members of one group, with a policy that answers them."""

    def __init__(
        self, turns: FirstTurns, policy: scripted_inference.ScriptedInference, stack: ExitStack
    ) -> None:
        self.policy = policy
        self._turns, self._stack = turns, stack
        numbers = itertools.count()
        policy.answer = lambda *_: f"answer {next(numbers)}"

    def member(self, group: str = "g", size: int = 1) -> FirstTurn:
        return self._stack.enter_context(self._turns.member(group, size))

    @property
    def asked(self) -> list[tuple[int, list[int]]]:
        """n and seeds of each call."""
        return [(request.n, list(request.completion_seeds)) for request in self.policy.requests]


def ask(first: FirstTurn, text: str = "hello", **sampling: Any) -> asyncio.Task[Any]:
    request = pb.GenerateRequest(
        messages=pb.MessagesPrompt(messages=[common_pb2.Message(role="user", content=text)]),
        sampling=common_pb2.SamplingParams(**sampling),
        n=1,
        session_id="g",
    )
    return asyncio.create_task(first.complete(request, LONG))


def said(generated: Any) -> str:
    (completion,) = generated.completions
    return str(completion.message.content)


@pytest_asyncio.fixture
async def group(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Group]:
    """Where a member waits for one that does not come, the test's own time limit ends it."""
    monkeypatch.setattr(joining, "GATHER_SECONDS", LONG)
    policy = scripted_inference.ScriptedInference()
    server = await scripted_inference.serve_scripted(policy)
    async with asyncio.timeout(LONG / 2), Replicas([server.address]) as replicas:
        with ExitStack() as stack:
            yield Group(FirstTurns(replicas), policy, stack)
    await server.stop(0)


async def test_promise_1_each_member_gets_its_own_completion_of_one_call(group: Group) -> None:
    members = [group.member() for _ in range(3)]
    answers = await asyncio.gather(
        *(ask(one, seed=seed) for one, seed in zip(members, (7, 5, 9), strict=True))
    )
    assert group.asked == [(3, [7, 5, 9])]
    assert [said(answer) for answer in answers] == ["answer 0", "answer 1", "answer 2"]
    assert len({tuple(answer.prompt_ids) for answer in answers}) == 1
    assert len({id(answer.prompt_ids) for answer in answers}) == 3, "each has lists of its own"


async def test_promise_1_a_short_completion_does_not_wait_for_a_long_one(group: Group) -> None:
    told = group.policy.held[1] = asyncio.Event()
    first, second = [ask(group.member()) for _ in range(2)]
    assert said(await first) == "answer 0"
    await asyncio.sleep(0.05)
    assert not second.done()
    told.set()
    assert said(await second) == "answer 1"
    assert group.asked == [(2, [])]


async def test_promise_2_what_differs_is_asked_for_apart(group: Group) -> None:
    asked = [ask(one, text) for one, text in zip([group.member() for _ in range(3)], "aba", strict=True)]
    await asyncio.gather(*asked)
    assert sorted(n for n, _ in group.asked) == [1, 2]
    group.policy.requests.clear()
    one, other = group.member("h"), group.member("i")
    await asyncio.gather(ask(one), ask(other))
    assert group.asked == [(1, []), (1, [])], "another group"
    group.policy.requests.clear()
    one, other = group.member(), group.member()
    await asyncio.gather(ask(one, seed=3), ask(other))
    assert sorted(group.asked) == [(1, []), (1, [3])], "seeded and unseeded"


async def test_promise_2_a_call_has_at_most_so_many(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "MAX_COMPLETIONS", 3)
    await asyncio.gather(*(ask(one) for one in [group.member() for _ in range(7)]))
    assert [n for n, _ in group.asked] == [3, 3, 1]


async def test_promise_3_nobody_waits_for_a_member_that_has_ended(group: Group) -> None:
    first = group.member()
    with ExitStack() as stack:
        gone = stack.enter_context(group._turns.member("g"))
        asked = ask(first)
        await asyncio.sleep(0)
        assert gone.pending and not group.asked
    await asked
    assert group.asked == [(1, [])]
    await ask(group.member())
    assert group.asked == [(1, []), (1, [])], "a later member waits for nobody"


async def test_promise_3_of_a_group_in_one_worker_those_about_to_begin_are_waited_for(group: Group) -> None:
    asked = []
    for seed in (7, 5, 9):  # each asks before the next one has begun
        asked.append(ask(group.member(size=3), seed=seed))
        await asyncio.sleep(0)
    assert not group.asked
    await asyncio.gather(*asked)
    assert group.asked == [(3, [7, 5, 9])]


async def test_promise_3_others_are_waited_for_no_longer_than_that(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "GATHER_SECONDS", 0.01)
    first, late = group.member(), group.member()
    await ask(first)
    assert late.pending
    await ask(late)
    assert group.asked == [(1, []), (1, [])]


async def test_promise_4_who_leaves_ends_no_other(group: Group) -> None:
    group.policy.delay_s = 0.2
    last = group.member()
    first, early = ask(group.member()), ask(group.member())
    await asyncio.sleep(0)
    early.cancel()  # before the call
    await asyncio.sleep(0)
    second = ask(last)
    while not group.policy.running:  # noqa: ASYNC110 - the replica tells nobody
        await asyncio.sleep(0.001)
    first.cancel()
    assert said(await second).startswith("answer")
    assert early.cancelled() and group.asked == [(2, [])]


async def test_promise_4_the_last_one_ends_the_call(group: Group) -> None:
    group.policy.delay_s = LONG
    asked = [ask(group.member()) for _ in range(2)]
    while not group.policy.running:  # noqa: ASYNC110 - the replica tells nobody
        await asyncio.sleep(0.001)
    for one in asked:
        one.cancel()
    while group.policy.running:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def test_promise_4_nor_does_the_call_go_on_for_those_who_left(group: Group) -> None:
    told = group.policy.held[0] = asyncio.Event()
    group.policy.held[1] = asyncio.Event()
    first, second = [ask(group.member()) for _ in range(2)]
    while not group.policy.running:  # noqa: ASYNC110 - the replica tells nobody
        await asyncio.sleep(0.001)
    second.cancel()
    await asyncio.sleep(0.01)
    told.set()
    assert said(await first) == "answer 0"
    async with asyncio.timeout(12):  # sooner than the client gives a silent replica up
        while group.policy.running:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_a_refusal_is_every_members(group: Group) -> None:
    group.policy.errors.append(QuartetError("PROMPT_TOO_LONG", "300 tokens"))
    results = await asyncio.gather(*(ask(group.member()) for _ in range(2)), return_exceptions=True)
    assert [getattr(one, "reason", one) for one in results] == ["PROMPT_TOO_LONG"] * 2


async def test_promise_5_one_that_fails_in_the_service_fails_no_other(group: Group) -> None:
    group.policy.errors += [QuartetError("INTERNAL", "the weights give non-finite logits")] * 2
    members = [group.member() for _ in range(3)]
    asked = [ask(one, seed=seed) for one, seed in zip(members, (7, 5, 9), strict=True)]
    results = await asyncio.gather(*asked, return_exceptions=True)
    (joined, *alone) = group.asked
    assert joined == (3, [7, 5, 9]) and sorted(alone) == [(1, [5]), (1, [7]), (1, [9])]
    reasons = [getattr(one, "reason", "answered") for one in results]
    assert sorted(reasons) == ["INTERNAL", "answered", "answered"]


async def test_promise_5_a_structure_that_one_cannot_go_on_with_fails_no_other(group: Group) -> None:
    """It is refused for the tokens of that one."""
    group.policy.errors.append(refused(STUCK, "", "send a simpler one"))
    members = [group.member() for _ in range(2)]
    results = await asyncio.gather(*(ask(one, seed=seed) for one, seed in zip(members, (7, 5), strict=True)))
    assert sorted(map(said, results)) == ["answer 0", "answer 1"]
    (joined, *alone) = group.asked
    assert joined == (2, [7, 5]) and sorted(alone) == [(1, [5]), (1, [7])]


async def test_promise_5_what_has_ended_is_not_asked_for_again(group: Group) -> None:
    group.policy.breaks_before = 1
    first, second = await asyncio.gather(*(ask(group.member()) for _ in range(2)))
    assert [n for n, _ in group.asked] == [2, 1]
    assert said(first) == "answer 0" and said(second) == "answer 1"
