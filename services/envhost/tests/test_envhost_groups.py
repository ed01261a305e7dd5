"""Rewards that compare the members of a group: classic environments through a real host.

Invariants by their module: classic/environment.py 4-5, groups.py 1-3, classic/scoring.py 1-3,
together.py 1-3.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet.interact import interact
from quartet.v1 import envhost_service_pb2
from quartet_envhost.groups import Groups
from rollout_outcomes import kind, refusal, until
from scripted_inference import says

GROUPS = {"kind": "groups"}
MIXTURE = {"kind": "mixture"}


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(("args", "others"), [(GROUPS, []), (MIXTURE, ["said_hello"])])
async def test_a_group_is_scored_together(classic: Any, args: dict[str, Any], others: list[str]) -> None:
    """Of a mixture by its part alone."""
    ref = classic.request(args=args).environment
    described = await classic.stub.DescribeEnvironment(
        envhost_service_pb2.DescribeEnvironmentRequest(environment=ref), timeout=90
    )
    info = described.environment
    assert info.group_scoring and list(info.rewards) == ["own", "rank", *others]
    classic.policy.answer = says("a", "abc", "ab", "abcd")
    rollouts = await classic.run(args=args, members=range(4), messages_of_members=4)
    assert not any(r.HasField("failure") for r in rollouts), [r.failure for r in rollouts]
    ranks = {r.messages[-1].content: r.rewards["rank"] for r in rollouts}
    assert ranks == {"a": 0.0, "ab": 1.0, "abc": 2.0, "abcd": 3.0}
    assert all(dict(r.rewards) == {"rank": r.rewards["rank"], "own": 1.0} for r in rollouts)
    assert all(r.reward == 2 * r.rewards["rank"] + 1 for r in rollouts)
    assert sorted(r.member for r in rollouts) == [0, 1, 2, 3] and all(len(r.samples) == 1 for r in rollouts)
    classic.policy.answer = says("alone")
    (rollout,) = await classic.run(args=args, members=[7])
    assert rollout.member == 7 and rollout.reward == 1.0


@pytest.mark.asyncio(loop_scope="session")
async def test_a_row_of_a_mixture_of_mixtures_is_scored_by_its_part(classic: Any) -> None:
    """classic/environment.py 5"""
    classic.policy.answer = says("hello")
    (rollout,) = await classic.run(args=MIXTURE, task_index=len(classic.modes))
    assert not rollout.HasField("failure") and dict(rollout.rewards) == {"said_hello": 1.0}, rollout.failure
    assert rollout.reward == 1.0 and dict(rollout.metrics) == {"num_turns": 1.0}


@pytest.mark.asyncio(loop_scope="session")
async def test_what_fails_is_left_out_of_the_comparison(classic: Any) -> None:
    """Invariant 5: scorer faults are of their own member, and a failed rollout is compared with nobody."""
    classic.policy.answer = says("a", "raise", "nan", "exit", "abc")
    rollouts = await classic.run(args=GROUPS, members=range(5), messages_of_members=5)
    told = {r.messages[-1].content: kind(r) for r in rollouts}
    faults = dict.fromkeys(("raise", "nan", "exit"), "SCORER")
    assert told == faults | {"a": "UNSPECIFIED", "abc": "UNSPECIFIED"}
    # Of all at once, and then of one by itself.
    classic.policy.errors = [QuartetError("INTERNAL", "the decode step failed")]
    classic.policy.errors += [QuartetError("PROMPT_TOO_LONG", "9 tokens, limit 4")]
    classic.policy.answer = says("a", "abc", "ab")
    rollouts = await classic.run(args=GROUPS, members=range(4))
    assert sorted(kind(r) for r in rollouts) == ["MODEL", "UNSPECIFIED", "UNSPECIFIED", "UNSPECIFIED"]
    assert sorted(r.rewards["rank"] for r in rollouts if not r.HasField("failure")) == [0.0, 1.0, 2.0]
    classic.policy.answer = says("a", "break the group", "b")
    rollouts = await classic.run(args=GROUPS, members=range(3), max_retries=2)
    assert {kind(r) for r in rollouts} == {"SCORER"} and "a group scorer's bug" in rollouts[0].failure.message
    asked = [request.n for request in classic.policy.requests]
    assert asked == [5, 4, 1, 1, 1, 1, 3], "a scorer is not tried again"


@pytest.mark.asyncio(loop_scope="session")
async def test_a_function_of_groups_says_a_number_for_each(classic: Any) -> None:
    """classic/scoring.py 5."""
    for said, text in (
        ("too many", "rank: it said 4 numbers of 3 answers"),
        ("a table", "rank: it said dict, not a list of 3 numbers"),
    ):
        classic.policy.answer = lambda request, last, said=said: said
        rollouts = await classic.run(args=GROUPS, members=range(3), max_retries=2)
        assert {kind(r) for r in rollouts} == {"SCORER"}
        assert {r.failure.message for r in rollouts} == {text}


@pytest.mark.asyncio(loop_scope="session")
async def test_a_group_is_scored_in_the_order_of_its_members(classic: Any) -> None:
    """groups.py 1: whichever ended first."""
    others = asyncio.Barrier(2)

    async def policy(question: Any) -> Any:
        if question.member:
            await others.wait()
        else:
            await asyncio.sleep(0.5)  # the others have joined by then, or the test tells less
        return envhost_service_pb2.ModelAnswer(
            prompt_token_ids=[1], token_ids=[2], logprobs=[-1.0], message={"content": "in order"}
        )

    run = classic.request(args=GROUPS, members=range(3))
    rollouts = [one async for one in interact(classic.stub, run, policy, timeout_s=60)]
    assert not any(r.HasField("failure") for r in rollouts), [r.failure for r in rollouts]
    assert {r.member: r.rewards["rank"] for r in rollouts} == {0: 0.0, 1: 1.0, 2: 2.0}


@pytest.mark.asyncio(loop_scope="session")
async def test_a_member_out_of_time_does_not_hold_its_group(classic: Any) -> None:
    """Invariant 7."""
    await classic.run(args=GROUPS)  # loaded; the times below are rollouts'
    classic.policy.answer = says("stay", "a", "a", "b", "bcd")
    rollouts = await classic.run("waits_if_told", GROUPS, members=range(3), timeout_ms=3000)
    assert [kind(r) for r in rollouts] == ["TIMEOUT", "UNSPECIFIED", "UNSPECIFIED"]
    assert "without it" in rollouts[0].failure.message
    assert sorted(r.rewards["rank"] for r in rollouts[1:]) == [0.0, 1.0]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_killed_worker_fails_the_whole_group_and_it_is_run_again(classic: Any) -> None:
    """Invariants 5 and 9."""
    await classic.run(args=GROUPS)
    classic.policy.delay_s = 2.0
    run = asyncio.create_task(classic.run(args=GROUPS, members=range(3), max_retries=1))
    await asyncio.wait_for(until(lambda: classic.policy.running == 3), 60)
    (pool,) = [one for one in classic.host._pools.values() if one.in_use]
    os.kill(pool.workers[0].pid, signal.SIGKILL)
    classic.policy.delay_s = 0.0
    rollouts = await run
    assert sorted(r.member for r in rollouts) == [0, 1, 2]
    assert not any(r.HasField("failure") for r in rollouts), [r.failure for r in rollouts]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_group_that_no_worker_has_room_for_is_refused(classic: Any) -> None:
    error = await refusal(classic.run(args=GROUPS, members=range(17)))
    assert error.reason == "INVALID_REQUEST" and "rollouts_per_worker" in error.message


async def raised(work: Awaitable[Any]) -> BaseException | None:
    """What it raises; in a task of its own SystemExit would end the loop."""
    try:
        await work
    except (Exception, SystemExit) as error:  # noqa: BLE001 - told to the test
        return error
    return None


async def test_a_group_is_complete_when_everybody_joined_or_left() -> None:
    """groups.py 1 and 2."""
    scored: list[list[str]] = []
    going_on, ended = asyncio.Event(), asyncio.Event()

    async def score(states: list[str]) -> None:
        scored.append(states)
        if "slow" in states:
            try:
                await going_on.wait()
            finally:
                ended.set()
        if "broken" in states:
            raise LookupError("no scale")
        if "exits" in states:
            sys.exit("no rollouts beside it")
        if "cancels itself" in states:
            raise asyncio.CancelledError

    groups = Groups(score)
    request = envhost_service_pb2.RunRolloutsRequest(request_id="one", members=range(3))
    members = [groups.enter(request) for _ in range(3)]
    first = asyncio.create_task(members[0].join(2, "b"))
    await asyncio.sleep(0)
    members[1].leave()
    assert not scored
    await asyncio.wait_for(members[2].join(0, "a"), 60)
    await asyncio.wait_for(first, 60)
    assert scored == [["a", "b"]] and not groups._open, "by their numbers, whoever ended first"
    for _ in range(3):
        groups.enter(request).leave()
    assert len(scored) == 1 and not groups._open, "nobody is left to score"
    tasks = [
        asyncio.create_task(raised(groups.enter(request).join(number, one)))
        for number, one in enumerate(("a", "broken", "b"))
    ]
    assert [type(await asyncio.wait_for(task, 60)) for task in tasks] == [LookupError] * 3
    tasks = [
        asyncio.create_task(raised(groups.enter(request).join(number, one)))
        for number, one in enumerate(("a", "exits", "b"))
    ]
    assert [type(await asyncio.wait_for(task, 60)) for task in tasks] == [SystemExit] * 3, "no loop ended"
    tasks = [
        asyncio.create_task(groups.enter(request).join(number, one))
        for number, one in enumerate(("a", "cancels itself", "b"))
    ]
    await asyncio.wait(tasks, timeout=60)
    assert all(task.cancelled() for task in tasks), "nobody waits for what is over"
    tasks = [
        asyncio.create_task(groups.enter(request).join(number, one))
        for number, one in enumerate(("a", "slow", "b"))
    ]
    await asyncio.sleep(0.01)
    for task in tasks:
        assert not ended.is_set(), "the scoring goes on while somebody waits for it"
        task.cancel()
        await asyncio.wait([task])
    await asyncio.wait_for(ended.wait(), 60)
    assert not groups._open
