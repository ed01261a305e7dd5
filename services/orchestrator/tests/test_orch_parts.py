"""Rollouts whose agents are rewarded apart: what each is compared with, and what is trained on it."""

from __future__ import annotations

import math

import pytest
from orch_world import RUN
from quartet.run.difficulty import DifficultyFilterConfig
from quartet.run.evaluation import EvalTrial
from quartet.run.hosted import HostedConfig
from quartet.run.sampling import EvalSamplingConfig
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import rollout_pb2 as rpb
from quartet.v1 import trainer_service_pb2 as tpb
from quartet.v1.journal_pb2 import JournalRecord
from quartet_orchestrator import batches, metrics, parts
from quartet_orchestrator.book import Book
from quartet_orchestrator.difficulty import NO_SPREAD, verdict
from quartet_orchestrator.eval_metrics import Outcome, by_agent, of_evaluation
from quartet_orchestrator.sampling import checked
from quartet_orchestrator.state import RunState

OFF = DifficultyFilterConfig()


def episode(*rewarded: tuple[str, float, int], member: int = 0) -> rpb.Rollout:
    """A rollout with a part for each (role, reward, samples)."""
    made = rpb.Rollout(member=member, reward=sum(reward for _, reward, _ in rewarded) / len(rewarded))
    for agent, reward, samples in rewarded:
        made.parts.add(agent=agent, reward=reward, samples=samples)
        for _ in range(samples):
            sample = made.samples.add(token_ids=[1, 2, len(made.samples)], logprobs=[-1.0])
            sample.spans.add(start=2, length=1)
    return made


def plain(reward: float, samples: int = 1) -> rpb.Rollout:
    made = episode(("", reward, samples))
    made.ClearField("parts")
    return made


def test_a_part_is_compared_with_its_own_role_over_the_whole_group():
    """parts.py 1 and 2"""
    first = episode(("proposer", 8.0, 1), ("solver", 1.0, 2), ("solver", 0.0, 1))
    second = episode(("proposer", 4.0, 1), ("solver", 0.0, 1), ("solver", 0.0, 0))
    found = parts.advantages("dr_grpo", [[first, second]])
    assert found == [[2.0, 0.75, 0.75, -0.25], [-2.0, -0.25]]
    attempts = episode(("agent", 3.0, 1), ("agent", 1.0, 1))
    assert parts.advantages("dr_grpo", [[attempts]]) == [[1.0, -1.0]], "siblings are a group of their own"


def test_a_rollout_of_one_piece_is_compared_as_ever():
    """parts.py 1 and 2: groups are apart, all samples of a rollout alike."""
    groups = [[plain(1.0, samples=2), plain(0.0)], [plain(5.0), plain(5.0)], [episode(("a", 2.0, 1))]]
    assert parts.advantages("dr_grpo", groups) == [[0.5, 0.5], [-0.5], [0.0], [0.0], [0.0]]


def test_the_length_of_a_rollout_is_that_of_what_is_trained():
    """eval_metrics.py 3: what an agent said that is answered by the policy and is not trained is in the usage
    alone, in training and in evaluations."""
    game = episode(("red", 1.0, 2))
    game.usage.completion_tokens = 50
    scored = [metrics.Scored("game", 0, game)]
    values = metrics.of_step(0, scored, {}, metrics.StepTimes(1.0, 0.5, 0.0, 0.5), {})
    lengths = {name: value for name, value in values.items() if name.endswith("mean_length")}
    assert lengths == {"rollout/mean_length": 2.0, "env/game/mean_length": 2.0}
    outcome = Outcome(EvalTrial("game", HostedConfig(id="game"), 1, 1, EvalSamplingConfig()), 1)
    outcome.ended(0, game)
    told = of_evaluation([outcome], 0.5)
    assert told["eval/mean_length"] == told["eval/game/mean_length"] == 2.0


