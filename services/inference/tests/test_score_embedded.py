"""Scoring by the embedded engine against a plain forward pass (float32: at most 2e-5 apart)."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from quartet.errors import QuartetError
from quartet_inference.embedded import score
from quartet_inference.engine import Delta, Request, Sampling, Scored, ScoreRequest, ServedWeights
from transformers import AutoModelForCausalLM, MoshiConfig

from .engine_calls import UNTIL_SECONDS, running, until
from .random_models import weights_of
from .told import TOLERANCE, best

Make = Callable[..., Any]


def expected(model: Any, request: ScoreRequest) -> list[float]:
    """The covered log-probabilities by one forward pass of the whole sequence."""
    with torch.no_grad():
        logprobs = model(torch.tensor([request.tokens])).logits[0].float().log_softmax(-1)
    covered = [p for start, length in request.covered for p in range(start, start + length)]
    return [float(logprobs[p - 1, request.tokens[p]]) for p in covered]


def near(have: list[float], want: list[float]) -> bool:
    return have == pytest.approx(want, abs=TOLERANCE["embedded"], rel=0)


def sequence(chance: random.Random, length: int) -> ScoreRequest:
    """Random tokens; up to three covered ranges."""
    cuts = sorted(chance.sample(range(1, length + 1), min(6, length)))
    covered = tuple((a, b - a) for a, b in zip(cuts[::2], cuts[1::2], strict=False))
    return ScoreRequest(tuple(chance.randrange(256) for _ in range(length)), covered)


def held_up(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], threading.Event]:
    """Where each long sequence was after each of its pieces; the second waits until the event is set."""
    begun, go_on, piece = list[int](), threading.Event(), score.Scorer._long

    def counted(self: score.Scorer, job: score.ScoreJob) -> None:
        if begun:
            assert go_on.wait(UNTIL_SECONDS)
        piece(self, job)
        begun.append(job.done)

    monkeypatch.setattr(score.Scorer, "_long", counted)
    return begun, go_on


@pytest.mark.parametrize("head_dim_bias", [{}, {"attention_bias": True}])
async def test_scores_are_a_forward_pass(
    make_model: Make, monkeypatch: pytest.MonkeyPatch, head_dim_bias: dict[str, Any]
) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    monkeypatch.setattr(score, "PIECE_TOKENS", 96)  # most go in pieces, some share a pass
    requests = [sequence(chance, chance.choice([1, 2, 5, 30, 95, 96, 97, 98, 300, 512])) for _ in range(40)]
    requests.append(ScoreRequest(tuple(range(200)), ((1, 199),)))
    requests.append(ScoreRequest((7, 8), ()))
    plain = make_model(0, **head_dim_bias)
    async with running(make_model(0, **head_dim_bias), max_model_len=512) as engine:
        scored = await asyncio.gather(*(engine.score(request) for request in requests))
    for request, have in zip(requests, scored, strict=True):
        assert near(have.logprobs, expected(plain, request)), request
        assert have.version == 0


async def test_a_window_that_a_model_does_not_look_through_cuts_nothing_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(score, "PIECE_TOKENS", 20)
    torch.manual_seed(0)
    sizes = {"vocab_size": 260, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MoshiConfig(**sizes, ffn_dim=96, sliding_window=12, num_codebooks=2, max_position_embeddings=256)
    moshi = AutoModelForCausalLM.from_config(config).eval()
    request = ScoreRequest(tuple(range(90)), ((1, 89),))
    async with running(moshi) as engine:
        assert near((await engine.score(request)).logprobs, expected(moshi, request))


async def test_a_small_vocabulary_bound_makes_smaller_pieces(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score, "LOGIT_ELEMENTS", 260 * 10)
    request = ScoreRequest(tuple(range(45)), ((3, 40),))
    async with running(make_model(0)) as engine:
        assert near((await engine.score(request)).logprobs, expected(make_model(0), request))


async def test_decoding_goes_on_between_pieces(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """While 40 long sequences are scored, a running completion gets a token for every piece."""
    monkeypatch.setattr(score, "PIECE_TOKENS", 32)
    chance = random.Random(1)
    requests = [
        ScoreRequest(tuple(chance.randrange(256) for _ in range(480)), ((1, 479),)) for _ in range(40)
    ]
    meanwhile: list[int] = []
    piece = score.Scorer._long

    def counted(self: score.Scorer, job: score.ScoreJob) -> None:
        meanwhile.append(engine.info().running)  # here: how far the test is behind the engine says nothing
        piece(self, job)

    monkeypatch.setattr(score.Scorer, "_long", counted)
    async with running(make_model(0), max_model_len=512) as engine:
        generation = engine.generate(Request((1, 2, 3), Sampling(max_tokens=300, ignore_eos=True)))
        assert isinstance(await anext(generation), Delta)
        scoring = [asyncio.create_task(engine.score(request)) for request in requests]
        told = 0
        async for event in generation:
            told += len(event.token_ids) if isinstance(event, Delta) else 0
        assert told >= 260
        assert sum(meanwhile) < 450, "300 steps leave time for 300 of 600 pieces"
        plain = make_model(0)
        for request, task in zip(requests, scoring, strict=True):
            assert near((await task).logprobs, expected(plain, request))


async def test_a_swap_starts_a_sequence_anew_and_fails_what_is_pinned(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 3: no sequence is scored by two versions."""
    monkeypatch.setattr(score, "PIECE_TOKENS", 16)
    request = ScoreRequest(tuple(range(250)), ((1, 249),))
    pinned = ScoreRequest(request.tokens, request.covered, exact_version=0)
    begun, go_on = held_up(monkeypatch)
    async with running(make_model(0)) as engine:
        staged = await engine.stage(weights_of(make_model(1)))
        answer = asyncio.create_task(engine.score(request))
        refused = asyncio.create_task(engine.score(pinned))
        await until(lambda: bool(begun))
        swapping = asyncio.create_task(engine.swap(staged, ServedWeights("", 1, b"1")))
        await asyncio.sleep(0)  # it gives its command, which comes before the last of the pieces
        go_on.set()
        await swapping
        with pytest.raises(QuartetError) as caught:
            await refused
        assert caught.value.reason == "VERSION_UNAVAILABLE"
        scored = await answer
        assert begun.count(16) == 2, "it was in the middle, and began anew"
        assert scored.version == 1 and near(scored.logprobs, expected(make_model(1), request))


