"""The vLLM engine where it is not like the other: keys that are kept over an update, faults of its own.

The engine has an untied head. Another computes in bfloat16.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
import torch
from quartet.errors import QuartetError
from quartet.weights.tensor import Tensor
from quartet_inference.completion import Completion
from quartet_inference.engine import Request, Sampling, ScoreRequest, ServedWeights, Stamp

from .engine_calls import caught_midway, complete, running, until, update
from .random_models import weights_of
from .told import TOLERANCE, Told, behind_kept_keys, best, chosen, on_bfloat16_grid, scores, tops_difference
from .vllm_driver import PROMPT, Driver, Make, launch, tear

pytest.importorskip("vllm", reason="vLLM is not installed in this interpreter (make install-vllm)")
pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZES: dict[str, Any] = {"head_dim": 32, "tie_word_embeddings": False}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def keeping(make_model: Make, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Driver]:
    """An engine that keeps the keys of running requests over an update."""
    folder = tmp_path_factory.mktemp("untied")

    def make(seed: int) -> Any:
        return make_model(seed, **SIZES)

    driver = await asyncio.to_thread(launch, folder, make, kv_on_update="keep")
    yield driver
    await driver.engine.close()


async def test_kept_keys_survive_an_update_but_never_serve_a_new_request(keeping: Driver) -> None:
    """Invariant 3; traps 2 and 10 of the CPU build: packed weights, prefixes that outlive their weights."""
    before = max(keeping.models)
    [call] = await caught_midway(
        keeping.engine,
        lambda: [asyncio.create_task(keeping.ask(PROMPT, max_tokens=120))],
        completions=1,
        tokens=5,
    )
    version = await keeping.update(1)
    await keeping.engine.resume()
    mixed = await call
    assert set(mixed.versions) == {before, version} and len(mixed.tokens) == 120
    cut = Told(PROMPT)
    count = mixed.versions.count(before)
    cut.tokens, cut.logprobs = mixed.tokens[:count], mixed.logprobs[:count]
    cut.versions = mixed.versions[:count]
    assert keeping.difference(cut) <= TOLERANCE["vllm"]
    assert keeping.difference(mixed) > 1e-3, "kept keys should differ from recomputed ones"
    plain = chosen(behind_kept_keys(keeping.models, mixed), mixed.tokens)
    assert (plain - torch.tensor(mixed.logprobs)).abs().max() <= TOLERANCE["vllm"]
    fresh = await keeping.ask(PROMPT + mixed.tokens[:20])
    assert fresh.cached == 0 and keeping.difference(fresh) <= TOLERANCE["vllm"]
    again = await keeping.ask(PROMPT + mixed.tokens[:20])
    assert again.cached >= 96 and keeping.difference(again) <= TOLERANCE["vllm"]


async def test_requests_that_wait_over_an_update_begin_with_the_new_weights(keeping: Driver) -> None:
    """They would find the prefixes of the weights under which they were submitted."""
    await keeping.ask(PROMPT)
    await keeping.engine.pause()
    call = asyncio.create_task(keeping.ask(PROMPT))
    llm = keeping.engine._running.llm
    await until(lambda: llm.output_processor.get_num_unfinished_requests() == 1)
    version = await keeping.update(2)
    assert keeping.engine.info().paused and not call.done()
    assert await keeping.engine.resume() == 1
    told = await call
    assert told.cached == 0 and set(told.versions) == {version}
    assert keeping.difference(told) <= TOLERANCE["vllm"]


async def test_update_after_update_is_exact(keeping: Driver) -> None:
    for seed in range(3, 8):
        await keeping.update(seed)
        told = await keeping.ask([seed, 1, 2], temperature=0.0)
        assert keeping.difference(told) <= TOLERANCE["vllm"]
        info = keeping.engine.info()
        assert info.served.version == max(keeping.models) and info.last_update_pause_ms > 0


async def test_only_whole_versions_are_staged(keeping: Driver) -> None:
    """Traps 4, 5 and 6: vLLM takes part of a fused layer, leaves out a layer, and ends at a wrong shape."""
    whole = weights_of(keeping.make(9))
    layer = "model.layers.1."
    name = layer + "self_attn.q_proj.weight"
    for bad in (
        {k: v for k, v in whole.items() if k != name},
        {k: v for k, v in whole.items() if k != layer + "mlp.gate_proj.weight"},
        {k: v for k, v in whole.items() if not k.startswith(layer)},
        {k: v for k, v in whole.items() if k != "lm_head.weight"},
        {**whole, "model.layers.2.mlp.up_proj.weight": whole[name]},
        {**whole, name: Tensor("F32", (1, *whole[name].shape), whole[name].data)},
        {**whole, name: Tensor("I32", whole[name].shape, whole[name].data)},
    ):
        with pytest.raises(QuartetError) as refused:
            await keeping.engine.stage(bad)
        assert refused.value.reason == "INVALID_REQUEST"
    assert keeping.difference(await keeping.ask([1, 2])) <= TOLERANCE["vllm"]


async def test_a_torn_file_leaves_the_old_weights_serving(keeping: Driver) -> None:
    served = keeping.engine.info().served
    staged = await keeping.engine.stage(weights_of(keeping.make(10)))
    await keeping.engine.stage(weights_of(keeping.make(11)))  # the first is in no worker any more
    tear(staged.path, 100)
    sampled = keeping.engine.info().tokens_sampled
    call = asyncio.create_task(keeping.ask([1, 2], max_tokens=100))
    await until(lambda: keeping.engine.info().tokens_sampled > sampled)
    with pytest.raises(QuartetError, match="could not be loaded"):
        await keeping.engine.swap(staged, ServedWeights("r", 99, b""))
    assert keeping.engine.info().served == served
    told = await call
    assert set(told.versions) == {served.version} and keeping.difference(told) <= TOLERANCE["vllm"]
    path = staged.path
    del staged
    assert not path.exists(), "a staged file ends with the object that stands for it"


async def test_a_load_takes_what_was_fetched_before_it(keeping: Driver) -> None:
    """fetched.py 1: the file is not read in the pause."""
    version = max(keeping.models) + 1
    keeping.models[version] = keeping.make(12)
    staged = await keeping.engine.stage(weights_of(keeping.models[version]))
    tear(staged.path, staged.nbytes - 100)
    await keeping.engine.swap(staged, ServedWeights("r", version, b""))
    told = await keeping.ask(PROMPT)
    assert set(told.versions) == {version} and keeping.difference(told) <= TOLERANCE["vllm"]


async def test_a_swap_is_whole_although_its_caller_is_gone(keeping: Driver) -> None:
    version = max(keeping.models) + 1
    keeping.models[version] = keeping.make(11)
    staged = await keeping.engine.stage(weights_of(keeping.models[version]))
    caller = asyncio.create_task(keeping.engine.swap(staged, ServedWeights("r", version, b"")))
    await asyncio.sleep(0)
    await asyncio.sleep(0.005)
    caller.cancel()
    await until(lambda: keeping.engine.info().served.version == version)
    told = await keeping.ask([5])
    assert set(told.versions) == {version} and keeping.difference(told) <= TOLERANCE["vllm"]


async def test_a_pause_and_a_resume_are_whole_although_their_callers_are_gone(
    keeping: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """running.py 3: it says that it is paused where it is, and an update resumes what is not."""
    engine = keeping.engine
    core = engine._running.llm.engine_core

    async def abandon(change: Callable[[], Any], name: str) -> None:
        original, asked = getattr(core, name), asyncio.Event()

        async def ask(**options: Any) -> None:
            asked.set()
            await original(**options)

        monkeypatch.setattr(core, name, ask)
        caller = asyncio.create_task(change())
        await asked.wait()
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)

    async with asyncio.timeout(60):
        await abandon(engine.pause, "pause_scheduler_async")
        await until(lambda: engine.info().paused)
        await abandon(engine.resume, "resume_scheduler_async")
        await until(lambda: not engine.info().paused)
        version = await keeping.update(4)
        told = await keeping.ask([1, 2])
    assert set(told.versions) == {version}


async def test_a_completion_that_vllm_ends_is_to_be_sent_again(keeping: Driver) -> None:
    """As a core does whose neighbour is killed, or that ends: no fault of the request, and another replica
    goes on with it."""
    stream = keeping.engine.generate(Request((1, 2), Sampling(200, ignore_eos=True)))
    assert await anext(stream)
    (flight,) = keeping.engine._running.flights
    assert flight.submission is not None
    await keeping.engine._running.llm.abort(flight.submission._request_id)
    with pytest.raises(QuartetError, match="NOT_READY: vLLM ended this request"):
        async for _ in stream:
            pass


async def test_abandoned_requests_give_their_blocks_back(keeping: Driver) -> None:
    for _ in range(10):  # it ends before it is looked at where this process is held up
        stream = keeping.engine.generate(Request((1, 2), Sampling(250, ignore_eos=True), n=12))
        await anext(stream)
        if keeping.engine.info().running > 0:
            break
        await stream.aclose()
    assert keeping.engine.info().running > 0
    await stream.aclose()
    assert keeping.engine.info().running == keeping.engine.info().waiting == 0
    # vLLM refuses to reset its prefix cache while a block is in use.
    async with asyncio.timeout(30):
        while not await keeping.engine._running.llm.reset_prefix_cache():  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
    assert keeping.engine._running.llm.output_processor.get_num_unfinished_requests() == 0


async def test_running_and_waiting_are_counted_as_they_change(keeping: Driver) -> None:
    held = keeping.engine._running
    streams = [
        keeping.engine.generate(Request((1, n), Sampling(200, ignore_eos=True), n=8)) for n in range(3)
    ]
    calls = [asyncio.create_task(anext(stream)) for stream in streams]
    calls += [asyncio.create_task(keeping.ask([n], max_tokens=n)) for n in range(1, 30)]
    seen: set[tuple[int, int]] = set()

    def counted() -> tuple[int, int]:
        info = keeping.engine.info()
        started = sum(flight.started for flight in held.flights)
        assert (info.running, info.waiting) == (started, len(held.flights) - started)
        return info.running, info.waiting

    for call in calls:
        call.add_done_callback(lambda _: seen.add(counted()))  # however seldom the loop comes by here
    while not all(call.done() for call in calls):
        seen.add(counted())
        await asyncio.sleep(0.001)
    assert len(seen) > 10
    await streams[0].aclose()
    counted()
    await keeping.update(3)
    for stream in streams[1:]:
        await stream.aclose()
    assert counted() == (0, 0)


async def test_what_the_engine_says_of_itself_costs_the_same_however_much_runs(
    keeping: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unwalked(dict[Any, None]):
        def __iter__(self) -> Any:
            raise AssertionError("walked")

    held = keeping.engine._running
    monkeypatch.setattr(held, "flights", Unwalked.fromkeys(range(4000)))
    monkeypatch.setattr(held, "started", 1000)
    info = keeping.engine.info()
    assert (info.running, info.waiting) == (1000, 3000)
    monkeypatch.setattr(keeping.engine._running, "_max_waiting", 3000)
    with pytest.raises(QuartetError, match="3000 completions wait"):
        await keeping.ask([1])


async def test_a_request_abandoned_while_it_is_handed_over_leaves_vllm(
    keeping: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = keeping.engine._running.llm
    sent = asyncio.Event()
    hand_over = llm.engine_core.add_request_async

    async def slow(request: Any) -> None:
        await hand_over(request)
        sent.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(llm.engine_core, "add_request_async", slow)
    call = asyncio.create_task(keeping.ask([1, 2], max_tokens=250))
    async with asyncio.timeout(10):
        await sent.wait()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await until(lambda: llm.output_processor.get_num_unfinished_requests() == 0)
    async with asyncio.timeout(30):
        while not await llm.reset_prefix_cache():  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)


async def test_a_score_that_is_abandoned_leaves_vllm(keeping: Driver) -> None:
    await keeping.engine.pause()
    score = asyncio.create_task(keeping.engine.score(ScoreRequest((1, 2, 3), ((1, 2),))))
    unfinished = keeping.engine._running.llm.output_processor.get_num_unfinished_requests
    await until(lambda: unfinished() == 1)
    score.cancel()
    with pytest.raises(asyncio.CancelledError):
        await score
    assert unfinished() == 0
    await keeping.engine.resume()


async def test_a_score_that_goes_ahead_waits_for_the_first_place_alone(
    keeping: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A canary is neither refused for a full queue nor stands in it."""
    waiting = 20
    monkeypatch.setattr(keeping.engine._running, "_max_waiting", waiting)

    def begin(*lengths: int) -> list[asyncio.Task[Told]]:
        return [asyncio.create_task(keeping.ask(PROMPT[:9], max_tokens=length)) for length in lengths]

    # Paused while the queue fills: the first place would be free again.
    calls = await caught_midway(keeping.engine, lambda: begin(60, *[200] * 15), completions=16, tokens=16 * 4)
    assert keeping.engine.info().running == 16
    calls += begin(*[200] * waiting)
    await until(lambda: keeping.engine.info().waiting == waiting)
    tokens = tuple(PROMPT[:64])
    canary = ScoreRequest(tokens, ((1, 63),), ahead=True)
    with pytest.raises(QuartetError, match="wait already"):
        await keeping.engine.score(replace(canary, ahead=False))
    ended: list[tuple[int, int]] = []
    scoring = asyncio.create_task(keeping.engine.score(canary))
    scoring.add_done_callback(
        lambda _: ended.append((sum(call.done() for call in calls), keeping.engine.info().waiting))
    )
    await asyncio.sleep(0)
    await keeping.engine.resume()
    scored = await scoring
    [(done, still_waiting)] = ended
    assert done <= 2, "behind the queue it would have waited for most of them"
    assert still_waiting >= waiting - 2
    wanted = scores(keeping.models[scored.version], tokens)[:63]
    assert scored.logprobs == pytest.approx(wanted, abs=TOLERANCE["vllm"], rel=0)
    await asyncio.gather(*calls)


