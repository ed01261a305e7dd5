"""The embedded engine's batch: who joins, who leaves, what is kept and told of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from quartet.errors import QuartetError
from quartet_inference.embedded import batch, decoder, score, swaps
from quartet_inference.embedded.batch import JOIN_SLACK, Batch
from quartet_inference.embedded.engine import EmbeddedEngine
from quartet_inference.embedded.kv_cache import FIRST_LENGTH, KvCache, KvShape
from quartet_inference.embedded.limits import Limits
from quartet_inference.embedded.lora import Bank
from quartet_inference.embedded.prefix_cache import PrefixCache
from quartet_inference.embedded.sequence import RunningSequence
from quartet_inference.engine import Delta, Request, Sampling, ScoreRequest, ServedWeights

from .adapters import random_adapter
from .engine_calls import END, caught_midway, complete, complete_one, load, running, text_of, until, update
from .told import TOLERANCE

Make = Callable[..., Any]
SHAPE = KvShape(layers=1, kv_heads=1, head_dim=2, dtype=torch.float32, device=torch.device("cpu"))


def of(length: int) -> RunningSequence:
    """A sequence of so many tokens."""
    request = Request(tuple(range(length)), Sampling(9))
    return RunningSequence(request, 0, 0, frozenset(), None, None, None, torch.device("cpu"))


def empty(budget_tokens: int, max_rows: int = 8, max_length: int = 200) -> Batch:
    """One that nobody asks to compute anything."""
    cache = KvCache(SHAPE, max_rows, max_length, SHAPE.bytes_per_token * budget_tokens)
    return Batch(cast(Any, None), cache, PrefixCache(0), Bank(0, 0))


def test_nobody_joins_who_would_soon_have_to_leave() -> None:
    """Room for JOIN_SLACK steps, or for as many as a sequence may have, and for the longest of all rows."""
    each = 100 + JOIN_SLACK
    budgets = (2 * each, 3 * each - 1, 3 * each)
    assert [empty(budget).room_for([of(100)] * 3) for budget in budgets] == [2, 2, 3]
    assert empty(400).room_for([of(190)] * 3) == 2, "they end at 200"
    assert empty(399).room_for([of(190)] * 3) == 1
    assert empty(400).room_for([of(150), of(1), of(1)]) == 2, "each takes as much as the longest"
    beside = empty(400)
    beside.rows = [of(150)]
    assert beside.room_for([of(1), of(1)]) == 1
    assert empty(4000, max_rows=3).room_for([of(1)] * 5) == 3


def test_who_joins_is_computed_in_one_pass_or_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who run wait for one pass, however many come; a prompt that is longer than one comes in, too."""
    monkeypatch.setattr(batch, "PREFILL_TOKENS", 100)
    free = empty(4000)
    for lengths, joining in (((50, 50, 1), 2), ((60, 60), 1), ((150, 1), 1)):
        assert free.room_for([of(length) for length in lengths]) == joining


async def test_who_joined_last_leaves_first_and_comes_back_when_there_is_room(make_model: Make) -> None:
    """batch.py 3"""
    ended = []

    async def runs(name: str) -> None:
        await complete(engine, [1, 2, 3], max_tokens=150, ignore_eos=True, seed=len(name))
        ended.append(name)

    per_token = 2 * 2 * 2 * 16 * 4
    async with running(make_model(0), max_model_len=200, kv_cache_bytes=per_token * 420) as engine:
        await engine.pause()
        calls = [asyncio.create_task(runs("a" * count)) for count in (1, 2, 3)]
        await until(lambda: engine.info().waiting == 3)
        await engine.resume()
        await asyncio.gather(*calls)
    assert ended[-1] == "aaa"


