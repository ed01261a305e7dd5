"""The environment "reward-service", played: a RewardService of this process, and real workers whose
interpreter has no Verifiers. Invariants by their module: rewarded/*.py, groups.py 1-3."""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hosting import serving
from quartet.errors import QuartetError
from quartet.interact import interact
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import reward_service_pb2 as pb
from rewarded_host import Rewarded
from rollout_outcomes import kind, refusal, until
from scripted_inference import CLOSE, OPENING, encode, render, says, serve_scripted
from scripted_rewards import WORDS, ScriptedRewards, asks, goes_on, serve_rewards

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.asyncio(loop_scope="module")


PAGE = (ROOT / "docs/rewards.md").read_text()


async def test_it_is_described_without_verifiers(rewarded: Rewarded) -> None:
    """environment.py 1 and 2; loading.py 1."""
    info = await rewarded.describe()
    assert (info.id, info.api, info.version, info.verifiers_version) == ("reward-service", "rewards", "7", "")
    assert (info.train_size, info.eval_size, info.group_scoring, info.max_members) == (4, 1, True, 16)
    assert (list(info.rewards), list(info.metrics)) == (["length"], ["vowels"])
    assert dict(info.weights) == {"length": 2.0}
    assert info.digest and info.examples_digest and not info.files
    tasks = await rewarded.tasks(include_data=True)
    assert [task.key for task in tasks] == [f"key of {word}" for word in WORDS]
    assert [task.index for task in tasks] == [0, 1, 2, 3]
    assert json.loads(tasks[1].data_json) == {
        "answer": "green",
        "prompt": [{"role": "user", "content": "green"}],
    }
    assert [task.index for task in await rewarded.tasks(start=3, count=9)] == [3]
    assert not await rewarded.tasks(start=4)
    assert [task.key for task in await rewarded.tasks(split=epb.SPLIT_EVAL)] == ["key of black"]
    versioned = rewarded.ref()
    versioned.id = "owner/Reward-Service@latest"
    assert (await rewarded.describe(versioned)).digest == info.digest


async def test_a_group_is_sampled_at_once_and_scored_together(rewarded: Rewarded) -> None:
    """environment.py 3, play.py 1 and 2, outcome.py 1 and 2."""
    rewarded.policy.answer = says("a", "be", "sea", "deer")
    rewarded.policy.weights_id = 7
    rewarded.rewards.splits[epb.SPLIT_TRAIN][2] = asks("fresh", template_settings='{"style": "own"}')
    rollouts = await rewarded.run(
        2,
        members=[4, 5, 6, 7],
        messages_of_members=6,
        sampling={"seed": 5, "max_tokens": 99, "stop": ["#"]},
        template_settings='{"style": "asked", "lang": "en"}',
        min_policy_version=2,
        routed_experts=True,
    )
    assert [[(w.policy_version, w.weights_id) for w in one.weights] for one in rollouts] == [[(3, 7)]] * 4
    (asked,) = rewarded.policy.requests
    assert asked.n == 4 and len(set(asked.completion_seeds)) == 4 and not asked.sampling.HasField("seed")
    assert asked.messages.messages[0].content == "fresh" and asked.run_id == "run"
    assert (asked.sampling.max_tokens, list(asked.sampling.stop)) == (99, ["#"])
    assert json.loads(asked.template_settings) == {"style": "own", "lang": "en"}
    assert asked.min_policy_version == 2 and asked.experts_from == 0 and asked.HasField("experts_from")
    (scored,) = rewarded.rewards.groups
    assert (scored.run_id, scored.split, scored.index) == ("run", epb.SPLIT_TRAIN, 2)
    assert [one.member for one in scored.completions] == [4, 5, 6, 7]
    for rollout, said in zip(rollouts, scored.completions, strict=True):
        assert not rollout.HasField("failure"), rollout.failure
        text = said.message.content
        assert list(said.token_ids) == [*encode(text), CLOSE] and not said.truncated
        vowels = sum(letter in "ae" for letter in text)
        assert rollout.rewards == {"length": len(text)} and rollout.reward == 2.0 * len(text)
        assert rollout.metrics == {"vowels": vowels, "tokens": len(text) + 1}
        (sample,) = rollout.samples
        prompt = [*render(asked.messages.messages), *OPENING]
        assert list(sample.token_ids) == [*prompt, *said.token_ids]
        assert [(span.start, span.length) for span in sample.spans] == [(len(prompt), len(said.token_ids))]
        assert rollout.num_turns == 1 and rollout.stop_condition == "completed" and not rollout.truncated
        assert (rollout.usage.prompt_tokens, rollout.usage.completion_tokens) == (
            len(prompt),
            len(said.token_ids),
        )
        assert rollout.timing.total_ms >= rollout.timing.model_ms
        told = [message.content for message in rollout.messages]
        assert told == (["fresh", text] if rollout.member < 6 else [])
        assert rollout.task_json == ('{"answer":"fresh"}' if rollout.member < 6 else "")
    seeds = list(asked.completion_seeds)
    rewarded.policy.behave()
    await rewarded.run(2, members=[5], sampling={"seed": 5})
    assert rewarded.policy.seeds == [seeds[1]], "a member's own, whoever runs beside it"