async def test_the_likeliest_tokens_of_each_position_come_with_it(keeping: Driver) -> None:
    """drawing.py 5: of the last position too, where the token that is scored is likely, or is not."""
    model = keeping.models[await keeping.update(15)]
    head = list(range(254))
    likely = int(model(torch.tensor([head])).logits[0, -1].argmax())
    for tokens in ([*head, likely, 3], [*head, likely], [*head, (likely + 1) % 250], [5, 6]):
        request = ScoreRequest(tuple(tokens), ((1, len(tokens) - 1),), top=20)
        noise = asyncio.create_task(keeping.ask([1, 2], max_tokens=20))
        scored = await keeping.engine.score(request)
        wanted = scores(model, tokens).tolist()
        assert scored.logprobs == pytest.approx(wanted, abs=TOLERANCE["vllm"], rel=0)
        for have, want in zip(scored.tops, best(model, tokens, 21), strict=True):
            values = sorted(want.values())[1:]
            assert sorted(have.values()) == pytest.approx(values, abs=TOLERANCE["vllm"], rel=0)
            assert len(have.keys() & want.keys()) == 20
        assert keeping.difference(await noise) <= TOLERANCE["vllm"]
    assert (await keeping.engine.score(replace(request, top=0))).tops == []


async def test_of_what_is_no_number_there_are_no_alternatives(keeping: Driver) -> None:
    broken = keeping.make(16)
    with torch.no_grad():
        broken.model.layers[1].self_attn.v_proj.weight.fill_(float("nan"))
    await update(keeping.engine, broken, ServedWeights("r", max(keeping.models) + 1, b""))
    for call in (
        complete(keeping.engine, PROMPT, n=3, top=5),
        keeping.engine.score(ScoreRequest((1, 2, 3), ((1, 2),), top=5)),
        keeping.engine.score(ScoreRequest((1, 2, 3), ((2, 1),))),
    ):
        with pytest.raises(QuartetError, match="the weights give non-finite logits"):
            await call
    keeping.models[max(keeping.models) + 1] = broken
    await keeping.update(17)
    told = await keeping.ask(PROMPT, top=5)
    assert tops_difference(told, keeping.models, 5) <= TOLERANCE["vllm"]


