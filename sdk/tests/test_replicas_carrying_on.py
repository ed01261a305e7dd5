"""Generations that outlive their replica: gone on with elsewhere, no token lost or doubled."""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from quartet.errors import QuartetError, refused
from quartet.inference import TOO_MANY
from quartet.replicas.answer import Answer
from quartet.replicas.generation import Generation
from quartet.seeds import completion_seed, completion_seeds
from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb
from replica_fleet import IMPATIENT, ask, at, check, fails, fleet, home, until
from scripted_replica import undisturbed


@pytest.mark.parametrize("reason", ["NOT_READY", "OVERLOADED", "DEADLINE"])
async def test_a_generation_is_gone_on_with_from_the_tokens_it_has(reason: str) -> None:
    """Invariant 6, client.py 2, generation.py 1 and 2: no token lost, none sampled twice."""
    async with fleet(2) as (scripted, replicas):
        first, (second,) = home("s", scripted)
        second.version = 2
        first.weights_id, second.weights_id = 2**64 - 1, 7
        first.before_piece = at(8, fails(reason))
        generated = await replicas.complete(ask(), 20)
        check(generated, "hello", undisturbed())
        assert generated.completions[0].weights == {(1, 2**64 - 1), (2, 7)}, "of both that sampled it"
        assert {version for start, _, version in generated.completions[0].spans if start >= 8} == {2}
        assert generated.completions[0].replicas == {first.address, second.address}
        (again,) = second.requests
        assert again.resumed_tokens == 8 and len(again.tokens.token_ids) == 5 + 8
        assert not again.tokens.tail_messages and again.session_id == "s"
        everything = first.sampled + second.sampled
        assert len(set(everything)) == len(everything) == 22, "each token was sampled once"
        assert (replicas.counts.carried_on, replicas.counts.carried_tokens) == (1, 8)


async def test_a_replica_that_dies_is_left_and_sessions_come_home_afterwards() -> None:
    """Invariant 9."""
    async with fleet(2) as (scripted, replicas):
        first, (second,) = home("s", scripted)
        first.before_piece = at(8, lambda: asyncio.create_task(first.end()))
        check(await replicas.complete(ask(), 20), "hello", undisturbed())
        assert replicas.in_service == [second.address]
        await replicas.complete(ask(max_tokens=1), 20)
        assert len(second.requests) == 2
        await first.begin(first.address)
        await until(lambda: len(replicas.in_service) == 2)
        await replicas.complete(ask(max_tokens=1), 20)
        assert len(second.requests) == 2 and len(first.requests) == 2


async def test_the_only_replica_is_waited_for() -> None:
    """Invariants 7 and 9."""
    async with fleet(1) as ((only,), replicas):
        only.before_piece = at(8, lambda: asyncio.create_task(only.end()))
        answer = asyncio.create_task(replicas.complete(ask(), 60))
        await until(lambda: only.server is None)
        await asyncio.sleep(0.3)
        await only.begin(only.address)
        check(await answer, "hello", undisturbed())


async def test_a_frozen_replica_is_left_after_the_idle_time() -> None:
    """Invariant 7."""
    async with fleet(2, IMPATIENT) as (scripted, replicas):
        first, _others = home("s", scripted)
        first.before_piece = at(8, lambda: asyncio.sleep(60))
        started = time.monotonic()
        check(await replicas.complete(ask(), 50), "hello", undisturbed())
        assert IMPATIENT.idle_timeout_seconds <= time.monotonic() - started < 40  # of the minute it is frozen
        await until(lambda: first.running == 0)