async def test_a_prompt_of_tokens_is_what_is_sampled_from(own: Rewarded) -> None:
    own.rewards.splits[epb.SPLIT_TRAIN][0] = goes_on("once upon")
    own.policy.answer = says("a time", "the hill")
    rollouts = await own.run(0, members=range(2), messages_of_members=2)
    (asked,) = own.policy.requests
    assert asked.n == 2 and list(asked.tokens.token_ids) == encode("once upon")
    for rollout, said in zip(rollouts, own.rewards.groups[0].completions, strict=True):
        assert list(rollout.samples[0].token_ids) == [*encode("once upon"), *said.token_ids]
        assert [message.content for message in rollout.messages] == [said.message.content], "no text of it"
    (task,) = await own.tasks(count=1, include_data=True)
    assert json.loads(task.data_json) == {"prompt_token_ids": encode("once upon")}


@pytest.mark.parametrize("of_tokens", [False, True])
async def test_the_client_may_be_the_policy(own: Rewarded, of_tokens: bool) -> None:
    if of_tokens:
        own.rewards.splits[epb.SPLIT_TRAIN][0] = goes_on("red")
    asked: list[Any] = []

    async def policy(question: Any) -> Any:
        asked.append(question)
        tokens = encode("x" * (1 + question.member))
        prompt = [*question.prefix_token_ids, *render(question.messages)]
        return epb.ModelAnswer(
            prompt_token_ids=prompt,
            token_ids=tokens,
            logprobs=[-0.5] * len(tokens),
            message={"content": "x" * (1 + question.member)},
            truncated=question.member == 1,
        )

    run = own.request(0, members=range(2))
    rollouts = sorted(
        [one async for one in interact(own.stub, run, policy, timeout_s=60)], key=lambda one: one.member
    )
    assert [rollout.reward for rollout in rollouts] == [2.0, 4.0]
    assert [rollout.truncated for rollout in rollouts] == [False, True]
    assert [one.truncated for one in own.rewards.groups[0].completions] == [False, True]
    for question in asked:
        assert [list(question.prefix_token_ids), len(question.messages), question.prefix_messages] == (
            [encode("red"), 0, 0] if of_tokens else [[], 1, 0]
        )


async def test_evaluation_without_prompts_of_its_own_is_on_the_training_prompts(own: Rewarded) -> None:
    """environment.py 2."""
    own.rewards.described.eval_size = 0
    info = await own.describe()
    assert (info.train_size, info.eval_size) == (4, 4)
    (rollout,) = await own.run(3, split=epb.SPLIT_EVAL)
    assert not rollout.HasField("failure"), rollout.failure
    assert own.rewards.groups[0].split == epb.SPLIT_TRAIN and own.rewards.groups[0].index == 3
    assert [task.key for task in await own.tasks(split=epb.SPLIT_EVAL)][3] == "key of yellow"


async def test_a_split_ends_where_it_ends(rewarded: Rewarded) -> None:
    error = await refusal(rewarded.stub.RunRollouts(rewarded.request(4), timeout=60))
    assert error.reason == "RESOURCE_UNKNOWN" and "no task 4 in this split; they are 0 to 3" in error.message


