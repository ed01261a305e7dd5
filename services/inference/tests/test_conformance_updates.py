"""Every engine: weights that change under requests, and weights that must not."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from quartet.errors import QuartetError

from .conformance import Replica
from .engine_calls import caught_midway
from .told import Told, random_prompt

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_updates_in_flight_drop_nothing_and_every_token_tells_its_version(replica: Replica) -> None:
    """Invariant 3. With recomputed keys each token is that of a plain forward of its version."""
    rng = random.Random(7)
    wanted = {"max_tokens": 80, "ignore_eos": True, "temperature": 0.8}

    def begin(count: int) -> list[asyncio.Task[Told]]:
        return [asyncio.create_task(replica.one(random_prompt(rng, 60), **wanted)) for _ in range(count)]

    # The first version comes to requests that are surely in flight, the others to running engines.
    calls = await caught_midway(replica.door.engine, lambda: begin(30), completions=30, tokens=200)
    await replica.serve(6)
    await replica.door.engine.resume()
    for seed in (7, 8):
        sampled = (await replica.info()).tokens_sampled
        calls += begin(10)
        await replica.until(lambda info, to=sampled + 200: info.tokens_sampled >= to)
        await replica.serve(seed)
    answers = await asyncio.gather(*calls)
    assert all(len(a.tokens) == 80 and a.versions == sorted(a.versions) for a in answers)
    crossed = [a for a in answers if len(set(a.versions)) > 1]
    assert crossed, "no request was in flight at an update"
    assert max(replica.difference(a, temperature=0.8) for a in answers) <= replica.tolerance


async def test_seeded_sampling_goes_on_through_an_update(replica: Replica) -> None:
    """The same weights under another number: not a token differs."""
    model = await replica.serve(9)
    wanted = {"max_tokens": 150, "ignore_eos": True, "seed": 3}
    quiet = await replica.ask([1, 2, 3], n=4, **wanted)
    with torch.no_grad():
        other = replica.make(9)
    other.load_state_dict(model.state_dict())
    [call] = await caught_midway(
        replica.door.engine,
        lambda: [asyncio.create_task(replica.ask([1, 2, 3], n=4, **wanted))],
        completions=4,
        tokens=20,
    )
    await replica.serve(9, model=other)
    await replica.door.engine.resume()
    assert [a.tokens for a in await call] == [a.tokens for a in quiet]


async def test_a_version_of_another_precision_is_served_as_it_was_rounded(replica: Replica) -> None:
    """What a trainer on a GPU publishes, and an engine on a CPU serves: each value is widened exactly."""
    await replica.serve(21, model=replica.make(21).bfloat16())
    # Not the model that was rounded: its buffers were, too.
    exact = replica.models[max(replica.models)] = replica.make(21)
    for parameter in exact.parameters():
        parameter.copy_(parameter.bfloat16())
    answer = await replica.one([5, 6, 7], max_tokens=40, ignore_eos=True)
    assert set(answer.versions) == {max(replica.models)}
    assert replica.difference(answer) <= replica.tolerance


async def test_pinned_requests_end_when_their_version_leaves(replica: Replica) -> None:
    await replica.serve(10)
    version = max(replica.models)
    wanted = {"max_tokens": 250, "ignore_eos": True}

    def begin() -> list[asyncio.Task[list[Told]]]:
        exact = {"exact_policy_version": version, **wanted}
        pinned = [asyncio.create_task(replica.ask([1], n=8, **exact)) for _ in range(4)]
        return [*pinned, asyncio.create_task(replica.ask([1], n=4, **wanted))]

    *pinned, free = await caught_midway(replica.door.engine, begin, completions=36, tokens=1)
    await replica.serve(11)
    await replica.door.engine.resume()
    for call in pinned:
        with pytest.raises(QuartetError) as caught:
            await call
        assert caught.value.reason == "VERSION_UNAVAILABLE"
    assert all(len(answer.tokens) == 250 for answer in await free)
    exact = await replica.one([1, 2], exact_policy_version=max(replica.models))
    assert set(exact.versions) == {max(replica.models)}


async def test_broken_weights_fail_requests_and_good_ones_heal(replica: Replica) -> None:
    broken = replica.make(14)
    with torch.no_grad():
        broken.model.layers[1].self_attn.v_proj.weight.fill_(float("nan"))
    await replica.serve(14, model=broken)
    with pytest.raises(QuartetError) as caught:
        await replica.ask(list(range(40)), n=4)
    assert caught.value.reason == "NOT_READY" and "are no numbers" in caught.value.message
    await replica.until(lambda info: bool(info.out_of_service))
    await replica.serve(15)
    await replica.until(lambda info: not info.out_of_service)
    answers = await replica.ask(list(range(40)), n=4)
    assert max(replica.difference(a) for a in answers) <= replica.tolerance


async def test_a_version_of_another_model_is_refused_and_changes_nothing(replica: Replica) -> None:
    model = await replica.serve(16)
    served = (await replica.info()).policy_version
    wrong = replica.make(17, num_hidden_layers=1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5):
            await replica.serve(17, model=wrong)
    assert (await replica.info()).policy_version == served
    answer = await replica.one([1, 2, 3])
    assert set(answer.versions) == {served} and replica.difference(answer) <= replica.tolerance
    await replica.serve(16, model=model)
