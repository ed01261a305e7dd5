"""What goes wrong in rollouts is typed and costs its own rollouts alone: real host, real workers, over gRPC.

Invariants by their module: pool.py 1-2, keeping.py 1, worker.py 2-4, v1/outcome.py 1, v1/starts.py 1,
process.py 1.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet.v1 import rollout_pb2
from rollout_outcomes import kind, until

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize(
    ("mode", "want", "text"),
    [
        ("setup_raises", "ENVIRONMENT", "no such row"),
        ("run_raises", "ENVIRONMENT", "the environment's bug"),
        ("reward_raises", "SCORER", "a scorer's bug"),
        ("reward_nan", "SCORER", "length"),
        ("metric_raises", "SCORER", "a metric's bug"),
        ("metric_nan", "SCORER", "not a finite number: turns"),
        ("quits", "ENVIRONMENT", "thinks that it is a program"),
        ("gives_up", "ENVIRONMENT", "EnvError"),
        ("cancels_itself", "ENVIRONMENT", "CancelledError"),
        ("raises_half_a_pair", "ENVIRONMENT", "no such emoji: ?"),
        ("says_half_a_pair", "ENVIRONMENT", "surrogates"),
    ],
)
async def test_what_the_environment_does_wrong_is_typed(hosted: Any, mode: str, want: str, text: str) -> None:
    """Invariant 5."""
    (rollout,) = await hosted.run(mode, max_retries=2)
    assert kind(rollout) == want and text in rollout.failure.message
    assert not rollout.failure.retryable and len(hosted.policy.requests) <= 1


async def test_a_broken_rollout_does_not_end_its_group(hosted: Any) -> None:
    """Invariant 5: each member's scorer fails in its own way; the others are rewarded, with zero too."""
    said = ["fine", "zero", "raise", "nan", "inf", "huge", "text", "none", "fine"]
    replies = iter(said)
    hosted.policy.answer = lambda request, last: next(replies)
    rollouts = await hosted.run("reply_decides", members=range(len(said)), messages_of_members=len(said))
    assert sorted(r.member for r in rollouts) == list(range(len(said)))
    scored = sorted(r.reward for r in rollouts if not r.HasField("failure"))
    assert scored == [0.0, 1.0, 1.0]
    failed = [r for r in rollouts if r.HasField("failure")]
    assert {kind(r) for r in failed} == {"SCORER"}, [r.failure for r in failed]
    assert {r.messages[-1].content for r in failed} == {"raise", "nan", "inf", "huge", "text", "none"}
    assert all(r.samples for r in failed), "what was sampled is there to be looked at"
    (none,) = [r.failure.message for r in failed if r.messages[-1].content == "none"]
    assert none.endswith("TypeError: reward length said None, which is no number")


async def test_a_reward_that_is_no_coroutine_is_named(hosted: Any) -> None:
    """v1/scoring.py"""
    stream = hosted.stub.RunRollouts(hosted.request("plain-env", task_index=0), timeout=60)
    (rollout,) = [frame.rollout async for frame in stream if frame.HasField("rollout")]
    assert kind(rollout) == "SCORER" and "reward plain is no coroutine: write" in rollout.failure.message


async def test_what_would_end_the_process_ends_one_rollout(hosted: Any) -> None:
    """own_tasks.py 1: of rewards, which Verifiers runs in tasks of their own; others are not disturbed."""
    said = ["fine", "exit", "interrupt", "panic", "closes", "cancelled", "fine"]
    replies = iter(said)
    hosted.policy.answer = lambda request, last: next(replies)
    rollouts = await hosted.run("reply_decides", members=range(len(said)), timeout_ms=60_000, max_retries=2)
    assert [rollout.reward for rollout in rollouts if not rollout.HasField("failure")] == [1.0, 1.0]
    failed = sorted(one.failure.message for one in rollouts if one.HasField("failure"))
    assert {kind(one) for one in rollouts if one.HasField("failure")} == {"SCORER"}, failed
    for text, raised in zip(
        sorted(failed, key=lambda text: text.partition("RuntimeError: ")[2]),
        (
            "CancelledError:",
            "GeneratorExit:",
            "KeyboardInterrupt: nobody",
            "Panic: index",
            "SystemExit: a scorer",
        ),
        strict=True,
    ):
        assert "trial_env/__init__.py:" in text and raised in text, text
    assert sum(one.n for one in hosted.policy.requests) == len(said), (
        "no worker died, so nothing is sampled again"
    )


async def test_prints_do_not_disturb_the_line(hosted: Any) -> None:
    """frames.py 2."""
    (rollout,) = await hosted.run("prints")
    assert not rollout.HasField("failure") and rollout.reward > 0


async def test_deadline_covers_scoring(hosted: Any) -> None:
    """Invariants 5 and 7."""
    await hosted.run("ok")  # its replica is found once, which may take longer than the deadline here
    started = time.monotonic()
    (rollout,) = await hosted.run("scores_slowly", timeout_ms=500)
    assert kind(rollout) == "TIMEOUT" and time.monotonic() - started < 20  # of the 30 s that it sleeps
    assert "not done after 0.5 s; a larger timeout_seconds (of its env" in rollout.failure.message


async def test_a_refused_model_call_is_tried_again(hosted: Any) -> None:
    hosted.policy.errors = [QuartetError("NOT_READY", "restarting"), QuartetError("OVERLOADED", "full")]
    (rollout,) = await hosted.run("ok")
    assert not rollout.HasField("failure") and len(hosted.policy.requests) == 3


