"""The embedded engine against a plain forward pass of transformers (float32: at most 2e-5 apart)."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from quartet.errors import QuartetError
from quartet_inference.embedded import prefill
from quartet_inference.embedded.batch import Batch, Drawn
from quartet_inference.embedded.commands import Commands
from quartet_inference.embedded.decoder import Decoder
from quartet_inference.embedded.engine import EmbeddedEngine
from quartet_inference.engine import Reason, Request, Sampling, ScoreRequest

from .engine_calls import END, caught_midway, complete, running, text_of, until
from .told import TOLERANCE, random_prompt

Make = Callable[..., Any]


async def test_group_and_later_calls_share_a_prompt(make_model: Make) -> None:
    model = make_model(0)
    prompt = list(range(50))
    async with running(make_model(0)) as engine:
        group = await complete(engine, prompt, n=8, keep_prefix=True, ignore_eos=True)
        assert sorted(r.finish.cached_tokens for r in group if r.finish) == [0] + [50] * 7
        later = (await complete(engine, prompt))[0]
        assert later.finish is not None and later.finish.cached_tokens == 50
        turn = (await complete(engine, prompt + group[3].tokens + [1, 2, 3]))[0]
        assert turn.finish is not None and turn.finish.cached_tokens >= 50 + len(group[3].tokens) - 1
        assert max(r.difference({0: model}) for r in [*group, later, turn]) <= TOLERANCE["embedded"]
        assert len({tuple(r.tokens) for r in group}) > 1


async def test_seeded_tokens_do_not_depend_on_the_batch(make_model: Make) -> None:
    async with running(make_model(0)) as engine:
        alone = await complete(engine, [1, 2, 3], n=2, seed=5, temperature=0.9)
        assert alone[0].tokens != alone[1].tokens
        rng = random.Random(1)
        noise = [complete(engine, random_prompt(rng, 40), max_tokens=50) for _ in range(12)]
        _, crowded = await asyncio.gather(
            asyncio.gather(*noise), complete(engine, [1, 2, 3], n=2, seed=5, temperature=0.9)
        )
        assert [r.tokens for r in crowded] == [r.tokens for r in alone]
        unseeded = [(await complete(engine, [1, 2, 3]))[0].tokens for _ in range(3)]
        assert len({tuple(tokens) for tokens in unseeded}) > 1


async def test_greedy_is_argmax_with_logprobs_at_temperature_one(make_model: Make) -> None:
    model = make_model(0)
    async with running(make_model(0)) as engine:
        result = (await complete(engine, [5, 6, 7], temperature=0.0, ignore_eos=True, max_tokens=20))[0]
    ids = torch.tensor([result.prompt + result.tokens])
    with torch.no_grad():
        assert model(ids).logits[0, 2:-1].argmax(-1).tolist() == result.tokens
    assert result.difference({0: model}) <= TOLERANCE["embedded"]


async def test_small_kv_budget_hands_rows_back_without_losing_tokens(make_model: Make) -> None:
    model = make_model(0)
    per_token = 2 * 2 * 2 * 16 * 4
    async with running(make_model(0), max_model_len=200, kv_cache_bytes=per_token * 420) as engine:
        prompts = [[i, i + 1, i + 2] for i in range(12)]
        runs = [complete(engine, p, max_tokens=150, ignore_eos=True) for p in prompts]
        results = [r[0] for r in await asyncio.gather(*runs)]
    assert all(len(r.tokens) == 150 for r in results)
    assert max(r.difference({0: model}) for r in results) <= TOLERANCE["embedded"]


async def test_long_prompts_are_computed_in_pieces(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 16)
    rng = random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (100, 3, 60, 17, 16)]
    async with running(make_model(0)) as engine:
        results = await asyncio.gather(*[complete(engine, p, max_tokens=8) for p in prompts])
    assert max(r[0].difference({0: make_model(0)}) for r in results) <= TOLERANCE["embedded"]


async def test_closing_the_iterator_frees_the_slots(make_model: Make) -> None:
    async with running(make_model(0)) as engine:
        for _ in range(10):  # it ends before the pause where this process is held up
            stream = engine.generate(Request((1, 2), Sampling(240, ignore_eos=True), n=3))
            await anext(stream)
            await engine.pause()
            if engine.info().running == 3:
                break
            await stream.aclose()
            await engine.resume()
        assert engine.info().running == 3
        await stream.aclose()
        await engine.pause()  # a command behind the one that drops the request
        assert engine.info().running == 0
        await engine.resume()
        wanted = {"max_tokens": 240, "ignore_eos": True}
        [task] = await caught_midway(
            engine, lambda: [asyncio.create_task(complete(engine, [1], **wanted))], completions=1, tokens=1
        )
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.resume()
        assert (await complete(engine, [9]))[0].finish is not None
        assert engine.info().running == 0


async def test_what_waits_leaves_in_a_time_that_does_not_grow_with_the_queue(make_model: Make) -> None:
    """requests.py 1: a client that goes takes all of them along; nobody else's step may wait for a search."""
    async with running(make_model(0), max_waiting=20_000) as engine:
        await engine.pause()
        tasks = [asyncio.create_task(complete(engine, [1, 2], n=8)) for _ in range(2000)]
        await until(lambda: engine.info().waiting == 16_000)
        for task in reversed(tasks):  # the last that came is found last
            task.cancel()
        began, others = time.process_time(), time.thread_time()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.pause()  # a command behind those that drop the requests
        took = (time.process_time() - began) - (time.thread_time() - others)
        assert engine.info().waiting == 0
        # Measured: 0.03 s, and 2.7 s where each one is searched for.
        assert took < 0.7
        await engine.resume()
        assert (await complete(engine, [9]))[0].finish is not None