@pytest.mark.parametrize("run_id", ["", "a"])
async def test_who_leaves_for_an_update_comes_back_in_the_same_order(
    make_model: Make, monkeypatch: pytest.MonkeyPatch, run_id: str
) -> None:
    """requests.py 2: of the base model or of an adapter, who has waited longest is not overtaken."""
    ended = []

    async def runs(number: int) -> None:
        await complete_one(engine, [1, 2], run_id=run_id, max_tokens=60, seed=number)
        ended.append(number)

    base = make_model(0)
    async with running(base) as engine:
        if run_id:
            await load(engine, run_id, 0, random_adapter(base, 0))
        calls = await caught_midway(
            engine, lambda: [asyncio.create_task(runs(one)) for one in range(4)], completions=4, tokens=8
        )
        ended.clear()
        monkeypatch.setattr(batch, "PREFILL_TOKENS", 1)  # in each step one of them joins
        if run_id:
            await load(engine, run_id, 1, random_adapter(base, 1))
        else:
            await update(engine, make_model(1), ServedWeights("run", 1, b"1"))
        assert engine.info().waiting == 4
        await engine.resume()
        await asyncio.gather(*calls)
    assert ended == [0, 1, 2, 3]


async def test_prompts_that_fill_the_cache_as_far_as_it_has_grown(make_model: Make) -> None:
    """kv_cache.py 3: alone, beside a shorter one, and as long as a sequence may be."""
    async with running(make_model(0), prefix_cache_bytes=0) as engine:
        told = []
        for length in (FIRST_LENGTH, 2 * FIRST_LENGTH, 255):
            long, short = list(range(length)), list(range(length - 1))
            for beside in ([long], [long, short]):
                told += await asyncio.gather(*(complete_one(engine, one, max_tokens=1) for one in beside))
    assert len(told) == 9
    assert max(one.difference({0: make_model(0)}) for one in told) <= TOLERANCE["embedded"]