async def test_vllm_is_never_asked_for_more_than_there_are_tokens(keeping: Driver) -> None:
    """It would end its core: topk has no such index."""
    from quartet_inference.vllm import flight

    few = replace(keeping.engine.info(), vocab_size=12)
    request = Request((1, 2), Sampling(5), top=20)
    completion = Completion(request, 0, 1, frozenset(), None)
    asked = [
        flight.Flight(replace(request, top=top), completion, asyncio.Queue(), Stamp(0)).params(info).logprobs
        for top, info in ((0, few), (3, few), (20, few), (20, keeping.engine.info()))
    ]
    assert asked == [0, 4, 12, 21]
    scored = flight._score_params(ScoreRequest((1, 2), ((1, 1),), top=20), 12)
    assert (scored.logprobs, scored.prompt_logprobs) == (12, 12)


async def test_both_engines_draw_the_same_tokens_for_a_seed(keeping: Driver) -> None:
    await keeping.update(12)
    async with running(keeping.make(12)) as embedded:
        for sampling in ({}, {"top_p": 0.8, "temperature": 1.2}, {"frequency_penalty": 0.6, "min_p": 0.05}):
            wanted: dict[str, Any] = {"n": 3, "seed": 8, "ignore_eos": True, **sampling}
            here = await complete(keeping.engine, PROMPT, **wanted)
            there = await complete(embedded, PROMPT, **wanted)
            assert [one.tokens for one in here] == [one.tokens for one in there]