async def test_full_queue_is_overloaded_and_pause_holds_requests(make_model: Make) -> None:
    """Invariant 8."""
    async with running(make_model(0), max_waiting=4) as engine:
        await engine.pause()
        waiting = asyncio.create_task(complete(engine, [1], n=4))
        await until(lambda: engine.info().waiting == 4)
        with pytest.raises(QuartetError) as refusal:
            await complete(engine, [1])
        assert refusal.value.reason == "OVERLOADED"
        with pytest.raises(QuartetError, match="n = 5 is refused; at most 4 completions") as refusal:
            await complete(engine, [1], n=5)
        assert refusal.value.reason == "INVALID_REQUEST", "to ask again is of no use"
        assert engine.info().tokens_sampled == 0 and engine.info().paused
        assert await engine.pause() == 4
        await engine.resume()
        assert len(await waiting) == 4
        assert len(await complete(engine, [1], n=4)) == 4


async def test_what_is_refused_has_ended_before_or_leaves_keeps_no_place(make_model: Make) -> None:
    """commands.py 2"""
    async with running(make_model(0), max_waiting=2) as engine:
        for _ in range(3):
            with pytest.raises(QuartetError) as refusal:
                await complete(engine, [1], n=2, exact_version=7)
            assert refusal.value.reason != "OVERLOADED"
            (ended,) = await complete(engine, [1, 5, 5], resumed=2, max_tokens=2)
            assert ended.tokens == [] and ended.finish is not None
            await engine.pause()
            gone = asyncio.create_task(complete(engine, [1], n=2))
            await until(lambda: engine.info().waiting == 2)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            await engine.resume()  # a command behind the one that drops the request
        assert all(one.finish for one in await complete(engine, [1], n=2))


async def test_what_ends_a_completion(make_model: Make) -> None:
    async with running(make_model(0)) as engine:
        plain = (await complete(engine, [3, 4], seed=1, ignore_eos=True))[0]
        token = plain.tokens[6]
        first = plain.tokens.index(token)
        stopped = (
            await complete(engine, [3, 4], seed=1, ignore_eos=True, stop_token_ids=frozenset({token}))
        )[0]
        assert stopped.tokens == plain.tokens[: first + 1]
        assert stopped.finish is not None
        assert (stopped.finish.reason, stopped.finish.stop_token) == (Reason.STOP, token)
        text = text_of(plain.tokens)
        stop = text[5:8]
        by_text = (await complete(engine, [3, 4], seed=1, ignore_eos=True, stop=("?", stop)))[0]
        assert text_of(by_text.tokens) == text[: text.find(stop) + 3]
        assert by_text.finish is not None and by_text.finish.stop_string == stop
        assert plain.finish is not None and plain.finish.reason is Reason.LENGTH and len(plain.tokens) == 24


