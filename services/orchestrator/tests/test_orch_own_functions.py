"""Functions of somebody's own that fail: the run stops with their place, and goes on once they are mended."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import structlog
from orch_world import RUN, assert_complete, events
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet.v1 import rollout_pb2 as rpb
from quartet_orchestrator import parts
from quartet_orchestrator.credit import Member
from quartet_orchestrator.outage import RunInterrupted
from quartet_orchestrator.own_advantages import load_advantages

HERE = __name__
LOSS = '\n[algorithm]\nloss = "custom"\ncustom = "mine"\n'
ADVANTAGE = '\n[algorithm]\nadvantage = "custom"\ncustom_advantage = "mine"\n'


def own(function: Callable[..., object]):
    return load_advantages({"mine": f"{HERE}:{function.__name__}"})["mine"]


def scaled(group: Sequence[Member]) -> list[float]:
    """A length penalty that counts for as much as is solved."""
    solved = sum(one.reward > 0 for one in group) / len(group)
    longest = max(one.completion_tokens for one in group)
    scores = [one.reward - 0.1 * solved * one.completion_tokens / longest for one in group]
    mean = sum(scores) / len(scores)
    return [score - mean for score in scores]


async def test_a_loss_that_fails_stops_the_run_which_goes_on_with_the_same_batch(world, monkeypatch):
    """answers.py 4: nothing is lost, and nothing trained twice."""
    plain = world.trainer.ForwardBackward
    sent: list[bytes] = []

    async def fails(requests, context):
        frames = [frame async for frame in requests]
        if frames[0].start.seq_id < 5:
            return await plain(_each(frames), context)
        sent.append(b"".join(frame.SerializeToString(deterministic=True) for frame in frames))
        if len(sent) == 1:
            raise QuartetError(
                "INVALID_REQUEST",
                "losses.mine: it raised at mine/losses.py:7 in mine: KeyError: 'x'; mend the function",
                field="loss.custom",
                value="mine",
            )
        return await plain(_each(frames), context)

    monkeypatch.setattr(world.trainer, "ForwardBackward", fails)
    await world.kill("trainer")
    await world.serve("trainer")
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml() + LOSS, dry_run=False)
        run = await world.rest(runs)
        assert run.phase == pb.RUN_PHASE_STOPPED and run.step == 1 and not run.ledger.discarded
        assert "ForwardBackward of step 2: losses.mine: it raised at mine/losses.py:7" in run.error
        assert "then resume the run, which sends it again" in run.error
        await world.kill("trainer")
        await world.serve("trainer")
        await runs.resume(RUN)
        assert_complete(world, await world.rest(runs))
    assert sent[0] == sent[1]


async def _each(frames):
    for frame in frames:
        yield frame


async def test_another_call_that_the_trainer_refuses_stops_the_run_too(world, monkeypatch):
    """answers.py 4"""
    plain = world.trainer.ForwardBackward

    async def refuses(requests, context):
        raise QuartetError("INVALID_REQUEST", "samples[0].tokens: none", field="samples[0].tokens")

    monkeypatch.setattr(world.trainer, "ForwardBackward", refuses)
    await world.kill("trainer")
    await world.serve("trainer")
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(), dry_run=False)
        stopped = await world.rest(runs)
        assert stopped.phase == pb.RUN_PHASE_STOPPED and "samples[0].tokens: none" in stopped.error
        monkeypatch.setattr(world.trainer, "ForwardBackward", plain)
        await world.kill("trainer")
        await world.serve("trainer")
        await runs.resume(RUN)
        assert_complete(world, await world.rest(runs))


@pytest.mark.parametrize("steps", [1, 2])
async def test_an_advantage_that_fails_stops_the_run_until_it_is_mended(world, tmp_path, monkeypatch, steps):
    """own_advantages.py 3"""
    module = f"advantage_of_{steps}"
    file = tmp_path / f"{module}.py"
    calls = (
        f"\n\nasked = []\n\n\ndef mine(group):\n    asked.append(1)\n    if len(asked) > {4 * steps - 2}:\n"
    )
    file.write_text(f"{calls}        return group[0].nothing\n    return [one.reward for one in group]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    world.advantages = {"mine": f"{module}:mine"}
    with structlog.testing.capture_logs() as logged:
        async with world.orchestrator() as runs:
            await runs.submit(RUN, world.toml() + ADVANTAGE, dry_run=False)
            run = await world.rest(runs)
    assert run.phase == pb.RUN_PHASE_STOPPED and run.step == steps - 1 and not run.ledger.discarded
    assert f"{module}.py:9 in mine: AttributeError: 'Member' object has no attribute 'nothing'" in run.error
    assert "then resume the run" in run.error
    assert [one for one in logged if one["event"] == "advantage_raised" and one["exc_info"]]
    file.with_name("mended.py").write_text("def mine(group):\n    return [one.reward for one in group]\n")
    world.advantages = {"mine": "mended:mine"}
    async with world.orchestrator() as runs:
        await runs.resume(RUN)
        assert_complete(world, await world.rest(runs))
        rewards = [
            r.rollout.rollout.reward for r in await events(runs, rollouts=True) if r.HasField("rollout")
        ]
    sent = [one for (one,) in world.trainer.advantages]
    assert sorted(sent) == pytest.approx(sorted(rewards), rel=1e-6)


async def test_a_run_asks_for_an_advantage_that_there_is(world):
    """own_advantages.py 1"""
    async with world.orchestrator() as runs:
        with pytest.raises(
            QuartetError, match=r"custom_advantage = 'mine' is refused .*advantages\.mine = "
        ) as no:
            await runs.submit(RUN, world.toml() + ADVANTAGE, dry_run=False)
        told = no.value.metadata
        assert no.value.reason == "INVALID_CONFIG"
        assert (told["key"], told["value"]) == ("algorithm.custom_advantage", "mine")
        assert told["remedy"] == 'start the orchestrator with advantages.mine = "package.module:function"'
    world.advantages = {"other": f"{HERE}:scaled"}
    async with world.orchestrator() as runs:
        with pytest.raises(QuartetError, match=r"its advantages are other; name one of them, or"):
            await runs.submit(RUN, world.toml() + ADVANTAGE, dry_run=True)
    world.advantages = {"mine": f"{HERE}:scaled"}
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml() + ADVANTAGE, dry_run=False)
        assert_complete(world, await world.rest(runs))


def nothing_taken() -> list[float]:
    return []


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("no_colon", 'is no import path; write "package.module:function"'),
        ("absent_module:f", "cannot be imported: No module named .*start it where 'absent_module' is found"),
        (f"{HERE}:absent", "cannot be imported: AttributeError: .*absent"),
        (f"{HERE}:HERE", "is str, not a function"),
        (f"{HERE}:nothing_taken", r"cannot be called as function\(group\): too many positional arguments"),
    ],
)
def test_an_advantage_that_cannot_be_loaded_keeps_the_orchestrator_from_starting(world, path, why):
    """own_advantages.py 1"""
    world.advantages = {"mine": path}
    with pytest.raises(ConfigError, match=rf"^advantages\.mine = .*{why}"):
        world.services()


def test_a_module_that_is_a_script_is_refused_like_any_other(world, tmp_path, monkeypatch):
    """own_function.py 1"""
    (tmp_path / "script_of_mine.py").write_text("import sys\n\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    world.advantages = {"mine": "script_of_mine:mine"}
    with pytest.raises(ConfigError, match=r"cannot be imported: .*script_of_mine.py:3 .*SystemExit: 0; mend"):
        world.services()


answers: list[float] = [1.0]


def too_few(group: Sequence[Member]) -> list[float]:
    return [0.0] * (len(group) - 1)


def no_number(group: Sequence[Member]) -> list[float]:
    return [math.nan for _ in group]


def too_large(group: Sequence[Member]) -> list[float]:
    return [1e39 for _ in group]


def too_far_below(group: Sequence[Member]) -> list[float]:
    return [-3.41e38 for _ in group]


def texts(group: Sequence[Member]) -> list[str]:
    return ["1.0" for _ in group]


def changing(group: Sequence[Member]) -> list[float]:
    answers[0] += 1.0
    return [answers[0] for _ in group]


def writing(group: Sequence[Member]) -> list[float]:
    group[0].rewards["match"] = 3.0  # type: ignore[index]
    return [0.0 for _ in group]


def beyond_floats(group: Sequence[Member]) -> list[int]:
    return [10**5000 for _ in group]


def by_member(group: Sequence[Member]) -> dict[int, float]:
    return {one.member: one.reward for one in group}


def forgetful(group: Sequence[Member]) -> None:
    [one.reward for one in group]


def leaving(group: Sequence[Member]) -> list[float]:
    raise SystemExit(2)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (too_few, "returned 1 advantages for a group of 2"),
        (no_number, "returned nan, which is no finite number"),
        (too_large, "returned 1e.39, which is no finite number"),
        (too_far_below, "returned -3.41e.38, which is no finite number of float32"),
        (beyond_floats, "returned inf, which is no finite number"),
        (texts, "returned str among its advantages"),
        (by_member, "returned dict, not a list in the group's order"),
        (forgetful, "returned NoneType, not a list in the group's order; mend the function"),
        (leaving, r"test_orch_own_functions.py:\d+ in leaving: SystemExit: 2"),
        (changing, "for one group; let it follow from the group alone"),
        (writing, r"test_orch_own_functions.py:\d+ in writing: TypeError"),
    ],
)
def test_an_advantage_of_nonsense_is_refused(function, why):
    """own_advantages.py 2 and 3"""
    group = [rollout(1.0, 3, member=0), rollout(0.0, 5, member=1)]
    with pytest.raises(RunInterrupted, match=rf"^advantages\.mine: it .*{why}"):
        parts.advantages("custom", [group], own(function))


def rollout(reward: float, tokens: int, **more: object) -> rpb.Rollout:
    made = rpb.Rollout(reward=reward, **more)
    sample = made.samples.add(token_ids=range(tokens + 1), logprobs=[-1.0] * tokens)
    sample.spans.add(start=1, length=tokens)
    return made


def test_an_advantage_gets_what_there_is_to_know_of_a_group():
    told: list[Member] = []
    one = rollout(
        0.5,
        4,
        member=2,
        rewards={"match": 1.0},
        metrics={"m": 2.0},
        num_turns=3,
        truncated=True,
        stop_condition="cut",
    )
    parts.advantages("custom", [[one]], lambda groups: [[told.append(x) or 0.0 for x in g] for g in groups])
    assert told == [Member(0.5, {"match": 1.0}, {"m": 2.0}, 4, 3, True, "cut", 2, "")]


def test_an_advantage_of_ones_own_compares_parts_of_one_role():
    """parts.py 1 and 2"""
    made = []
    for reward, lengths in ((1.0, (4, 2)), (0.0, (6, 2))):
        both = rpb.Rollout()
        for agent, tokens in zip(("solver", "judge"), lengths, strict=True):
            both.samples.extend(rollout(0.0, tokens).samples)
            both.parts.add(agent=agent, reward=reward if agent == "solver" else 2.0, samples=1)
        made.append(both)
    found = parts.advantages("custom", [made], own(scaled))
    spread = 1.0 - 0.05 * 4 / 6 - (0.0 - 0.05)
    assert found == [pytest.approx([spread / 2, 0.0]), pytest.approx([-spread / 2, 0.0])]


def test_the_example_of_the_documentation_is_what_is_tested(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[3] / "docs/algorithms.md"
    code = page.read_text().partition("def shorter(group):")[2].partition("```")[0]
    (tmp_path / "shorter_of_docs.py").write_text(f"def shorter(group):{code}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        documented = load_advantages({"mine": "shorter_of_docs:shorter"})["mine"]
    group = [rollout(1.0, 4), rollout(1.0, 8), rollout(0.0, 8)]
    assert parts.advantages("custom", [group], documented) == [
        pytest.approx(one) for one in parts.advantages("custom", [group], own(scaled))
    ]