async def test_half_loaded_weights_end_the_engine(keeping: Driver) -> None:
    """Invariant 3; trap 4 behind the check: what is neither old nor new never answers again."""
    whole = weights_of(keeping.make(13))
    partial = {k: v for k, v in whole.items() if "layers.1.self_attn.q_proj" not in k}
    [call] = await caught_midway(
        keeping.engine,
        lambda: [asyncio.create_task(keeping.ask([1], max_tokens=240))],
        completions=1,
        tokens=1,
    )
    score = asyncio.create_task(keeping.engine.score(ScoreRequest((1, 2, 3), ((1, 2),))))
    unfinished = keeping.engine._running.llm.output_processor.get_num_unfinished_requests
    await until(lambda: unfinished() == 2)
    staged = await asyncio.to_thread(keeping.engine._staging.write, partial)
    with pytest.raises(QuartetError, match="could not be loaded"):
        await keeping.engine.swap(staged, ServedWeights("r", 100, b""))
    assert keeping.engine.info().closed
    for late in (
        call,
        score,
        keeping.engine.score(ScoreRequest((1, 2), ((1, 1),))),
        keeping.ask([1]),
        keeping.engine.pause(),
        keeping.update(14),
    ):
        with pytest.raises(QuartetError) as refused:
            await asyncio.wait_for(late, 60)
        assert refused.value.reason == "NOT_READY"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def rounding(make_model: Make, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Driver]:
    """An engine that computes in bfloat16; the last test that has it closes it."""
    folder = tmp_path_factory.mktemp("rounding")
    driver = await asyncio.to_thread(launch, folder, lambda seed: make_model(seed, **SIZES), dtype="bfloat16")
    yield driver
    if not driver.engine.info().closed:
        await driver.engine.close()