async def test_a_model_failure_is_typed_and_retried_within_its_budget(hosted: Any) -> None:
    """pool.py 4, too."""
    hosted.policy.errors = [QuartetError("INTERNAL", "engine fault")] * 2
    (rollout,) = await hosted.run("ok", max_retries=2)
    assert not rollout.HasField("failure") and len(hosted.policy.requests) == 3
    assert rollout.failed_attempts == 2
    earlier = rollout.earlier_failure
    assert kind(rollout_pb2.Rollout(failure=earlier)) == "MODEL"
    assert earlier.message.endswith("INTERNAL: engine fault")
    hosted.policy.errors = [QuartetError("INTERNAL", "engine fault")] * 2
    (rollout,) = await hosted.run("ok", max_retries=1)
    assert kind(rollout) == "MODEL" and rollout.failure.retryable and rollout.failed_attempts == 1
    hosted.policy.errors = [QuartetError("PROMPT_TOO_LONG", "9 tokens, limit 4")]
    (rollout,) = await hosted.run("ok", max_retries=1)
    assert kind(rollout) == "MODEL" and not rollout.failure.retryable
    assert not rollout.failed_attempts and not rollout.HasField("earlier_failure")


async def test_what_fits_into_no_message_is_a_full_context(hosted: Any) -> None:
    """sampler.py 3: such as a file that the model had a tool show; the rollout is scored as it stands."""
    hosted.policy.answer = lambda request, last: "four"
    (rollout,) = await hosted.run("says_too_much")
    assert not rollout.HasField("failure"), rollout.failure
    assert rollout.truncated and rollout.stop_condition == "prompt_too_long"
    assert rollout.num_turns == len(rollout.samples) == 1 and rollout.reward == 2.0


async def test_killed_worker_fails_its_members_and_they_are_retried(hosted: Any) -> None:
    """Invariants 5 and 9, host.py 1."""
    hosted.policy.delay_s = 50.0
    without = asyncio.create_task(hosted.run("ok", members=range(3), timeout_ms=60_000))
    retried = asyncio.create_task(hosted.run("ok", members=range(3), max_retries=1, timeout_ms=60_000))
    await asyncio.wait_for(until(lambda: hosted.policy.running == 6), 60)
    killed_at, hosted.policy.delay_s = time.monotonic(), 0.0
    os.kill(hosted.workers[0].pid, signal.SIGKILL)
    rollouts = await without
    assert time.monotonic() - killed_at < 30, "members end at once, and not with the time that they had"
    assert sorted(r.member for r in rollouts) == [0, 1, 2]
    assert all(kind(r) == "HOST" and r.failure.retryable and "SIGKILL" in r.failure.message for r in rollouts)
    rollouts = await retried
    assert sorted(r.member for r in rollouts) == [0, 1, 2]
    assert not any(r.HasField("failure") for r in rollouts)
    assert all(r.failed_attempts == 1 for r in rollouts)


async def test_wedged_worker_is_stopped_and_only_it_fails(hosted: Any) -> None:
    """Invariant 7."""
    # The times below are a rollout's; starting a worker takes as long as the machine is busy.
    await hosted.run("ok", timeout_ms=60_000)
    wedged = asyncio.create_task(hosted.run("wedges", timeout_ms=1000))
    await asyncio.sleep(0.3)
    beside = asyncio.create_task(hosted.run("ok", max_retries=1))
    (rollout,) = await asyncio.wait_for(wedged, 40)
    assert kind(rollout) == "TIMEOUT" and "no longer answered" in rollout.failure.message
    (rollout,) = await asyncio.wait_for(beside, 60)
    assert not rollout.HasField("failure"), "retried on the respawned worker"


@pytest.mark.slow
async def test_a_tool_server_that_dies_is_a_failure_of_the_tool(hosted: Any) -> None:
    """Invariant 5."""
    hosted.policy.answer = lambda request, last: "call calc_explode {}"
    request = hosted.request("tool-env", task_index=0, timeout_ms=90_000)
    stream = hosted.stub.RunRollouts(request, timeout=120)
    (rollout,) = [frame.rollout async for frame in stream if frame.HasField("rollout")]
    assert kind(rollout) == "TOOL" and "calc_explode" in rollout.failure.message, rollout.failure
    assert rollout.failure.retryable and len(hosted.policy.requests) == 1


@pytest.mark.parametrize(
    ("start", "told"),
    [
        ("exits", "exited with code 7 as it started"),
        ("raises", "exited with code 1 as it started: LookupError: no table of logarithms"),
        ("killed", "was ended by signal 9 (Killed) as it started"),
        ("answers once", ""),
    ],
)
async def test_a_tool_server_that_ends_as_it_starts_is_waited_for_no_longer(
    hosted: Any, start: str, told: str
) -> None:
    """v1/starts.py 1: before it has a port, and after, also where it was heard in between; a wait of three
    minutes is longer than the rollout."""
    request = hosted.request("tool-env", task_index=0, timeout_ms=170_000)
    request.environment.args_json = json.dumps({"task": {"tools": {"start": start}}})
    stream = hosted.stub.RunRollouts(request, timeout=200)
    (rollout,) = [frame.rollout async for frame in stream if frame.HasField("rollout")]
    assert kind(rollout) == "TOOL" and rollout.failure.retryable, rollout.failure
    named = f"ToolsetError: its tool server 'calc' {told}: " if told else "ToolsetError: tool servers calc do"
    assert rollout.failure.message.startswith(named), rollout.failure


async def test_worker_that_exits_is_respawned_within_the_budget(hosted: Any) -> None:
    (rollout,) = await hosted.run("exits_once", max_retries=1, timeout_ms=20_000)
    assert not rollout.HasField("failure"), rollout.failure
    (rollout,) = await hosted.run("exits")
    assert kind(rollout) == "HOST" and "exited with code 3" in rollout.failure.message