async def test_who_failed_is_not_among_those_that_are_scored(rewarded: Rewarded) -> None:
    """environment.py 3, groups.py 1: and a member that is not answered in time holds nobody up."""
    held = rewarded.policy.held[1] = asyncio.Event()
    rollouts = await rewarded.run(0, members=range(3), timeout_ms=2000)
    held.set()
    assert sorted(kind(one) for one in rollouts)[0] == "TIMEOUT"
    well = [one.member for one in rollouts if not one.HasField("failure")]
    (scored,) = rewarded.rewards.groups
    assert [one.member for one in scored.completions] == well and 1 <= len(well) < 3
    rewarded.policy.behave()
    rewarded.policy.errors = [QuartetError("PROMPT_TOO_LONG", "9 tokens, limit 4")]
    (rollout,) = await rewarded.run(1, max_retries=2)
    assert kind(rollout) == "MODEL" and "limit 4" in rollout.failure.message
    assert len(rewarded.policy.requests) == 1 and len(rewarded.rewards.groups) == 1, "nothing to score"


async def test_a_function_may_have_nothing_to_say(rewarded: Rewarded) -> None:
    """outcome.py 1."""

    def spoil(answer: pb.ScoreGroupResponse) -> None:
        answer.rewards[0].scores[0].ClearField("value")
        answer.rewards[1].scores[1].ClearField("value")
        answer.rewards[1].metrics.clear()

    rewarded.rewards.spoil = spoil
    nothing, something = await rewarded.run(0, members=range(2))
    assert nothing.reward == 0.0 and not nothing.rewards and "vowels" in nothing.metrics
    assert something.reward == 2 * something.rewards["length"] and not something.metrics
    assert not nothing.HasField("failure") and not something.HasField("failure")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda answer: answer.rewards.pop(), "asked to score 2 answers, and scored 1"),
        (lambda answer: answer.rewards.add(), "asked to score 2 answers, and scored 3"),
        (lambda answer: answer.rewards[1].scores.pop(), "2 reward functions, and told 1 scores"),
    ],
)
async def test_wrong_counts_are_no_rewards(rewarded: Rewarded, spoil: Any, said: str) -> None:
    """scoring.py 1."""
    rewarded.rewards.spoil = spoil
    rollouts = await rewarded.run(0, members=range(2), max_retries=2)
    assert {kind(one) for one in rollouts} == {"SCORER"} and not any(
        one.failure.retryable for one in rollouts
    )
    assert all(said in one.failure.message for one in rollouts), rollouts[0].failure
    assert len(rewarded.rewards.groups) == 1, "it is not asked again"
    assert all(one.samples for one in rollouts), "what was sampled is told"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["length", "vowels", "tokens"])
async def test_what_is_no_number_fails_its_member_alone(rewarded: Rewarded, value: float, where: str) -> None:
    """outcome.py 1."""

    def spoil(answer: pb.ScoreGroupResponse) -> None:
        if where == "tokens":
            answer.rewards[1].metrics["tokens"] = value
        else:
            answer.rewards[1].scores[where == "vowels"].value = value

    rewarded.rewards.spoil = spoil
    well, broken = await rewarded.run(0, members=range(2))
    assert not well.HasField("failure") and kind(broken) == "SCORER"
    assert "not a finite number" in broken.failure.message and where in broken.failure.message


async def test_a_sum_that_is_no_number_is_no_reward(rewarded: Rewarded) -> None:
    def spoil(answer: pb.ScoreGroupResponse) -> None:
        answer.rewards[0].scores[0].value = sys.float_info.max

    rewarded.rewards.spoil = spoil
    (rollout,) = await rewarded.run()
    assert kind(rollout) == "SCORER" and "the reward" in rollout.failure.message


async def test_what_a_function_raised_is_told_and_not_tried_again(rewarded: Rewarded) -> None:
    """scoring.py 1; INTERNAL is what a server makes of what its own code raises."""
    for error, said in (
        (
            QuartetError("SCORER_FAILED", "rewards.py:3 in exact: KeyError: 'answer'", function="exact"),
            "KeyError",
        ),
        (QuartetError("INTERNAL", "its own bug"), "its own bug"),
        (QuartetError("RESOURCE_UNKNOWN", "no example 0"), "no example 0"),
    ):
        rewarded.rewards.behave()
        rewarded.rewards.errors = [error]
        rollouts = await rewarded.run(0, members=range(2), max_retries=2)
        assert {kind(one) for one in rollouts} == {"SCORER"}, rollouts
        assert all(said in one.failure.message and not one.failure.retryable for one in rollouts)
        assert len(rewarded.rewards.groups) == 1


