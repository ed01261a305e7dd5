"""Every engine: what ends a completion, what is shared, freed, refused, held."""

from __future__ import annotations

import asyncio
import random

import pytest
from quartet.errors import QuartetError
from quartet.v1 import common_pb2
from quartet.v1 import inference_service_pb2 as pb

from .conformance import CONTEXT, SLOTS, UNTIL_SECONDS, VOCABULARY, Replica
from .told import random_prompt

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_stop_strings_stop_tokens_and_end_tokens(replica: Replica) -> None:
    rng = random.Random(4)
    prompt, wanted = random_prompt(rng, 30), {"seed": 11, "max_tokens": 60}
    plain = await replica.one(prompt, ignore_eos=True, **wanted)
    assert plain.finish.finish_reason == pb.FINISH_REASON_LENGTH and len(plain.tokens) == 60
    token = plain.tokens[6]
    stopped = await replica.one(prompt, ignore_eos=True, stop_token_ids=[token, 259], **wanted)
    assert stopped.tokens == plain.tokens[: plain.tokens.index(token) + 1]
    assert stopped.finish.finish_reason == pb.FINISH_REASON_STOP
    stop = next(c for c in plain.text[3:] if c.isascii() and c.isprintable())
    by_text = await replica.one(prompt, ignore_eos=True, stop=["\x00never", stop], **wanted)
    assert (by_text.finish.finish_reason, by_text.finish.stop_match) == (pb.FINISH_REASON_STOP, stop)
    assert by_text.tokens == plain.tokens[: len(by_text.tokens)]
    assert by_text.text == plain.text[: plain.text.find(stop)]
    assert by_text.finish.usage.completion_tokens == len(by_text.tokens)

    end = (await replica.info()).end_token_ids[0]
    wanted = {"max_tokens": 200, "temperature": 4.0}
    asked = [{"prompt": random_prompt(rng, 30), "seed": seed, **wanted} for seed in range(20)]
    answers = await asyncio.gather(*[replica.one(**one) for one in asked])
    ended = [a for a in answers if a.finish.finish_reason == pb.FINISH_REASON_STOP]
    assert ended and all(a.tokens[-1] == end and end not in a.tokens[:-1] for a in ended)
    assert all(a.finish.stop_match == "" for a in ended)
    through = await asyncio.gather(*[replica.one(**one, ignore_eos=True) for one in asked])
    assert all(len(a.tokens) == 200 for a in through) and any(end in a.tokens for a in through)


async def test_completions_and_turns_share_their_prefix(replica: Replica) -> None:
    await replica.serve(4)
    prompt = [random.Random(5).randrange(256) for _ in range(100)]
    group = await replica.ask(prompt, n=8, session_id="s")
    cached = sorted(a.finish.usage.cached_tokens for a in group)
    assert cached[0] == 0 and all(one >= 96 for one in cached[1:]), cached
    turn = await replica.one(prompt + group[3].tokens + [1, 2, 3], session_id="s")
    assert turn.finish.usage.cached_tokens >= 96
    assert turn.finish.usage.prompt_tokens == len(turn.prompt)
    assert max(replica.difference(a) for a in [*group, turn]) <= replica.tolerance


async def test_cancelled_calls_free_their_slots(replica: Replica) -> None:
    sampling = common_pb2.SamplingParams(max_tokens=250, ignore_eos=True)
    request = pb.GenerateRequest(tokens=pb.TokensPrompt(token_ids=[1, 2]), n=SLOTS, sampling=sampling)
    caught = 0
    for _ in range(12):  # on a busy machine the engine may have ended before this process gets to the first
        call = replica.stub.Generate(request, timeout=60)
        while not (await call.read()).HasField("delta"):
            pass
        caught += (await replica.info()).running > 0
        call.cancel()
        await replica.until(lambda info: info.running + info.waiting == 0)
        if caught == 3:
            break
    assert caught > 0
    async with asyncio.timeout(UNTIL_SECONDS):
        assert len(await replica.ask([3], n=SLOTS, max_tokens=4)) == SLOTS


async def test_prompts_that_cannot_be_completed_are_refused(replica: Replica) -> None:
    for prompt, reason in (
        ([1] * CONTEXT, "PROMPT_TOO_LONG"),
        ([], "INVALID_REQUEST"),
        ([1, VOCABULARY], "INVALID_REQUEST"),
        ([2**32 - 1], "INVALID_REQUEST"),
    ):
        with pytest.raises(QuartetError) as caught:
            await replica.ask(prompt)
        assert caught.value.reason == reason, prompt
        if reason == "PROMPT_TOO_LONG":
            told = f"has {CONTEXT} tokens, at most {CONTEXT - 1} leave room for one: the engine's context is "
            assert f"{told}max_model_len = {CONTEXT} of [inference]" in caught.value.message
    for field_, value in (("temperature", -1.0), ("top_p", 0.0), ("min_p", 2.0), ("max_tokens", 0)):
        with pytest.raises(QuartetError) as caught:
            await replica.ask([1], **{field_: value})
        assert caught.value.metadata["field"] == field_
    full = await replica.one([1] * (CONTEXT - 1), max_tokens=50)
    assert len(full.tokens) == 1 and full.finish.finish_reason in (
        pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP,
    )  # fmt: skip


async def test_three_hundred_requests_at_once(replica: Replica) -> None:
    await replica.serve(5)
    rng = random.Random(6)
    prompts = [random_prompt(rng, 60) for _ in range(300)]
    answers = await asyncio.gather(*[replica.one(p, max_tokens=16) for p in prompts])
    assert all(1 <= len(a.tokens) <= 16 for a in answers)
    assert max(replica.difference(a) for a in answers[::10]) <= replica.tolerance
    await replica.until(lambda info: info.running == info.waiting == 0)


async def test_pause_holds_requests_and_updates_come_through(replica: Replica) -> None:
    await replica.stub.Pause(pb.PauseRequest(), timeout=10)
    before = (await replica.info()).tokens_sampled
    call = asyncio.create_task(replica.ask([4, 5], n=3))
    await replica.until(lambda info: info.waiting == 3)
    await replica.serve(12)
    info = await replica.info()
    assert info.paused and info.tokens_sampled == before and not call.done()
    resumed = await replica.stub.Resume(pb.ResumeRequest(), timeout=10)
    assert resumed.in_flight in (3, 4), "the check of the new weights may wait beside them"
    assert all(set(a.versions) == {max(replica.models)} for a in await call)