async def test_logits_of_a_bfloat16_model_are_not_rounded_to_it(rounding: Driver) -> None:
    """start.py: as those of the trainer and of the embedded engine."""
    told = await rounding.ask(PROMPT, top=8)
    assert on_bfloat16_grid(told) < 0.1 and rounding.difference(told) < 0.2


async def test_a_change_of_weights_that_a_core_never_answers_is_answered_and_holds_up_no_end(
    rounding: Driver,
) -> None:
    """running.py 2: vLLM leaves those waiting who have asked a core that ends. One that is killed:
    test_vllm_workers.py."""
    engine = rounding.engine
    staged = await engine.stage(weights_of(rounding.make(1).bfloat16()))
    cores = engine._running.llm.engine_core.resources.engine_manager.processes
    for core in cores:
        os.kill(core.pid, signal.SIGSTOP)
    swap = asyncio.create_task(engine.swap(staged, ServedWeights("r", 1, b"")))
    await until(lambda: bool(engine._running.llm.engine_core.utility_results))

    def kill() -> None:
        for core in cores:
            core.kill()
            core.join()

    try:
        async with asyncio.timeout(60):
            await engine.close()
            with pytest.raises(QuartetError, match="NOT_READY"):
                await swap
    finally:
        await asyncio.to_thread(kill)  # pytest would wait for what is stopped
