"""Conversations of "reward-service" that its service opens for each member. Invariants by their module:
rewarded/*.py."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from quartet.errors import QuartetError
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import reward_service_pb2 as pb
from rewarded_host import Rewarded
from rollout_outcomes import kind
from scripted_inference import OPENING, render, says
from scripted_rewards import UNKNOWN, WORDS, asks, goes_on

pytestmark = pytest.mark.asyncio(loop_scope="module")

GONE = QuartetError("RESOURCE_UNKNOWN", "no conversation a/0", name="conversation a/0")


def with_openings(host: Rewarded) -> Rewarded:
    """In conversations of two answers at most."""
    host.rewards.described.max_turns = 2
    host.rewards.splits[epb.SPLIT_TRAIN] = [asks(word, opens=True) for word in WORDS]
    host.rewards.opens = lambda request: pb.OpenResponse(text=f", {request.member}")
    host.policy.answer = lambda request, last: f"so {last}"
    return host


@pytest.fixture
def opens(lasting: Rewarded) -> Rewarded:
    """For whoever leaves the prompts alone."""
    return with_openings(lasting)


async def test_each_member_is_told_its_own(opens: Rewarded) -> None:
    """turns.py 4: the policy is asked with it, and the conversation is known by it wherever it is asked."""
    opens.rewards.goes_on = lambda request: pb.ContinueResponse(messages=[{"role": "user", "content": "on"}])
    rollouts = await opens.run(1, members=[0, 2], request_id="attempt", messages_of_members=3)
    assert not any(one.HasField("failure") for one in rollouts), rollouts
    for rollout in rollouts:
        asked = f"green, {rollout.member}"
        assert [one.content for one in rollout.messages] == [asked, f"so {asked}", "on", "so on"]
        prompt = [*render(asks(asked).messages.messages), *OPENING]
        assert list(rollout.samples[0].token_ids)[: len(prompt)] == prompt
    opened = {one.member: one for one in opens.rewards.opened}
    assert sorted(opened) == [0, 2] and len(opens.rewards.opened) == 2
    assert {(one.run_id, one.split, one.index, one.request_id) for one in opened.values()} == {
        ("run", 1, 1, "attempt")
    }
    assert {one.request_id for one in opens.rewards.continued} == {"attempt"}
    (scored,) = opens.rewards.groups
    assert scored.request_id == "attempt" and [one.member for one in scored.completions] == [0, 2]
    (again,) = await opens.run(1, messages_of_members=1)
    assert again.messages[0].content == "green, 0", "the prompt that is kept is nobody's own"


async def test_a_service_of_an_earlier_release_is_not_told_of_attempts(own: Rewarded) -> None:
    """play.py: it would refuse what it does not know."""
    own.rewards.described.max_turns = 2
    own.policy.answer = says("a", "b")
    await own.run(0)
    assert not own.rewards.opened
    assert [one.request_id for one in (*own.rewards.continued, *own.rewards.groups)] == ["", ""]


@pytest.mark.parametrize("lost_in", ["opening", "going on", "scoring"])
async def test_a_conversation_that_is_not_known_any_more_is_tried_anew(opens: Rewarded, lost_in: str) -> None:
    """waited.py 1, scoring.py 1: as one that the service lost with its memory."""

    def lose(_: Any = None) -> None:
        opens.rewards.errors = [GONE]

    def opening(request: pb.OpenRequest) -> pb.OpenResponse:
        if lost_in == "going on" and len(opens.rewards.opened) == 1:
            lose()
        return pb.OpenResponse(text="!")

    def going_on(request: pb.ContinueRequest) -> pb.ContinueResponse:
        if lost_in == "scoring" and len(opens.rewards.continued) == 1:
            lose()
        return pb.ContinueResponse()

    opens.rewards.opens, opens.rewards.goes_on = opening, going_on
    if lost_in == "opening":
        lose()
    (rollout,) = await opens.run(0, max_retries=1)
    assert not rollout.HasField("failure"), rollout.failure
    assert len(opens.rewards.opened) == 2 and len({one.request_id for one in opens.rewards.opened}) == 1
    opens.rewards.opened.clear()
    opens.rewards.continued.clear()
    if lost_in == "opening":
        lose()
    (failed,) = await opens.run(0)
    assert kind(failed) == "HOST" and failed.failure.retryable
    assert "no conversation a/0" in failed.failure.message


async def test_what_is_lost_elsewhere_is_no_conversation(own: Rewarded) -> None:
    """waited.py 1: of one that was never opened it is what it was."""
    own.rewards.described.max_turns = 2
    own.policy.answer, own.rewards.errors = says("a"), [GONE]
    (rollout,) = await own.run(0, max_retries=1)
    assert kind(rollout) == "ENVIRONMENT" and len(own.rewards.continued) == 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (pb.OpenResponse(text="x" * ((1 << 20) + 1)), "its Open says 1048577 bytes; there should be 1048576"),
        (pb.OpenResponse.FromString(UNKNOWN), "upgrade the environment host, or leave that out"),
    ],
)
async def test_an_opening_that_breaks_the_contract(
    opens: Rewarded, answer: pb.OpenResponse, said: str
) -> None:
    opens.rewards.opens = lambda request: answer
    (rollout,) = await opens.run(0)
    assert kind(rollout) == "ENVIRONMENT" and said in rollout.failure.message, rollout.failure
    assert not opens.policy.requests


async def test_prompts_that_cannot_be_opened(own: Rewarded) -> None:
    opens = with_openings(own)
    opens.rewards.errors = [QuartetError("NOT_IMPLEMENTED", "Method not found!")]
    (rollout,) = await opens.run(1)
    assert kind(rollout) == "ENVIRONMENT"
    assert "a prompt of it opens, and it has no Open; implement that" in rollout.failure.message
    of_tokens = goes_on("red")
    of_tokens.opens = True
    opens.rewards.splits[epb.SPLIT_TRAIN][0] = of_tokens
    (rollout,) = await opens.run(0)
    assert kind(rollout) == "ENVIRONMENT" and "opens, and has no message" in rollout.failure.message


async def test_an_opening_that_hangs_is_named(opens: Rewarded) -> None:
    await opens.run(0)
    opens.rewards.holds_before = asyncio.Event()
    (rollout,) = await opens.run(0, timeout_ms=1500)
    assert kind(rollout) == "TIMEOUT"
    assert rollout.failure.message.startswith("the conversation does not begin: RewardService at ")