async def test_of_a_prompt_that_gave_no_numbers_nothing_is_kept(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a device has failed for a moment: whoever asks again is answered."""
    async with running(make_model(0)) as engine:
        forward = engine._decoder._batch._forward
        monkeypatch.setattr(engine._decoder._batch, "_forward", lambda *given: forward(*given) * torch.nan)
        with pytest.raises(QuartetError, match="non-finite"):
            await complete(engine, list(range(40)))
        monkeypatch.undo()
        again = await complete_one(engine, list(range(40)))
    assert again.cached == 0 and again.difference({0: make_model(0)}) <= TOLERANCE["embedded"]


async def test_what_is_sampled_is_kept_for_a_later_turn_where_that_is_expected_and_nowhere_else(
    make_model: Make,
) -> None:
    """Request.keep_prefix: beyond the prompt, which is always kept; after an update as before."""
    prompt = list(range(50))
    async with running(make_model(0)) as engine:
        for seed, keep, cached in ((1, False, 50), (2, True, 50 + 24 - 1), (3, True, 50 + 24 - 1)):
            told = await complete_one(engine, prompt, keep_prefix=keep, seed=seed)
            assert (await complete_one(engine, [*prompt, *told.tokens, 1, 2])).cached == cached
            await update(engine, make_model(seed), ServedWeights("run", seed, bytes([seed])))


async def test_what_was_cached_is_what_was_when_it_first_joined(make_model: Make) -> None:
    """Of rows whose keys an update takes: a whole group, whose members are one prompt again."""
    prompt = list(range(50))
    async with running(make_model(0)) as engine:
        await complete(engine, prompt)
        wanted = {"n": 3, "max_tokens": 60, "temperature": 0.0, "ignore_eos": True}
        [task] = await caught_midway(
            engine, lambda: [asyncio.create_task(complete(engine, prompt, **wanted))], completions=3, tokens=9
        )
        await update(engine, make_model(1), ServedWeights("run", 1, b""))
        await engine.resume()
        told = await task
    assert all(set(one.versions) == {0, 1} for one in told)
    assert [one.cached for one in told] == [50, 50, 50]


async def test_tokens_are_told_in_pieces(make_model: Make) -> None:
    """completion.py 2"""
    async with running(make_model(0)) as engine:
        told = engine.generate(Request((1, 2), Sampling(100, ignore_eos=True)))
        assert [len(one.token_ids) async for one in told if isinstance(one, Delta)] == [32, 32, 32, 4]


async def test_every_step_is_progress(make_model: Make) -> None:
    """What the liveness check goes by (stall_seconds)."""
    steps: list[int] = []
    engine = EmbeddedEngine(make_model(0), Limits(256), END, text_of, None, lambda: steps.append(1))
    await engine.swap(None, ServedWeights("", 0, engine.base_digest()))
    assert not steps
    await complete_one(engine, [1, 2], max_tokens=20)
    await engine.close()
    assert len(steps) >= 19, "the first of them gives two tokens"


async def test_a_pause_is_told_in_milliseconds(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """EngineInfo.last_update_pause_ms: of updates alone, another name is none."""
    clock = iter(())
    monkeypatch.setattr(swaps, "time", SimpleNamespace(perf_counter=lambda: next(clock, 1.0)))
    async with running(make_model(0)) as engine:
        assert (engine.info().updates_applied, engine.info().last_update_pause_ms) == (0, 0.0)
        clock = iter((10.0, 10.25))
        await update(engine, make_model(1), ServedWeights("run", 1, b"1"))
        await engine.swap(None, ServedWeights("run", 2, b"1"))
        assert (engine.info().updates_applied, engine.info().last_update_pause_ms) == (1, 250.0)


async def test_a_fault_in_a_later_step_fails_what_runs_and_what_waits_goes_on(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """decoder.py 5"""
    step, fails = Batch.step, [False]

    def breaks_once(self: Batch) -> Any:
        if fails.pop():
            fails.append(False)
            raise RuntimeError("of the test")
        fails.append(False)
        return step(self)

    monkeypatch.setattr(Batch, "step", breaks_once)
    async with running(make_model(0), max_num_seqs=2) as engine:
        wanted = {"n": 2, "max_tokens": 200, "ignore_eos": True}
        [task] = await caught_midway(
            engine, lambda: [asyncio.create_task(complete(engine, [1], **wanted))], completions=2, tokens=2
        )
        waiting = asyncio.create_task(complete_one(engine, [2]))
        await until(lambda: engine.info().waiting == 1)
        fails[:] = [True]
        await engine.resume()
        async with asyncio.timeout(60):
            with pytest.raises(QuartetError, match="decode step failed") as failure:
                await task
            assert failure.value.reason == "INTERNAL"
            assert len((await waiting).tokens) == 24


@pytest.mark.parametrize("at", ["step", "join"])
async def test_promise_5_of_the_decoder_an_engine_whose_device_is_lost_has_ended(
    make_model: Make, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """INTERNAL would be raised at once by whoever asks several replicas; NOT_READY is asked of another."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    async with running(make_model(0), max_num_seqs=2) as engine:
        await complete_one(engine, [1])
        monkeypatch.setattr(Batch, at, broken)
        monkeypatch.setattr(decoder, "is_lost", lambda device: True)
        asked = [asyncio.create_task(complete_one(engine, [one])) for one in (1, 2, 3)]
        async with asyncio.timeout(60):
            for failure in await asyncio.gather(*asked, return_exceptions=True):
                assert isinstance(failure, QuartetError) and failure.reason == "NOT_READY"
        assert engine.info().closed and "illegal memory access" in engine.info().ended


async def test_promise_5_of_the_decoder_so_has_one_whose_device_is_lost_in_a_score(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score, "is_lost", lambda device: True)
    async with running(make_model(0)) as engine:
        monkeypatch.setattr(score.Scorer, "_short", lambda *_: 1 / 0)
        async with asyncio.timeout(60):
            with pytest.raises(QuartetError, match="NOT_READY"):
                await engine.score(ScoreRequest((1, 2, 3), ((1, 2),)))
        assert engine.info().closed and engine.info().ended
