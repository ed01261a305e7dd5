"""How rollouts are sampled: each as its environment says, those of evaluations as evaluations do."""

from __future__ import annotations

import random
from contextlib import suppress

from orch_world import RUN, assert_complete
from quartet.run.config import parse_run
from quartet.run.operation import computes_the_same, differences
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import orchestrator_service_pb2 as pb
from quartet_orchestrator.state import RESTING

TWO = """
[[env]]
id = "toy"
[[env]]
id = "other"
[env.sampling]
max_tokens = 256
stop = ["</guess>"]
min_tokens = 5
"""
SAMPLED = """
[sampling]
max_tokens = 2048
temperature = 0.75
"""
OF_TRAINING = {("toy", 2048, 0, 0.75, ()), ("other", 256, 5, 0.75, ("</guess>",))}


def two(world, more: str = "", **how: object) -> str:
    text = world.toml(**how).replace('[[env]]\nid = "toy"', TWO)
    return text + SAMPLED + more


def sampled(world, split: epb.Split) -> set[tuple[str, int, int, float, tuple[str, ...]]]:
    """Of each environment that was asked for: the longest answer, the shortest, the temperature and what ends
    it."""
    asked = [(one.environment.id, one.sampling) for one in world.host.requests if one.split == split]
    return {(env, how.max_tokens, how.min_tokens, how.temperature, tuple(how.stop)) for env, how in asked}


async def run_whole(world, toml: str) -> None:
    async with world.orchestrator() as runs:
        await runs.submit(RUN, toml, dry_run=False)
        assert_complete(world, await world.rest(runs))


async def test_evaluations_sample_as_training_does_where_nothing_is_said(world):
    await run_whole(world, two(world))
    assert sampled(world, epb.SPLIT_TRAIN) == sampled(world, epb.SPLIT_EVAL) == OF_TRAINING


async def test_evaluations_sample_otherwise_than_training(world):
    own = "[eval.sampling]\nmax_tokens = 32768\nmin_tokens = 9\ntemperature = 0.0\nseed = 3\n"
    await run_whole(world, two(world, own))
    assert sampled(world, epb.SPLIT_TRAIN) == OF_TRAINING
    assert sampled(world, epb.SPLIT_EVAL) == {
        ("toy", 32768, 9, 0.0, ()),
        ("other", 32768, 9, 0.0, ("</guess>",)),
    }
    seeded = {one.split: one.sampling.HasField("seed") for one in world.host.requests}
    assert seeded == {epb.SPLIT_TRAIN: False, epb.SPLIT_EVAL: True}


async def test_an_environment_to_evaluate_on_has_the_last_word(world):
    own = (
        '[[eval.env]]\nid = "toy"\n[eval.env.sampling]\nmax_tokens = 512\ntemperature = 0.5\n'
        '[[eval.env]]\nid = "third"\n[eval.sampling]\ntemperature = 0.0\n'
    )
    await run_whole(world, two(world, own))
    assert sampled(world, epb.SPLIT_TRAIN) == OF_TRAINING
    assert sampled(world, epb.SPLIT_EVAL) == {("toy", 512, 0, 0.5, ()), ("third", 2048, 0, 0.0, ())}


def test_how_a_run_samples_stays_as_it_is_when_it_goes_on():
    """operation.py 2: what was measured and trained on is to be comparable."""
    known = parse_run(f'model = "m"{TWO}')
    for more, told in (
        ("top_k = 3", "env.1.sampling.top_k was nothing and is 3"),
        ("[eval.sampling]\nseed = 3", "eval.sampling.seed was nothing and is 3"),
    ):
        asked = parse_run(f'model = "m"{TWO}{more}')
        assert not computes_the_same(known, asked) and differences(known, asked) == [told]


async def test_what_is_sampled_again_after_a_kill_is_sampled_so_again(world):
    """Invariants 2 and 9: a batch of environments that are sampled otherwise comes out the same."""
    chance = random.Random(0)
    toml = two(world, '[algorithm]\npreset = "dr_grpo"\n', steps=6, off_policy=0)
    undisturbed = await world.undisturbed(toml)
    world.host.requests.clear()
    kills, run = 0, pb.Run()
    while run.phase not in RESTING:
        async with world.orchestrator() as runs:
            run = await runs.submit(RUN, toml, dry_run=False)
            with suppress(TimeoutError):
                run = await world.rest(runs, timeout_s=chance.uniform(0.0, 0.15) * (1 + kills / 10))
            kills += run.phase not in RESTING
    assert kills >= 2
    assert_complete(world, run, steps=6)
    assert world.trainer.disk[RUN, "final"].weights == undisturbed
    assert sampled(world, epb.SPLIT_TRAIN) == OF_TRAINING
