"""What long rollouts lose of their rewards, against the formula of DAPO, and where it counts."""

from __future__ import annotations

import pytest
from orch_world import RUN, assert_complete, events
from quartet.config import ConfigError
from quartet.run.algorithm_tables import OverlongPenaltyConfig
from quartet.run.config import parse_run
from quartet.v1.rollout_pb2 import Rollout
from quartet_orchestrator import batches
from quartet_orchestrator.overlong import penalty
from quartet_orchestrator.parts import advantages, members_by_role

#: Of answers of at most 20480 tokens the last 4096.
DAPO = OverlongPenaltyConfig(from_tokens=16384, to_tokens=20480)
SHORT = OverlongPenaltyConfig(from_tokens=2, to_tokens=6, factor=0.8)


def rollout(reward: float, *lengths: int) -> Rollout:
    made = Rollout(reward=reward)
    for length in lengths:
        made.samples.add(token_ids=[1] * (length + 1), logprobs=[-1.0] * length)
    return made


@pytest.mark.parametrize("tokens", [0, 1, 16383, 16384, 16385, 18000, 20479, 20480, 50000])
def test_it_is_the_punishment_of_the_paper(tokens: int) -> None:
    """Equation 13: 0, ((L_max - L_cache) - |y|) / L_cache, -1."""
    most, cache = 20480, 4096
    if tokens <= most - cache:
        expected = 0.0
    elif tokens <= most:
        expected = ((most - cache) - tokens) / cache
    else:
        expected = -1.0
    assert -penalty(DAPO, tokens) == pytest.approx(expected)
    assert penalty(None, tokens) == 0.0


def test_rewards_are_compared_without_what_length_takes() -> None:
    """parts.py 3: all samples of a rollout count together."""
    group = [rollout(1.0, 2), rollout(1.0, 2, 2), rollout(1.0, 9), rollout(0.0, 1)]
    rewards = [1.0, 0.6, 0.2, 0.0]
    mean = sum(rewards) / 4
    found = advantages("dr_grpo", [group], overlong=SHORT)
    assert [one[0] for one in found] == pytest.approx([reward - mean for reward in rewards])
    assert found[1][0] == found[1][1]
    (members,) = members_by_role(group, SHORT).values()
    assert [one.reward for one in members] == pytest.approx(rewards), "functions of one's own get them so"


def test_each_agent_pays_for_its_own_length() -> None:
    both = rollout(0.0, 6, 1)
    both.parts.add(agent="long", reward=1.0, samples=1)
    both.parts.add(agent="short", reward=1.0, samples=1)
    assert advantages("none", [[both]], overlong=SHORT) == [[pytest.approx(0.2), 1.0]]


def test_a_batch_is_credited_by_its_table() -> None:
    config = parse_run(
        'model = "m"\nbatch_size = 2\nrollouts_per_example = 2\n[[env]]\nid = "e"\n[algorithm]\n'
        'advantage = "dr_grpo"\naggregation = "token"\n'
        "overlong_penalty = { from_tokens = 2, to_tokens = 6, factor = 0.8 }"
    )
    _, found = batches.credited(config.algorithm, [[rollout(1.0, 2), rollout(1.0, 6)]])
    assert found == [[pytest.approx(0.4)], [pytest.approx(-0.4)]]


async def test_a_run_reports_what_it_took_and_the_reward_as_the_environment_gave_it(world):
    """Each of its rollouts has two tokens."""
    table = "[algorithm]\noverlong_penalty = { from_tokens = 1, to_tokens = 5, factor = 2.0 }\n[checks]"
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml().replace("[checks]", table), dry_run=False)
        run = await world.rest(runs)
        steps = [record.step.metrics for record in await events(runs) if record.WhichOneof("kind") == "step"]
    assert_complete(world, run)
    assert [step["rollout/overlong_penalty"] for step in steps] == [0.5] * len(steps)
    trained = world.trainer.disk[RUN, "final"].trained
    rewards = [((task * 7 + member * 13 + version) % 10) / 10 for task, member, version, _ in trained]
    assert sum(step["train/reward"] for step in steps) == pytest.approx(sum(rewards) / 8)


@pytest.mark.parametrize(
    ("table", "why"),
    [
        (
            "overlong_penalty = { from_tokens = 9, to_tokens = 9 }",
            "to_tokens = 9 is not above from_tokens = 9",
        ),
        ("overlong_penalty = { from_tokens = 1, to_tokens = 9, factor = 0.0 }", "factor = 0.0 is refused"),
        ("overlong_penalty = { to_tokens = 9 }", "algorithm.overlong_penalty.from_tokens"),
        (
            'preset = "opd"\nreference = { model = "t" }\n'
            "overlong_penalty = { from_tokens = 1, to_tokens = 9 }",
            'which advantage = "zero" does not read; remove it',
        ),
    ],
)
def test_what_takes_nothing_is_refused(table: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_run(f'model = "m"\n[[env]]\nid = "e"\n[algorithm]\n{table}')
    assert why in str(refused.value)