async def test_what_may_pass_is_asked_again(rewarded: Rewarded) -> None:
    """asked.py 2: nothing is sampled again for it."""
    rewarded.rewards.errors = [
        QuartetError("OVERLOADED", "a queue is full", retry_after_ms=10),
        QuartetError("NOT_READY", "warming up"),
        QuartetError("DEADLINE", "its judge took too long"),
    ]
    rollouts = await rewarded.run(0, members=range(2))
    assert not any(one.HasField("failure") for one in rollouts), rollouts[0].failure
    assert len(rewarded.rewards.groups) == 4 and len(rewarded.policy.requests) == 1
    assert all(one == rewarded.rewards.groups[0] for one in rewarded.rewards.groups)


async def test_a_service_that_stays_away_is_a_failure_of_the_host(own: Rewarded) -> None:
    """scoring.py 1 and 2."""
    await own.describe()
    own.rewards.errors = [QuartetError("NOT_READY", "warming up")] * 1000
    rollouts = await own.run(0, members=range(2), timeout_ms=2000)
    assert {kind(one) for one in rollouts} == {"HOST"} and all(one.failure.retryable for one in rollouts)
    assert own.address in rollouts[0].failure.message and "warming up" in rollouts[0].failure.message


async def test_a_service_that_takes_too_long_is_out_of_time(rewarded: Rewarded) -> None:
    """scoring.py 1 and 2: told with who was asked, and what it computes is cancelled."""
    await rewarded.run()
    rewarded.rewards.behave()
    rewarded.rewards.hold = asyncio.Event()
    rollouts = await rewarded.run(0, members=range(2), timeout_ms=1500)
    assert {kind(one) for one in rollouts} == {"TIMEOUT"}, rollouts
    assert all(rewarded.address in one.failure.message for one in rollouts), rollouts[0].failure
    await asyncio.wait_for(until(lambda: rewarded.rewards.cancelled == 1), 30)
    assert len(rewarded.rewards.groups) == 1


async def test_who_cancels_ends_the_scoring(rewarded: Rewarded) -> None:
    """groups.py 2."""
    rewarded.rewards.hold = asyncio.Event()
    run = asyncio.create_task(rewarded.run(0, members=range(2), request_id="doomed"))
    await asyncio.wait_for(until(lambda: len(rewarded.rewards.groups) == 1), 60)
    cancel = epb.CancelRequest(run_id="run", request_ids=["doomed"])
    assert (await rewarded.stub.Cancel(cancel, timeout=20)).cancelled == 2
    assert [kind(one) for one in await asyncio.wait_for(run, 60)] == ["CANCELLED"] * 2
    await asyncio.wait_for(until(lambda: rewarded.rewards.cancelled == 1), 30)


async def test_a_group_larger_than_a_message_says_so(rewarded: Rewarded) -> None:
    rewarded.policy.answer = says(*("\U0001f600" * 450_000 for _ in range(2)))
    rollouts = await rewarded.run(0, members=range(2), max_retries=1, timeout_ms=60_000)
    assert {kind(one) for one in rollouts} == {"HOST"} and not any(one.failure.retryable for one in rollouts)
    assert "2 answers of a group" in rollouts[0].failure.message
    assert not rewarded.rewards.groups and len(rewarded.policy.requests) == 1


async def restarted(service: Any, rewards: ScriptedRewards) -> Any:
    address = service.address
    await service.stop(0)
    return await serve_rewards(rewards, address)


async def test_a_service_that_is_back_goes_on(rewarded: Rewarded, capfd: pytest.CaptureFixture[str]) -> None:
    """asked.py 2, 4: killed while it scores, it costs no rollout; nothing is sampled again."""
    rewards = ScriptedRewards()
    service = await serve_rewards(rewards)
    own = Rewarded(rewarded.host, rewarded.stub, rewarded.policy, rewards, service.address)
    await own.describe()
    rewards.hold = asyncio.Event()
    run = asyncio.create_task(own.run(1, members=range(2)))
    await asyncio.wait_for(until(lambda: len(rewards.groups) == 1), 60)
    await service.stop(0)
    rewards.hold = None
    service = await serve_rewards(rewards, service.address)
    rollouts = await asyncio.wait_for(run, 60)
    assert not any(one.HasField("failure") for one in rollouts), rollouts[0].failure
    assert len(rewards.groups) == 2 and len(own.policy.requests) == 1
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("RewardService at")]
    assert told[0].startswith(f"RewardService at {own.address} is away, and asked again until it is back: ")
    assert told[1:] == [f"RewardService at {own.address} is back"]
    await service.stop(0)