async def test_closing_the_engine_fails_what_runs(make_model: Make) -> None:
    async with running(make_model(0)) as engine:
        wanted = {"max_tokens": 250, "ignore_eos": True}
        [task] = await caught_midway(
            engine, lambda: [asyncio.create_task(complete(engine, [1], **wanted))], completions=1, tokens=1
        )
        resuming = asyncio.create_task(engine.resume())
        await asyncio.sleep(0)  # it gives its command; that to end comes right behind
    await resuming
    with pytest.raises(QuartetError) as failure:
        await task
    assert failure.value.reason == "NOT_READY" and engine.info().closed
    with pytest.raises(QuartetError):
        await complete(engine, [1])
    with pytest.raises(QuartetError):
        await engine.pause()


async def test_a_fault_in_a_step_fails_its_requests_and_no_others(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(make_model(0)) as engine:
        monkeypatch.setattr(engine._decoder._batch, "_forward", None)
        with pytest.raises(QuartetError) as failure:
            await complete(engine, [1, 2], n=2)
        assert failure.value.reason == "INTERNAL"
        monkeypatch.undo()
        results = await complete(engine, [1, 2], n=2)
    assert max(r.difference({0: make_model(0)}) for r in results) <= TOLERANCE["embedded"]


async def test_a_step_for_which_a_device_has_no_room_is_overloaded(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """decoder.py 5: whoever asked may ask again, here or elsewhere."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 594.00 MiB. GPU 0 has ...")

    async with running(make_model(0)) as engine:
        monkeypatch.setattr(engine._decoder._batch, "_forward", full)
        with pytest.raises(QuartetError, match="memory of the device does not reach") as failure:
            await complete(engine, [1, 2], n=2)
        assert failure.value.reason == "OVERLOADED"
        monkeypatch.undo()
        await complete(engine, [1, 2], n=2)


async def test_a_fault_before_anything_joins_fails_who_waits(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(make_model(0)) as engine:
        monkeypatch.setattr(engine._decoder._batch, "room_for", None)
        async with asyncio.timeout(10):
            with pytest.raises(QuartetError) as failure:
                await complete(engine, [1, 2], n=2)
        assert failure.value.reason == "INTERNAL"
        monkeypatch.undo()
        await complete(engine, [1, 2], n=2)


async def test_a_completion_that_ends_beside_a_broken_one_of_its_request_takes_nobody_along(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """decoder.py 5"""
    step = Batch.step

    def breaks_one_and_ends_the_other(self: Batch) -> list[Drawn]:
        first = {0: {"logprob": math.nan}, 1: {"token": min(END)}}
        return [one._replace(**first[one.row.index]) if one.row.request.n == 2 else one for one in step(self)]

    monkeypatch.setattr(Batch, "step", breaks_one_and_ends_the_other)
    async with running(make_model(0)) as engine:
        await engine.pause()
        # Greedy, so that neither ends before the others begin: the first token is no end.
        broken = asyncio.create_task(complete(engine, [1], n=2, temperature=0.0))
        other = asyncio.create_task(complete(engine, [2], ignore_eos=True))
        await until(lambda: engine.info().waiting == 3)
        await engine.resume()
        with pytest.raises(QuartetError, match="non-finite logits"):
            await broken
        assert (await other)[0].finish is not None


async def test_who_leaves_with_its_event_loop_takes_nobody_along(make_model: Make) -> None:
    """decoder.py 5: its answer comes when there is nobody to tell."""
    free = threading.Event()

    async def asks_and_leaves(engine: EmbeddedEngine) -> None:
        asking = asyncio.ensure_future(engine.resume())
        await asyncio.sleep(0)
        assert not asking.done()

    async def generates_and_leaves(engine: EmbeddedEngine) -> None:
        asking = asyncio.ensure_future(
            complete(engine, [1], exact_version=7)
        )  # it is told that it is refused
        await asyncio.sleep(0)
        assert not asking.done()

    async with running(make_model(0)) as engine:
        engine._commands.post(lambda: free.wait() and None)
        for leaves in (asks_and_leaves, generates_and_leaves):
            await asyncio.to_thread(asyncio.run, leaves(engine))
        free.set()
        assert (await complete(engine, [1, 2, 3]))[0].finish is not None


def test_commands_run_in_the_order_in_which_they_were_given() -> None:
    """commands.py 1 and 3: those that nobody has run behind one that failed, too."""
    commands, ran = Commands(max_waiting=2), list[int]()
    for number in range(5):
        commands.post(lambda number=number: ran.append(number // (number != 2)))  # type: ignore[misc]
    with pytest.raises(ZeroDivisionError):
        commands.run(idle=False)
    commands.post(lambda: ran.append(5))
    assert ran == [0, 1]
    for command in commands.close():
        command()
    assert ran == [0, 1, 3, 4, 5] and not commands.run(idle=True)


async def test_who_waits_for_an_answer_no_more_is_not_told_it(make_model: Make) -> None:
    """Nor is the log, of a future that had ended."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
    free = threading.Event()
    async with running(make_model(0)) as engine:
        engine._commands.post(lambda: free.wait() and None)
        asking = asyncio.ensure_future(engine.resume())
        await asyncio.sleep(0)  # it gives its command
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        free.set()
        await engine.pause()  # a command behind it
    assert not complaints


async def test_whoever_asked_while_the_thread_dies_has_an_answer(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """commands.py 3"""
    dying, free = threading.Event(), threading.Event()

    def dies(_: Decoder) -> None:
        dying.set()
        free.wait()
        raise MemoryError("of the test")

    monkeypatch.setattr(Decoder, "_cycle", dies)
    async with running(make_model(0)) as engine:
        asked = [asyncio.create_task(complete(engine, [1]))]
        await asyncio.to_thread(dying.wait)
        resuming = asyncio.create_task(engine.resume())
        asked.append(asyncio.create_task(complete(engine, [1])))
        await asyncio.sleep(0)
        free.set()
        async with asyncio.timeout(60):
            await resuming
            for one in asked:
                with pytest.raises(QuartetError) as failure:
                    await one
                assert failure.value.reason == "NOT_READY"


async def test_whoever_asked_behind_a_command_that_fails_has_an_answer(make_model: Make) -> None:
    """commands.py 3: the thread, which ends by it, has taken them together."""
    held, free = threading.Event(), threading.Event()

    def holds() -> None:
        held.set()
        free.wait()

    def fails() -> None:
        raise MemoryError("of the test")

    async with running(make_model(0)) as engine:
        wanted = {"max_tokens": 250, "ignore_eos": True}
        asked: list[asyncio.Task[Any]] = await caught_midway(
            engine, lambda: [asyncio.create_task(complete(engine, [1], **wanted))], completions=1, tokens=1
        )
        engine._commands.post(holds)
        await asyncio.to_thread(held.wait)
        engine._commands.post(fails)
        resuming = asyncio.create_task(engine.resume())
        await asyncio.sleep(0)  # it gives its command
        engine._commands.post(fails)
        asked.append(asyncio.create_task(complete(engine, [1])))
        asked.append(asyncio.create_task(engine.score(ScoreRequest((1, 2), ((1, 1),)))))
        await asyncio.sleep(0)
        free.set()
        async with asyncio.timeout(60):
            await resuming
            for one in asked:
                with pytest.raises(QuartetError) as failure:
                    await one
                assert failure.value.reason == "NOT_READY"
        assert "of the test" in engine.info().ended
        with pytest.raises(QuartetError, match="stopping"):
            await complete(engine, [1])


async def test_a_request_that_cannot_begin_fails_alone_and_keeps_no_place(make_model: Make) -> None:
    """decoder.py 5"""
    async with running(make_model(0), max_waiting=2) as engine:
        for _ in range(2):
            with pytest.raises(QuartetError) as failure:
                await complete(engine, [1], n=2, grammar="of which nothing is compiled")
            assert failure.value.reason == "INTERNAL"
        assert all(one.finish for one in await complete(engine, [1], n=2))