async def test_bounds_cancellation_and_closing(make_model: Make) -> None:
    async with running(make_model(0), max_waiting=2) as engine:
        await engine.pause()
        request = ScoreRequest((1, 2, 3), ((1, 2),))
        first, second = (asyncio.create_task(engine.score(request)) for _ in range(2))
        await asyncio.sleep(0)  # each gives its command; that of `pause` comes behind them
        assert await engine.pause() == 2
        with pytest.raises(QuartetError) as caught:
            await engine.score(request)
        assert caught.value.reason == "OVERLOADED"
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        third = asyncio.create_task(engine.score(request))
        await asyncio.sleep(0)
        assert await engine.resume() == 2
        assert isinstance(await second, Scored) and (await third) == (await second)
        with pytest.raises(QuartetError) as caught:
            await engine.score(ScoreRequest((1, 2), ((1, 1),), run_id="other"))
        assert caught.value.reason == "RUN_NOT_SERVED"
        await engine.pause()
        last = asyncio.create_task(engine.score(request))
        await asyncio.sleep(0)
        assert await engine.pause() == 1
    with pytest.raises(QuartetError) as caught:
        await last
    assert caught.value.reason == "NOT_READY"


@pytest.mark.parametrize("piece", [16, 256])
async def test_the_likeliest_tokens_of_each_position_come_with_it(
    make_model: Make, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """In pieces, in a shared pass, and after a swap in the middle: those of one version."""
    monkeypatch.setattr(score, "PIECE_TOKENS", piece)
    asked = [ScoreRequest(tuple(range(length)), ((1, length - 1),), top=3) for length in (2, 9, 70, 250)]
    asked.append(ScoreRequest(tuple(range(40)), ((1, 2), (30, 5)), top=3))
    async with running(make_model(0)) as engine:
        staged = await engine.stage(weights_of(make_model(1)))
        scoring = [asyncio.create_task(engine.score(request)) for request in asked]
        await asyncio.sleep(0)
        await engine.swap(staged, ServedWeights("", 1, b"1"))
        scored = [await task for task in scoring]
        assert (await engine.score(replace(asked[0], top=0))).tops == []
    for request, have in zip(asked, scored, strict=True):
        covered = [at for start, length in request.covered for at in range(start, start + length)]
        rows = best(make_model(have.version), request.tokens, 3)
        assert len(have.tops) == len(have.logprobs) == len(covered)
        for at, top in zip(covered, have.tops, strict=True):
            assert top == pytest.approx(rows[at - 1], abs=TOLERANCE["embedded"], rel=0)


async def test_what_goes_ahead_waits_for_no_full_queue(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """score.py 4: between two pieces of what was begun, which then goes on."""
    monkeypatch.setattr(score, "PIECE_TOKENS", 16)
    long = ScoreRequest(tuple(range(250)), ((1, 249),))
    _, go_on = held_up(monkeypatch)
    async with running(make_model(0), max_waiting=2) as engine:
        ended: list[str] = []

        async def scored(name: str, request: ScoreRequest) -> Scored:
            answer = await engine.score(request)
            ended.append(name)
            return answer

        waiting = [asyncio.create_task(scored("long", long)) for _ in range(2)]
        await asyncio.sleep(0)
        too_many = asyncio.create_task(engine.score(replace(long, ahead=False)))
        short = ScoreRequest((7, 8, 9), ((1, 2),), ahead=True)
        waiting.append(asyncio.create_task(scored("ahead", short)))
        await asyncio.sleep(0)
        go_on.set()  # all have given their commands, while the first is in the middle
        with pytest.raises(QuartetError, match="wait already"):
            await too_many
        *others, first = await asyncio.gather(*waiting)
        assert ended == ["ahead", "long", "long"]
        assert near(first.logprobs, expected(make_model(0), short))
        assert all(near(one.logprobs, expected(make_model(0), long)) for one in others)


async def test_broken_weights_are_an_error_not_a_score(make_model: Make) -> None:
    model = make_model(0)
    model.model.norm.weight.data.fill_(float("nan"))
    async with running(model) as engine:
        with pytest.raises(QuartetError) as caught:
            await engine.score(ScoreRequest((1, 2), ((1, 1),)))
        assert caught.value.reason == "INTERNAL"


async def test_a_score_for_which_a_device_has_no_room_is_overloaded(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """device.py 2: an INTERNAL one would tell the canary that the weights are wrong."""

    def full(**_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 594.00 MiB. GPU 0 has ...")

    request = ScoreRequest((1, 2, 3), ((1, 2),))
    async with running(make_model(0)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine._decoder._scorer, "_network", full)
            with pytest.raises(QuartetError, match="memory of the device does not reach") as caught:
                await engine.score(request)
        assert caught.value.reason == "OVERLOADED"
        assert near((await engine.score(request)).logprobs, expected(make_model(0), request))
