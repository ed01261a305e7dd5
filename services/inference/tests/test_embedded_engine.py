"""The embedded engine against a plain forward pass of transformers (float32: at most 2e-5 apart)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from quartet.errors import QuartetError
from quartet.weights.tensor import Tensor
from quartet_inference.embedded import forward, prefill
from quartet_inference.embedded.engine import EmbeddedEngine
from quartet_inference.embedded.limits import Limits
from quartet_inference.engine import Delta, Finish, Reason, Request, Sampling, ServedWeights

Make = Callable[..., Any]
END = frozenset({258})
TOLERANCE = 2e-5


@dataclass
class Result:
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Finish | None = None


def text_of(tokens: Any) -> str:
    return "".join(chr(97 + token % 26) for token in tokens)


def weights_of(model: Any) -> dict[str, Tensor]:
    return {
        name: Tensor("F32", tuple(p.shape), p.detach().clone().numpy().tobytes())
        for name, p in model.named_parameters()
    }


@asynccontextmanager
async def running(model: Any, **limits: Any) -> AsyncIterator[EmbeddedEngine]:
    settings = {"max_model_len": 256, "max_num_seqs": 16, "kv_cache_bytes": 1 << 24, **limits}
    engine = EmbeddedEngine(model, Limits(**settings), END, text_of, ServedWeights("", 0, b""))
    try:
        yield engine
    finally:
        await engine.close()


async def complete(engine: EmbeddedEngine, prompt: list[int], n: int = 1, **request: Any) -> list[Result]:
    """Run a request; checks that deltas and spans are contiguous."""
    keys = {"run_id", "min_version", "exact_version", "keep_prefix"}
    sampling = Sampling(**{"max_tokens": 24, **{k: v for k, v in request.items() if k not in keys}})
    wanted = Request(tuple(prompt), sampling, n, **{k: v for k, v in request.items() if k in keys})
    results = [Result(prompt) for _ in range(n)]
    async for event in engine.generate(wanted):
        result = results[event.index]
        assert result.finish is None
        if isinstance(event, Delta):
            assert 1 <= len(event.token_ids) <= 64
            for span in event.spans:
                assert span.start == len(result.versions)
                result.versions.extend([span.version] * span.length)
            result.tokens.extend(event.token_ids)
            result.logprobs.extend(event.logprobs)
            assert len(result.versions) == len(result.tokens) == len(result.logprobs)
        else:
            result.finish = event
    assert all(result.finish for result in results)
    return results


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110 - the engine's thread has no event to offer
            await asyncio.sleep(0.001)


def difference(result: Result, models: dict[int, Any], temperature: float = 1.0) -> float:
    """The largest |engine - plain forward| of the version stamped on each token."""
    ids = torch.tensor([result.prompt + result.tokens])
    start = len(result.prompt) - 1
    worst = 0.0
    for version in set(result.versions):
        with torch.no_grad():
            logits = models[version](ids, use_cache=False).logits[0, start:-1].float() / temperature
        plain = torch.log_softmax(logits, -1).gather(-1, ids[0, start + 1 :, None])[:, 0]
        mine = torch.tensor(result.versions) == version
        worst = max(worst, (plain - torch.tensor(result.logprobs))[mine].abs().max().item())
    return worst


def random_prompt(rng: random.Random, longest: int = 40) -> list[int]:
    return [rng.randrange(256) for _ in range(rng.randint(1, longest))]


@pytest.mark.parametrize("kind", ["lean", "hub"])
async def test_logprobs_while_requests_join_and_leave_and_weights_change(
    make_model: Make, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "hub":
        monkeypatch.setattr(forward, "LEAN_MODELS", frozenset())
    versions = {version: make_model(version) for version in range(4)}
    rng = random.Random(7)
    results: list[tuple[Result, float]] = []

    async def caller(number: int, engine: EmbeddedEngine) -> None:
        await asyncio.sleep(rng.random() * 0.3)
        prompt = random_prompt(rng)
        temperature = rng.choice([1.0, 1.0, 0.7, 1.5])
        for _ in range(rng.randint(1, 3)):
            answers = await complete(
                engine, prompt, n=rng.choice([1, 1, 4]), temperature=temperature,
                max_tokens=rng.randint(1, 60), keep_prefix=bool(number % 2),
            )  # fmt: skip
            results.extend((answer, temperature) for answer in answers)
            prompt = answers[0].prompt + answers[0].tokens + [10, 20, 30]
            if len(prompt) > 180:
                return

    async with running(make_model(0)) as engine:
        callers = [asyncio.create_task(caller(number, engine)) for number in range(30)]
        for version in (1, 2, 3):
            await asyncio.sleep(0.25)
            staged = await engine.stage(weights_of(versions[version]))
            await engine.swap(staged, ServedWeights("run", version, b""))
        await asyncio.gather(*callers)
        assert engine.info().running == engine.info().waiting == 0
    assert max(difference(result, versions, t) for result, t in results) <= TOLERANCE
    assert any(len(set(result.versions)) > 1 for result, _ in results), (
        "no request was in flight at an update"
    )
    for result, _ in results:
        assert result.versions == sorted(result.versions)


async def test_kept_keys_survive_an_update_but_never_serve_a_new_request(make_model: Make) -> None:
    """Invariant 3: every token is stamped with what sampled it."""
    old, new = make_model(0), make_model(1)
    prompt = list(range(40))
    async with running(make_model(0), recompute_on_update=False) as engine:
        await engine.pause()
        task = asyncio.create_task(complete(engine, prompt, max_tokens=40, ignore_eos=True, keep_prefix=True))
        await until(lambda: engine.info().waiting == 1)
        await engine.resume()
        await until(lambda: engine.info().tokens_sampled >= 5)
        await engine.swap(await engine.stage(weights_of(new)), ServedWeights("run", 1, b""))
        mixed = (await task)[0]
        assert set(mixed.versions) == {0, 1} and len(mixed.tokens) == 40
        before = mixed.versions.count(0)
        cut = Result(prompt, mixed.tokens[:before], mixed.logprobs[:before], mixed.versions[:before])
        assert difference(cut, {0: old}) <= TOLERANCE
        assert difference(mixed, {0: old, 1: new}) > 1e-3, "kept keys should differ from recomputed ones"
        fresh = (await complete(engine, prompt + mixed.tokens))[0]
        assert fresh.finish is not None and fresh.finish.cached_tokens == 0
        assert difference(fresh, {1: new}) <= TOLERANCE


async def test_group_and_later_calls_share_a_prompt(make_model: Make) -> None:
    model = make_model(0)
    prompt = list(range(50))
    async with running(make_model(0)) as engine:
        group = await complete(engine, prompt, n=8, keep_prefix=True)
        assert sorted(r.finish.cached_tokens for r in group if r.finish) == [0] + [50] * 7
        later = (await complete(engine, prompt))[0]
        assert later.finish is not None and later.finish.cached_tokens == 50
        turn = (await complete(engine, prompt + group[3].tokens + [1, 2, 3]))[0]
        assert turn.finish is not None and turn.finish.cached_tokens >= 50 + len(group[3].tokens) - 1
        assert max(difference(r, {0: model}) for r in [*group, later, turn]) <= TOLERANCE
        assert len({tuple(r.tokens) for r in group}) > 1


async def test_seeded_tokens_do_not_depend_on_the_batch(make_model: Make) -> None:
    async with running(make_model(0)) as engine:
        alone = await complete(engine, [1, 2, 3], n=2, seed=5, temperature=0.9)
        assert alone[0].tokens != alone[1].tokens
        rng = random.Random(1)
        noise = [complete(engine, random_prompt(rng), max_tokens=50) for _ in range(12)]
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
    assert difference(result, {0: model}) <= TOLERANCE


async def test_small_kv_budget_hands_rows_back_without_losing_tokens(make_model: Make) -> None:
    model = make_model(0)
    per_token = 2 * 2 * 2 * 16 * 4
    async with running(make_model(0), max_model_len=200, kv_cache_bytes=per_token * 420) as engine:
        prompts = [[i, i + 1, i + 2] for i in range(12)]
        runs = [complete(engine, p, max_tokens=150, ignore_eos=True) for p in prompts]
        results = [r[0] for r in await asyncio.gather(*runs)]
    assert all(len(r.tokens) == 150 for r in results)
    assert max(difference(r, {0: model}) for r in results) <= TOLERANCE


async def test_long_prompts_are_computed_in_pieces(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 16)
    rng = random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (100, 3, 60, 17, 16)]
    async with running(make_model(0)) as engine:
        results = await asyncio.gather(*[complete(engine, p, max_tokens=8) for p in prompts])
    assert max(difference(r[0], {0: make_model(0)}) for r in results) <= TOLERANCE


async def test_closing_the_iterator_frees_the_slots(make_model: Make) -> None:
    async with running(make_model(0)) as engine:
        stream = engine.generate(Request((1, 2), Sampling(240, ignore_eos=True), n=3))
        await anext(stream)
        assert engine.info().running == 3
        await stream.aclose()
        await engine.pause()  # a command behind the one that drops the request
        assert engine.info().running == 0
        await engine.resume()
        task = asyncio.create_task(complete(engine, [1], max_tokens=240, ignore_eos=True))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await complete(engine, [9]))[0].finish is not None
        assert engine.info().running == 0


async def test_full_queue_is_overloaded_and_pause_holds_requests(make_model: Make) -> None:
    """Invariant 8."""
    async with running(make_model(0), max_waiting=4) as engine:
        await engine.pause()
        waiting = asyncio.create_task(complete(engine, [1], n=4))
        await asyncio.sleep(0.05)
        with pytest.raises(QuartetError) as refusal:
            await complete(engine, [1])
        assert refusal.value.reason == "OVERLOADED"
        assert engine.info().tokens_sampled == 0 and engine.info().paused
        assert await engine.pause() == 4
        await engine.resume()
        assert len(await waiting) == 4
        assert len(await complete(engine, [1], n=4)) == 4


async def test_pinned_requests_fail_when_their_weights_leave(make_model: Make) -> None:
    async with running(make_model(0)) as engine:
        await engine.swap(None, ServedWeights("a", 3, b""))
        long = {"max_tokens": 250, "ignore_eos": True}
        pinned = asyncio.create_task(complete(engine, [1], exact_version=3, **long))
        of_run = asyncio.create_task(complete(engine, [1], run_id="a", **long))
        free = asyncio.create_task(complete(engine, [1], **long))
        await until(lambda: engine.info().running == 3)
        staged = await engine.stage(weights_of(make_model(1)))
        await engine.swap(staged, ServedWeights("b", 1, b""))
        for task, reason in ((pinned, "RUN_NOT_SERVED VERSION_UNAVAILABLE"), (of_run, "RUN_NOT_SERVED")):
            with pytest.raises(QuartetError) as failure:
                await task
            assert failure.value.reason in reason
        assert set((await free)[0].versions) == {3, 1}
        for wrong in ({"exact_version": 0}, {"min_version": 2}):
            with pytest.raises(QuartetError) as failure:
                await complete(engine, [1], **wrong)
            assert failure.value.reason == "VERSION_UNAVAILABLE"


async def test_wrong_weights_are_refused_and_change_nothing(make_model: Make) -> None:
    good = weights_of(make_model(1))
    name = "model.layers.0.self_attn.q_proj.weight"
    partial = {k: v for k, v in good.items() if k != name}
    async with running(make_model(0)) as engine:
        for bad in (
            partial,
            {**good, "extra": good[name]},
            {**good, name: Tensor("F32", (1, 4096), good[name].data)},
            {**good, name: Tensor("I32", good[name].shape, good[name].data)},
        ):
            with pytest.raises(QuartetError) as refusal:
                await engine.stage(bad)
            assert refusal.value.reason == "INVALID_REQUEST"
        assert difference((await complete(engine, [1, 2]))[0], {0: make_model(0)}) <= TOLERANCE


async def test_broken_weights_fail_requests_and_good_ones_heal(make_model: Make) -> None:
    broken = make_model(1)
    broken.model.layers[1].self_attn.v_proj.weight.fill_(float("nan"))
    async with running(make_model(0)) as engine:
        await engine.swap(await engine.stage(weights_of(broken)), ServedWeights("r", 1, b""))
        with pytest.raises(QuartetError) as failure:
            await complete(engine, list(range(30)), n=4)
        assert failure.value.reason == "INTERNAL"
        await engine.swap(await engine.stage(weights_of(make_model(2))), ServedWeights("r", 2, b""))
        results = await complete(engine, [4, 5], n=4)
        assert max(difference(r, {2: make_model(2)}) for r in results) <= TOLERANCE


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


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox", "untied"])
async def test_other_decoders(make_model: Make, family: str) -> None:
    from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, Qwen2Config

    sizes = {
        "vocab_size": 260, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 96, "max_position_embeddings": 512, "initializer_range": 0.15,
    }  # fmt: skip

    def build() -> Any:
        if family == "untied":
            return make_model(3, tie_word_embeddings=False)
        config = {
            "llama": lambda: LlamaConfig(
                **sizes, num_key_value_heads=1, attention_bias=True,
                rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
            ),
            "qwen2": lambda: Qwen2Config(**sizes, num_key_value_heads=2),
            "gpt_neox": lambda: GPTNeoXConfig(**sizes),
        }[family]()  # fmt: skip
        torch.manual_seed(4)
        return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)

    rng = random.Random(5)
    async with running(build()) as engine:
        results = await asyncio.gather(*[complete(engine, random_prompt(rng), n=2) for _ in range(6)])
    assert max(difference(r, {0: build()}) for group in results for r in group) <= TOLERANCE


def test_models_with_another_attention_are_refused(make_model: Make) -> None:
    windowed = make_model(0, use_sliding_window=True, sliding_window=64, max_window_layers=0)
    with pytest.raises(ValueError, match="window of 64"):
        forward.check_supported(windowed.config, 256)
    forward.check_supported(windowed.config, 64)
    with pytest.raises(ValueError, match="KV budget"):
        EmbeddedEngine(make_model(0), Limits(256, kv_cache_bytes=1000), END, text_of, None)


async def test_bfloat16_runs_through_transformers_own_forward(make_model: Make) -> None:
    model, new = make_model(0).bfloat16(), make_model(1).bfloat16()
    tensors = {
        name: Tensor("BF16", tuple(p.shape), p.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, p in new.named_parameters()
    }
    async with running(model) as engine:
        assert engine.info().dtype == "bfloat16"
        await engine.swap(await engine.stage(tensors), ServedWeights("r", 1, b""))
        result = (await complete(engine, [1, 2, 3], max_tokens=16))[0]
        with pytest.raises(QuartetError):
            await engine.stage(weights_of(make_model(1)))
    assert difference(result, {1: new}) < 0.2, "bfloat16 differs by batch shape, not by more"


async def test_closing_the_engine_fails_what_runs(make_model: Make) -> None:
    async with running(make_model(0)) as engine:
        task = asyncio.create_task(complete(engine, [1], max_tokens=250, ignore_eos=True))
        await until(lambda: engine.info().running == 1)
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
    assert max(difference(r, {0: make_model(0)}) for r in results) <= TOLERANCE


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