async def test_random_faults_change_nothing() -> None:
    """Invariants 6 and 9, client.py 2, generation.py 1 to 3: 40 of them, every replica failing at random."""
    seed = int(os.environ.get("QUARTET_FAULT_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
    print(f"QUARTET_FAULT_SEED={seed}")
    chance = random.Random(seed)

    def disturb(_at: int) -> Any:
        if chance.random() < 0.05:
            raise QuartetError(chance.choice(["NOT_READY", "OVERLOADED"]), "scripted", retry_after_ms=20)
        return asyncio.sleep(0.002) if chance.random() < 0.3 else None

    async with fleet(3) as (scripted, replicas):
        for one in scripted:
            one.before_piece = disturb

        async def one_of(number: int) -> None:
            text, sampling = f"prompt {number}", {"seed": 7 * number + 1}
            generated = await replicas.complete(
                ask(text, f"s{number % 9}", max_tokens=60, sampling=sampling), 60
            )
            check(generated, text, undisturbed(text, 60, 7 * number + 1))

        await asyncio.gather(*(one_of(number) for number in range(40)))
        everything = [token for one in scripted for token in one.sampled]
        assert len(everything) >= 40 * 60
        assert replicas.counts.carried_on > 0


async def test_several_completions_are_carried_on_each_by_itself() -> None:
    async with fleet(2) as (scripted, replicas):
        first, (second,) = home("s", scripted)
        first.before_piece = at(8, fails("NOT_READY"))
        generated = await replicas.complete(ask(n=3), 20)
        assert [request.n for request in first.requests] == [3], "one call shares the prompt"
        later = sorted(request.resumed_tokens for request in second.requests)
        assert later == [8, 8, 8] and {request.n for request in second.requests} == {1}
        for completion in generated.completions:
            assert len(completion.token_ids) == len(completion.logprobs) == 22
        everything = first.sampled + second.sampled
        assert len(everything) == 3 * 22


async def test_seeded_completions_have_seeds_of_their_own() -> None:
    """Asked for together, and each gone on with by the seed of its place."""
    async with fleet(2) as (scripted, replicas):
        first, _ = home("s", scripted)
        first.before_piece = at(8, fails("NOT_READY"))
        generated = await replicas.complete(ask(n=3, sampling={"seed": 40}), 20)
        assert [request.n for request in first.requests] == [3], "one call shares the prompt"
        for index, completion in enumerate(generated.completions):
            assert completion.token_ids == undisturbed(seed=completion_seed(40, index))


@pytest.mark.parametrize(
    "sampling",
    [{"sampling": {"seed": 40}}, {"completion_seeds": completion_seeds(40, 3)}],
    ids=["seed", "seeds"],
)
def test_seeded_completions_that_remain_of_a_call_keep_their_seeds(sampling: Any) -> None:
    """In a smaller request their places are others."""
    generation = Generation(ask(n=3, **sampling))
    assert generation.ask(generation.lanes) == ask(n=3, **sampling)
    again = generation.ask(generation.lanes[1:])
    assert list(again.completion_seeds) == completion_seeds(40, 3)[1:]
    assert again.n == 2 and not again.sampling.HasField("seed")


def piece(start: int, length: int) -> pb.GenerateResponse:
    spans = [{"start": start, "length": length, "policy_version": 1}]
    return pb.GenerateResponse(
        delta=pb.GenerateDelta(token_ids=[7] * length, logprobs=[-1.0] * length, spans=spans)
    )


def test_the_usage_of_a_completion_is_counted_over_all_who_sampled_it() -> None:
    """generation.py 3: what a replica found of another one's tokens is no part of the prompt."""
    generation = Generation(ask("hello"))
    lanes = generation.lanes
    generation.take(pb.GenerateResponse(start={"prompt_token_ids": map(ord, "hello")}), lanes, "a:1")
    generation.take(piece(0, 8), lanes, "a:1")
    assert generation.ask(lanes).resumed_tokens == 8
    generation.take(piece(8, 2), lanes, "b:1")
    told = common_pb2.Usage(prompt_tokens=13, completion_tokens=2, cached_tokens=12)
    last = pb.GenerateResponse(finish=pb.GenerateFinish(usage=told))
    assert generation.take(last, lanes, "b:1")
    assert last.finish.usage == common_pb2.Usage(prompt_tokens=5, completion_tokens=10, cached_tokens=5)


def test_tokens_before_their_prompt_are_outside_the_contract() -> None:
    generation = Generation(ask("hello"))
    with pytest.raises(QuartetError, match=r"INTERNAL: .* tokens came before the prompt"):
        generation.take(piece(0, 8), generation.lanes, "a:1")


@pytest.mark.parametrize("logprob", [math.nan, -math.inf, math.inf, 3.0])
def test_a_log_probability_that_is_none_is_outside_the_contract(logprob: float) -> None:
    """It ends a rollout as the model's failure, and not a run."""
    generation = Generation(ask("hello"))
    generation.take(
        pb.GenerateResponse(start={"prompt_token_ids": map(ord, "hello")}), generation.lanes, "a:1"
    )
    wrong = piece(0, 8)
    wrong.delta.logprobs[3] = logprob
    with pytest.raises(QuartetError, match=rf"INTERNAL: .* a log-probability of {logprob:g}"):
        generation.take(wrong, generation.lanes, "a:1")


def test_completions_are_together_until_one_of_them_has_a_token() -> None:
    generation = Generation(ask(n=3))
    assert generation.may_be_together(generation.lanes[1:])
    generation.lanes[1].token_ids.append(7)
    assert not generation.may_be_together(generation.lanes[1:])


@pytest.mark.parametrize(
    "refusal",
    [
        QuartetError("OVERLOADED", "two completions wait already", retry_after_ms=1),
        refused(TOO_MANY, 4, "at most two completions wait here; ask for fewer at a time"),
    ],
)
async def test_completions_that_have_no_room_together_are_asked_for_one_by_one(refusal: QuartetError) -> None:
    """Now, or ever."""
    async with fleet(1) as (scripted, replicas):
        (only,) = scripted

        async def crowded() -> None:
            if only.requests[-1].n > 2:
                raise refusal

        only.before_piece = lambda _sampled: crowded()
        generated = await replicas.complete(ask(n=4, sampling={"seed": 40}), 20)
        assert [request.n for request in only.requests] == [4, 1, 1, 1, 1]
        for index, completion in enumerate(generated.completions):
            assert completion.token_ids == undisturbed(seed=completion_seed(40, index))


def test_an_answer_holds_none_of_its_frames() -> None:
    """answer.py 3"""
    frame = pb.GenerateResponse(start={"prompt_token_ids": [1, 2]})
    frame.delta.token_ids.append(3)
    frame.finish.message.content, frame.finish.usage.prompt_tokens = "so", 2
    answer = Answer(ask())
    answer.take(frame)
    frame.finish.message.content, frame.finish.usage.prompt_tokens = "another", 9
    (completion,) = answer.so_far.completions
    assert (completion.message.content, completion.usage.prompt_tokens) == ("so", 2)


async def test_completions_are_told_as_they_end() -> None:
    """One that is short does not wait for one that is long."""
    async with fleet(1) as (scripted, replicas):
        (only,) = scripted
        seen = asyncio.Event()
        whole = only._frames

        async def held(request: Any) -> AsyncIterator[Any]:
            async for frame in whole(request):
                if frame.HasField("finish") and frame.finish.index == 1:
                    await seen.wait()  # not before the first was told
                yield frame

        only._frames = held  # type: ignore[method-assign]
        ended = []
        async for index, generated in replicas.as_completed(ask(n=2), 20):
            ended.append((index, len(generated.completions[0].token_ids), generated.prompt_ids))
            seen.set()
        assert ended == [(0, 22, [*map(ord, "hello")]), (1, 22, [*map(ord, "hello")])]


async def test_a_request_that_was_itself_gone_on_with() -> None:
    """A client of ours may have begun elsewhere: positions count from the completion's first token."""
    async with fleet(2) as (scripted, replicas):
        first, (second,) = home("s", scripted)
        first.before_piece = at(14, fails("NOT_READY"))
        had = undisturbed()[:6]
        request = pb.GenerateRequest(
            tokens=pb.TokensPrompt(token_ids=[*map(ord, "hello"), *had]),
            resumed_tokens=6,
            session_id="s",
            sampling=common_pb2.SamplingParams(max_tokens=22),
        )
        (completion,) = (await replicas.complete(request, 20)).completions
        assert had + completion.token_ids == undisturbed()
        assert completion.spans[0][0] == 6 and second.requests[0].resumed_tokens == 14