def test_each_sample_is_sent_with_what_its_part_earned():
    rollout = episode(("agent", 3.0, 1), ("agent", 1.0, 2))
    advantages = parts.advantages("none", [[rollout]])
    _, batch, _ = batches.frames(tpb.ForwardBackwardStart(run_id="r", seq_id=2), [rollout], advantages)
    assert [list(sample.advantages) for sample in batch.batch.samples] == [[3.0], [1.0], [1.0]]
    assert [sample.sample for sample in batch.batch.samples] == list(rollout.samples)


def test_functions_are_compared_by_what_they_said_of_each_part():
    """parts.py 1: what they say in the mean of a rollout is the same whoever wins."""
    group = [episode(("red", 1.0, 1), ("blue", -1.0, 1)), episode(("red", -1.0, 1), ("blue", 1.0, 1))]
    for game in group:
        game.rewards["win"] = 0.0
        for part in game.parts:
            part.rewards["win"] = part.reward
    found = [round(one, 3) for its_own in parts.advantages("gdpo", [group]) for one in its_own]
    assert found == [1.0, -1.0, -1.0, 1.0]
    won = [one.rewards["win"] for one in parts.members_by_role(group)["blue"]]
    assert won == [-1.0, 1.0]
    earlier = episode(("red", 1.0, 1), ("blue", -1.0, 1))
    earlier.rewards["win"] = 0.5
    assert [one.rewards["win"] for (one,) in parts.members_by_role([earlier]).values()] == [0.5, 0.5]
    alone = plain(2.0)
    alone.rewards["exact"] = 1.0
    ((member,),) = parts.members_by_role([alone]).values()
    assert member.rewards == {"exact": 1.0}


def test_a_group_has_spread_where_any_role_has():
    """Ranks of one episode always have the same mean: dynamic sampling may not take that for no spread."""
    state = RunState()
    state.apply(JournalRecord(dispatched={"group": 0, "members": 2}))
    ranked = [episode(("agent", 0.0, 1), ("agent", 1.0, 1), member=member) for member in range(2)]
    for rollout in ranked:
        state.apply(JournalRecord(rollout=pb.RolloutEvent(group=0, rollout=rollout)))
    assert verdict(OFF, state.groups[0].rewards, state.groups[0].compared.values()) is None
    state.apply(JournalRecord(dispatched={"group": 1, "members": 2}))
    for member in range(2):
        game = episode(("one", 0.0, 1), ("two", 1.0, 1), member=member)
        state.apply(JournalRecord(rollout=pb.RolloutEvent(group=1, rollout=game)))
    # Two roles are not compared with each other.
    assert verdict(OFF, state.groups[1].rewards, state.groups[1].compared.values()) == NO_SPREAD
    state.apply(JournalRecord(dispatched={"group": 2, "members": 2}))
    for member in range(2):
        game = episode(("one", float(member), 1), ("two", 1.0, 1), member=member)
        state.apply(JournalRecord(rollout=pb.RolloutEvent(group=2, rollout=game)))
    assert verdict(OFF, state.groups[2].rewards, state.groups[2].compared.values()) is None
    times = metrics.StepTimes(1.0, 0.5, 0.0, 0.5)
    scored = [metrics.Scored("e", 0, rollout) for rollout in ranked]
    values = metrics.of_step(0, scored, {}, times, {})
    assert values["env/e/no_spread"] == 0.0 and values["env/e/reward"] == 0.5


