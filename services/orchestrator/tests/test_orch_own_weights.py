"""Weights of an earlier run of that name: what they answered is sampled again, and nothing of it is kept."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from orch_fakes import OTHERS
from orch_world import RUN, assert_complete, events, until
from quartet.errors import QuartetError
from quartet.run.config import parse_run
from quartet.v1 import rollout_pb2 as rpb
from quartet_orchestrator import outage
from quartet_orchestrator.failures import is_away
from quartet_orchestrator.own_weights import MAX_KNOWN, OwnWeights
from quartet_orchestrator.trainer_client import TrainerClient


def _id(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")


def _rollout(*told: tuple[int, int]) -> rpb.Rollout:
    rollout = rpb.Rollout(member=3, reward=1.0)
    rollout.samples.add(token_ids=[5, 6], logprobs=[-1.0]).spans.add(start=1, length=1)
    for version, weights_id in told:
        rollout.weights.add(policy_version=version, weights_id=weights_id)
    return rollout


@asynccontextmanager
async def _whole_run(world, steps: int = 4):
    """A run that is over, its book open, and what its trainer published, by version."""
    toml = world.toml(steps=steps, evals=0)
    async with world.orchestrator() as runs:
        await runs.submit(RUN, toml, dry_run=False)
        assert_complete(world, await world.rest(runs), steps=steps)
        book = runs.get(RUN)
        await book.opened()
        yield book, parse_run(toml), {version: one for (_, version), one in world.trainer.digests.items()}


@pytest.mark.parametrize("compares", [False, True])
async def test_no_token_of_another_runs_weights_is_written_down_or_trained(world, monkeypatch, compares):
    """own_weights.py 1 and sampling.py 8: also where their version is one that this run has published."""
    monkeypatch.setattr(outage, "MAX_BACKOFF_S", 0.01)
    host = world.host
    host.tells_weights, host.compares = True, compares
    host.others = {task: 3 for task in range(0, 50, 2)}
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=6), dry_run=False)
        run = await world.rest(runs)
        seen = await events(runs, rollouts=True)
    assert_complete(world, run, steps=6)
    assert sum(host.others.values()) < 3 * 25, "they did answer"
    assert not run.ledger.discarded, "they are no fault of their groups"
    rollouts = [one.rollout.rollout for one in seen if one.WhichOneof("kind") == "rollout"]
    rollouts += [one.eval_rollout.rollout.rollout for one in seen if one.WhichOneof("kind") == "eval_rollout"]
    refused = [one for one in rollouts if one.HasField("failure")]
    assert refused and all(
        is_away(one.failure) and "an earlier run" in one.failure.message for one in refused
    )
    assert not any(one.samples or one.weights for one in refused)
    good = [one for one in rollouts if not one.HasField("failure")]
    assert good and not any(one.weights for one in good), "it is judged, and not kept"


async def test_what_is_answered_while_the_trainer_cannot_be_asked_waits_for_it_and_is_kept(world):
    """own_weights.py 2: replicas have a version, and the answer to its publication is cut off."""
    world.host.tells_weights = True
    world.trainer.unheard[2] = 4
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=4, off_policy=2, evals=0), dry_run=False)
        run = await world.rest(runs)
        seen = await events(runs, rollouts=True)
    assert_complete(world, run, steps=4)
    assert world.trainer.unheard[2] == 0
    rollouts = [one.rollout.rollout for one in seen if one.WhichOneof("kind") == "rollout"]
    assert not [one.failure.message for one in rollouts if one.HasField("failure")]
    notes = [one.note.message for one in seen if one.WhichOneof("kind") == "note"]
    assert not [one for one in notes if "earlier run" in one], notes


async def test_what_a_trainer_published_that_died_before_it_said_so_waits_until_it_is_back(
    world, monkeypatch
):
    """own_weights.py 2: it has not opened the run yet, and then not come to the version; replicas have it."""
    asked, back, create = [], asyncio.Event(), TrainerClient.create

    async def created(client, *given):
        if not world.trainer.lose_answer_of:
            await back.wait()
        return await create(client, *given)

    monkeypatch.setattr(TrainerClient, "create", created)
    world.host.tells_weights = True
    world.trainer.lose_answer_of = {7}  # the publication of version 2
    async with world.orchestrator() as runs:
        await runs.submit(RUN, world.toml(steps=4, off_policy=2, evals=0), dry_run=False)
        await until(lambda: not world.trainer.lose_answer_of)
        own = runs._held[RUN].run._rollouts._sampling._own_weights
        digest_of = own._digest_of

        async def noted(version):
            try:
                return await digest_of(version)
            except QuartetError as error:
                asked.append(error.reason)
                raise

        monkeypatch.setattr(own, "_digest_of", noted)
        mine, anothers = _rollout((2, _id(world.trainer.digests[RUN, 2]))), _rollout((2, OTHERS))
        judged = [asyncio.create_task(own.judge(one)) for one in (mine, anothers)]
        await until(lambda: "RUN_UNKNOWN" in asked)
        back.set()
        await asyncio.gather(*judged)
        assert not mine.HasField("failure") and mine.samples
        assert is_away(anothers.failure) and not anothers.samples
        assert_complete(world, await world.rest(runs), steps=4)
        seen = await events(runs, rollouts=True)
    rollouts = [one.rollout.rollout for one in seen if one.WhichOneof("kind") == "rollout"]
    assert not [one.failure.message for one in rollouts if one.HasField("failure")]


async def test_what_was_published_is_known_from_the_journal_and_from_the_trainer(world):
    """own_weights.py 2: whoever it was told to, and however often."""
    async with _whole_run(world) as (book, config, digests):
        asked: list[int] = []
        answers: dict[int, bytes] = {}

        async def digest_of(version: int) -> bytes:
            asked.append(version)
            await asyncio.sleep(0)
            if version not in answers:
                raise QuartetError("VERSION_UNKNOWN", "not held")
            return answers[version]

        own = OwnWeights(book, config, digest_of)
        assert sorted(digests) == [0, 1, 2, 3, 4]
        mine = _rollout(*((version, _id(digest)) for version, digest in digests.items()))
        await own.judge(mine)
        assert not mine.HasField("failure") and mine.samples and not mine.weights and not asked

        again = b"came out otherwise"
        own.published(2, again)
        for digest in (digests[2], again):
            await own.judge(told := _rollout((2, _id(digest))))
            assert not told.HasField("failure") and not asked

        answers[5] = b"served before the answer was here"
        for _ in range(2):
            await own.judge(told := _rollout((4, _id(digests[4])), (5, _id(answers[5]))))
            assert not told.HasField("failure") and asked == [5]

        answers[6] = b"with which all that is under way ends at once"
        many = [_rollout((6, _id(answers[6]))) for _ in range(5)]
        await asyncio.gather(*map(own.judge, many))
        assert not any(told.HasField("failure") for told in many) and asked == [5, 6]

        for version in range(7, 7 + 2 * MAX_KNOWN):
            own.published(version, b"later")
        await own.judge(told := _rollout((1, _id(digests[1]))))
        assert not told.HasField("failure") and asked == [5, 6], "read back where it was forgotten"


async def test_what_the_trainer_does_not_know_is_not_the_runs_and_asked_for_once(world):
    """own_weights.py 1 and 2: a trainer that does not have the run now is asked again."""
    async with _whole_run(world) as (book, config, digests):
        reasons = ["RUN_UNKNOWN", "RUN_UNKNOWN", "VERSION_UNKNOWN"]
        asked: list[int] = []

        async def digest_of(version: int) -> bytes:
            asked.append(version)
            raise QuartetError(reasons.pop(0), "not now")

        own = OwnWeights(book, config, digest_of)
        for times in (1, 2, 3, 3):
            rollout = _rollout((1, _id(digests[1])), (9, OTHERS))
            await own.judge(rollout)
            assert rollout.member == 3 and is_away(rollout.failure) and not rollout.samples
            assert f"{OTHERS:016x} as version 9" in rollout.failure.message and RUN in rollout.failure.message
            assert asked == [9] * times


async def test_a_host_that_tells_no_weights_is_taken_at_its_word(world):
    """own_weights.py 3: of an earlier release."""
    async with _whole_run(world) as (book, config, _):
        own = OwnWeights(book, config, _nobody)
        await own.judge(told := _rollout())
        assert told == _rollout()
        failed = _rollout((9, OTHERS))
        failed.failure.message = "its own"
        await own.judge(failed)
        assert failed.failure.message == "its own" and failed.samples


async def _nobody(version: int) -> bytes:
    raise AssertionError("nobody is asked")


async def test_what_answers_as_the_next_version_holds_up_no_evaluation_of_this_one(world, monkeypatch):
    """own_weights.py 2: it is published once this one is measured, for which there have to be permits."""
    monkeypatch.setattr(outage, "MAX_BACKOFF_S", 0.01)
    world.host.tells_weights, world.host.others_version = True, 2
    learned, judged = asyncio.Event(), asyncio.Event()
    async with world.orchestrator() as runs:
        evals = "4\nrollouts_per_example = 2\ninterval = 1"
        await runs.submit(RUN, world.toml(steps=4, evals=evals, max_concurrent=4), dry_run=False)
        run = runs._held[RUN].run
        learn, measure = run._training.learn, run._evaluation.measure
        own = run._rollouts._sampling._own_weights
        is_on_its_way = own._is_on_its_way

        async def learns(batch):
            if batch == 1:
                world.host.others = dict.fromkeys(range(6, 50), 1_000_000)
            await learn(batch)
            if batch == 1:
                learned.set()

        async def measures(step):
            if step == 1:
                await judged.wait()
            await measure(step)
            if step == 1:
                world.host.others = {}

        def looked(version):
            if learned.is_set():
                judged.set()
            return is_on_its_way(version)

        monkeypatch.setattr(run._training, "learn", learns)
        monkeypatch.setattr(run._evaluation, "measure", measures)
        monkeypatch.setattr(own, "_is_on_its_way", looked)
        assert_complete(world, await world.rest(runs), steps=4)
    assert judged.is_set()