async def test_a_service_that_is_back_as_another_is_loaded_anew(rewarded: Rewarded) -> None:
    """environment.py 4: no reward of it counts under the digest of the first."""
    rewards = ScriptedRewards()
    service = await serve_rewards(rewards)
    own = Rewarded(rewarded.host, rewarded.stub, rewarded.policy, rewards, service.address)
    before = await own.describe()
    await own.run()
    rewards.hold = asyncio.Event()
    call = own.stub.RunRollouts(own.request(1, max_retries=2, timeout_ms=30_000), timeout=90)
    frames = asyncio.create_task(_frames(call))
    await asyncio.wait_for(until(lambda: len(rewards.groups) == 2), 60)
    await service.stop(0)
    rewards.behave()
    rewards.described.digest = "of other words"
    service = await serve_rewards(rewards, service.address)
    (frame,) = await asyncio.wait_for(frames, 90)
    assert not frame.rollout.HasField("failure"), frame.rollout.failure
    assert frame.rollout.failed_attempts == 1
    assert frame.environment_digest and frame.environment_digest != before.digest
    await service.stop(0)


async def test_a_service_that_became_another_while_nobody_asked_is_loaded_anew(rewarded: Rewarded) -> None:
    """asked.py 3"""
    rewards = ScriptedRewards()
    service = await serve_rewards(rewards)
    own = Rewarded(rewarded.host, rewarded.stub, rewarded.policy, rewards, service.address)
    before = await own.describe()
    await own.run()
    await service.stop(0)
    rewards.described.digest = "of other words"
    service = await serve_rewards(rewards, service.address)
    call = own.stub.RunRollouts(own.request(1, max_retries=2, timeout_ms=30_000), timeout=90)
    (frame,) = await asyncio.wait_for(_frames(call), 90)
    assert not frame.rollout.HasField("failure"), frame.rollout.failure
    assert frame.environment_digest and frame.environment_digest != before.digest
    await service.stop(0)


async def _frames(call: Any) -> list[Any]:
    return [frame async for frame in call if frame.HasField("rollout")]


async def test_the_server_that_the_page_shows_is_played(rewarded: Rewarded, tmp_path: Path) -> None:
    """docs/rewards.md: plain grpcio, in threads; what it raises is told as it is."""
    program, _ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    address = f"unix:{tmp_path}/page.sock"
    server = names["serve"](address)
    own = Rewarded(rewarded.host, rewarded.stub, rewarded.policy, rewarded.rewards, address)
    try:
        info = await own.describe()
        assert (info.train_size, info.eval_size, list(info.rewards)) == (3, 3, ["short"])
        own.policy.answer = says("green", "a green one")
        rollouts = await own.run(1, members=range(2))
        assert sorted(one.reward for one in rollouts) == pytest.approx([0.89, 0.95])
        names["float"], own.policy.answer = None, says("blue")
        (rollout,) = await own.run(2, max_retries=2)
        assert kind(rollout) == "SCORER" and "'NoneType' object is not callable" in rollout.failure.message
    finally:
        server.stop(0).wait()


async def test_it_is_played_beside_verifiers(own: Rewarded, envs_python: str) -> None:
    """loading.py 1: by its id, whatever the interpreter has; a template is neither needed nor missed."""
    inference = await serve_scripted(own.policy)
    settings = {"inference_addresses": [inference.address], "python": envs_python}
    async with serving(settings) as (host, stub):
        beside = Rewarded(host, stub, own.policy, own.rewards, own.address)
        (rollout,) = await beside.run()
        assert not rollout.HasField("failure") and rollout.reward, rollout.failure
        assert not host._templates._templates
    await inference.stop(0)


async def test_the_tool_of_the_page(rewarded: Rewarded, tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    for program in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(program, names)
    names["Rewards"] = names["Conversations"]
    address = f"unix:{tmp_path}/tool.sock"
    server = names["serve"](address)
    own = Rewarded(rewarded.host, rewarded.stub, rewarded.policy, rewarded.rewards, address)
    try:
        own.policy.answer = says('call letters {"word": "green"}', "call letters []", "green has 5")
        (rollout,) = await own.run(1, messages_of_members=1)
        assert not rollout.HasField("failure"), rollout.failure
        told = [message.content for message in rollout.messages if message.role == "tool"]
        assert told == ["5", "error: list indices must be integers or slices, not str"]
        assert rollout.num_turns == 3 and rollout.reward == pytest.approx(0.89)
    finally:
        await asyncio.to_thread(server.stop(None).wait)
