"""Episodes of several attempts that their environment compares with each other: v1 environments, a real host.

Invariants by their module: v1/outcome.py 3-6, v1/environment.py 1.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet.v1 import envhost_service_pb2
from quartet_envhost.sampler import turn_seed
from rollout_outcomes import kind, refusal
from scripted_inference import says

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def run(
    hosted: Any, env_id: str = "compare-env", *, task: int = 0, seed: int | None = None, **args: Any
) -> Any:
    """The one rollout of a request."""
    request = envhost_service_pb2.RunRolloutsRequest(
        run_id="run",
        request_id=f"{env_id} {len(hosted.policy.requests)} {args}",
        environment={"id": env_id, "args_json": json.dumps(args)},
        members=[5],
        task_index=task,
        sampling={"seed": seed},
        timeout_ms=20_000,
        max_retries=1,
    )
    stream = hosted.stub.RunRollouts(request, timeout=90)
    (rollout,) = [frame.rollout async for frame in stream if frame.HasField("rollout")]
    assert rollout.member == 5
    return rollout


async def test_each_attempt_keeps_what_the_comparison_gave_it(hosted: Any) -> None:
    """Their mean is the same whatever they say: it would teach nothing."""
    hosted.policy.answer = says("abc", "a", "ab")
    rollout = await run(hosted)
    assert not rollout.HasField("failure"), rollout.failure
    assert [(part.agent, part.reward, part.samples) for part in rollout.parts] == [
        ("agent", 5.0, 1),
        ("agent", 1.0, 1),
        ("agent", 3.0, 1),
    ]
    assert [dict(part.rewards) for part in rollout.parts] == [
        {"own": 1.0, "rank": n} for n in (2.0, 0.0, 1.0)
    ]
    lengths = [sum(span.length for span in sample.spans) for sample in rollout.samples]
    assert lengths == [4, 2, 3], "samples in the order of their parts: text and its end"
    assert rollout.reward == 3.0 and dict(rollout.rewards) == {"own": 1.0, "rank": 1.0}
    assert rollout.metrics["first"] == 1.0, "a mean over those that have it"
    assert rollout.num_turns == 3 and rollout.usage.completion_tokens == 9


async def test_parts_are_in_the_order_of_asking(hosted: Any) -> None:
    """v1/outcome.py 3, v1/policy.py 3: whichever attempt ends first, equal seeds give equal rollouts."""
    replies = {turn_seed(7, 0, 5, at << 32): reply for at, reply in enumerate(("slow", "a", "ab"))}

    def answer(request: Any, last: str) -> str:
        return replies[request.completion_seeds[0] if request.completion_seeds else request.sampling.seed]

    hosted.policy.answer = answer
    rollout = await run(hosted, seed=7, together=True, max_concurrent_agents=3)
    assert not rollout.HasField("failure"), rollout.failure
    assert [part.reward for part in rollout.parts] == [5.0, 1.0, 3.0]
    assert [len(sample.logprobs) for sample in rollout.samples] == [5, 2, 3]


async def test_two_sides_are_told_apart(hosted: Any) -> None:
    hosted.policy.answer = says("abc", "a")
    rollout = await run(hosted, attempts=2, sides=True)
    assert [(part.agent, part.reward) for part in rollout.parts] == [("agent", 3.0), ("rival", 1.0)]


async def test_one_attempt_is_a_rollout_of_one_piece(hosted: Any) -> None:
    hosted.policy.answer = says("abc")
    rollout = await run(hosted, attempts=1)
    assert rollout.reward == 1.0 and not rollout.parts and not rollout.HasField("failure")


async def test_an_attempt_that_is_there_twice_is_one(hosted: Any) -> None:
    """v1/outcome.py 6: its comparison appends it to the episode again."""
    hosted.policy.answer = says("twice", "a")
    rollout = await run(hosted, attempts=2)
    assert not rollout.HasField("failure"), rollout.failure
    assert [(part.reward, part.samples) for part in rollout.parts] == [(3.0, 1), (1.0, 1)]
    assert len(rollout.samples) == 2 and rollout.num_turns == 2 and rollout.reward == 2.0
    hosted.policy.answer = says("twice")
    rollout = await run(hosted, attempts=1)
    assert not rollout.parts and len(rollout.samples) == 1 and rollout.num_turns == 1


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("break", "LookupError: no scale"),
        ("exit", "SystemExit: no rollouts beside it"),
        ("never", "deadline"),
        ("nan", "not a finite number: rank"),
    ],
)
@pytest.mark.parametrize("goes_on", [False, True])
async def test_a_comparison_that_breaks_is_no_reward(
    hosted: Any, reply: str, message: str, goes_on: bool
) -> None:
    """Invariant 5, whatever the environment would take for complete."""
    hosted.policy.answer = says("a", reply, "abc")
    rollout = await run(hosted, goes_on=goes_on, timeout={"finalize": 0.5})
    assert kind(rollout) == ("TIMEOUT" if reply == "never" else "SCORER")
    assert message in rollout.failure.message
    assert len(hosted.policy.requests) == 3, "a scorer is not tried again"


async def test_an_attempt_that_failed_fails_the_episode_unless_its_environment_goes_on(hosted: Any) -> None:
    """Invariant 5: it is compared with nobody and trains nothing."""
    hosted.policy.answer = says("a", "raise alone", "abc")
    rollout = await run(hosted)
    assert kind(rollout) == "SCORER" and "a scorer's bug" in rollout.failure.message
    hosted.policy.answer = says("a", "raise alone", "abc")
    rollout = await run(hosted, goes_on=True)
    assert not rollout.HasField("failure"), rollout.failure
    assert [(part.reward, part.samples) for part in rollout.parts] == [(1.0, 1), (3.0, 1)]
    assert len(rollout.samples) == 2 and rollout.reward == 2.0
    hosted.policy.answer = says("a", "raise alone")
    rollout = await run(hosted, attempts=2, goes_on=True)
    found = [(part.agent, part.reward, part.samples) for part in rollout.parts]
    assert found == [("agent", 1.0, 1)], "compared with those of its role in the other rollouts"
    hosted.policy.errors = [QuartetError("PROMPT_TOO_LONG", "9 tokens, limit 4")] * 3
    rollout = await run(hosted, goes_on=True)
    assert kind(rollout) == "MODEL", "nothing is left to go on with"


async def test_another_environment_of_verifiers_runs_the_taskset(hosted: Any) -> None:
    hosted.policy.answer = says("a", "abcd", "ab")
    rollout = await run(hosted, "trial-env", env="best-of-n", n=3, threshold=2.0)
    assert not rollout.HasField("failure"), rollout.failure
    assert [part.reward for part in rollout.parts] == [0.5, 2.0, 1.0]
    assert rollout.metrics["best"] == pytest.approx(1 / 3) and rollout.metrics["pass_at_n"] == 1.0
    error = await refusal(run(hosted, "trial-env", env="best-of-m"))
    assert error.reason == "INVALID_CONFIG" and "'best-of-m'" in error.message
    assert "best-of-n" in error.message and error.metadata["key"] == "args.env"
    error = await refusal(run(hosted, "trial-env", env="best-of-n", m=3))
    assert error.reason == "INVALID_CONFIG" and error.metadata["key"] == "args.m"