def test_what_each_side_of_a_game_earns_is_told(tmp_path):
    """In the mean they earn nothing, whoever wins."""
    games = [episode(("red", 1.0, 1), ("blue", -1.0, 1)), episode(("red", 3.0, 1), ("blue", -3.0, 1))]
    scored = [metrics.Scored("e", 0, game) for game in games]
    values = metrics.of_step(0, scored, {}, metrics.StepTimes(1.0, 0.5, 0.0, 0.5), {})
    assert values["env/e/reward"] == 0.0
    assert values["env/e/agents/red/reward"] == 2.0 and values["env/e/agents/blue/reward"] == -2.0
    outcome = Outcome(EvalTrial("e", HostedConfig(id="e"), 2, 1, EvalSamplingConfig()), 2)
    for example, game in enumerate(games):
        outcome.ended(example, game)
    told = of_evaluation([outcome], 0.5)
    assert told["eval/e/reward"] == 0.0
    assert told["eval/e/agents/red/reward"] == 2.0 and told["eval/e/agents/blue/reward"] == -2.0
    assert by_agent(told | {"eval/e/metrics/agents/x/reward": 9.0}) == {
        ("e", "blue"): -2.0,
        ("e", "red"): 2.0,
    }
    book = Book(tmp_path)
    run = book.state
    run.max_steps = 2
    for step, sign in ((0, 1.0), (1, 1.0), (2, -1.0)):
        values = {name: sign * value for name, value in told.items()}
        book.write(eval=pb.EvalEvent(step=step, metrics=values))
    found = [(one.environment, one.agent, one.reward_before) for one in run.to_proto(0).agents]
    assert found == [("e", "blue", -2.0), ("e", "red", 2.0)]
    assert not any(one.HasField("reward_after") for one in run.to_proto(0).agents), "it is at step 0"
    assert run.agents.keys() == {0, 2}, "a run may have thousands between"
    run.step = 2
    assert [one.reward_after for one in run.to_proto(0).agents] == [2.0, -2.0]
    book.extend("", 4)
    (extended,) = book.journal.select("phase")
    agents = extended.phase.run.agents
    assert [one.reward_before for one in agents] == [-2.0, 2.0]
    assert not any(one.HasField("reward_after") for one in agents), "that was after another last step"
    book.close()
    alike = [metrics.Scored("e", 0, episode(("agent", 0.0, 1), ("agent", 1.0, 1)))]
    values = metrics.of_step(0, alike, {}, metrics.StepTimes(1.0, 0.5, 0.0, 0.5), {})
    assert not any("agents" in name for name in values), "of one role the mean says it"


async def test_attempts_of_one_episode_are_trained_against_each_other(world):
    """The mean of each rollout is the same, and so is every group's: only parts differ."""
    world.host.attempts = [1.0, 0.0, 0.0, 1.0]
    toml = world.toml(evals=0).replace("[checks]", '[algorithm]\npreset = "dapo"\n[checks]')
    async with world.orchestrator() as runs:
        await runs.submit(RUN, toml, dry_run=False)
        run = await world.rest(runs)
    assert run.phase == pb.RUN_PHASE_COMPLETED, run.error
    assert run.ledger.trained == 4 * 8 and not run.ledger.discarded, "none teaches nothing"
    found = [round(advantage, 3) for (advantage,) in world.trainer.advantages]
    assert found == [1.0, -1.0, -1.0, 1.0] * 4 * 8


@pytest.mark.parametrize(
    ("reward", "samples", "kind"),
    [
        (math.nan, 1, rpb.FAILURE_KIND_SCORER),
        (1.0, 2, rpb.FAILURE_KIND_HOST),
        (1.0, 1, None),
        # Of float32 an advantage would be infinite, which a trainer refuses with all of its batch.
        (-1e100, 1, rpb.FAILURE_KIND_SCORER),
        (-1e38, 1, None),
    ],
)
def test_parts_that_do_not_add_up_are_no_success(reward, samples, kind):
    """sampling.py 5"""
    rollout = episode(("agent", 1.0, 1), ("agent", 0.0, 1))
    rollout.parts[1].reward, rollout.parts[1].samples = reward, samples
    checked(rollout)
    assert (rollout.failure.kind if rollout.HasField("failure") else None) == kind


def test_a_function_of_a_part_that_says_no_number_is_no_success():
    """sampling.py 5"""
    rollout = episode(("agent", 1.0, 1), ("agent", 0.0, 1))
    rollout.parts[1].rewards["exact"] = math.nan
    checked(rollout)
    assert rollout.failure.kind == rpb.FAILURE_KIND_SCORER and not rollout.parts[1].rewards
