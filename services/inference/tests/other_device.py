"""The embedded engine's work on the CPU and on another device: what it told, as JSON.

In a process of its own (simulated_device.py):

    python -m tests.other_device DEVICE
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any

import torch
from quartet_inference.embedded import attention
from quartet_inference.embedded.decoder import Decoder
from quartet_inference.embedded.engine import EmbeddedEngine
from quartet_inference.embedded.graphs import GraphedForward
from quartet_inference.embedded.limits import Limits
from quartet_inference.engine import ScoreRequest, ServedWeights
from quartet_inference.structure.following import Structures
from quartet_inference.structure.grammar import grammar
from quartet_inference.structure.vocabulary import ll_tokenizer
from simulated_device import ARRIVED, NAME, modes, register

from .adapters import random_adapter
from .engine_calls import END, complete, load, text_of, until, update
from .random_models import byte_tokenizer, qwen3
from .told import Told

#: Moving a model breaks its ties where the device is simulated, as it does not where it is real.
UNTIED = {"tie_word_embeddings": False}
PROMPTS = ([5, 9, 7, 200, 31], [17] * 3, [*range(40, 64)])
#: Longer than one piece of what is scored between two steps.
LONG = [3 + 7 * place % 250 for place in range(300)]
SEED = 11
EVEN = frozenset(range(0, 250, 2))
LETTERS = grammar("start: /([a-f]{3};){60}/", {})
COMPILED = Structures(lambda: ll_tokenizer(byte_tokenizer(), END), END).compile(LETTERS)
FORMED = {"grammar": LETTERS, "compiled": COMPILED}

Floats = list[float]


@asynccontextmanager
async def running(device: str, seed: int = 0, **changes: Any) -> AsyncIterator[EmbeddedEngine]:
    model = qwen3(seed, **UNTIED)
    attention.use(model)
    if changes.pop("narrow", False):
        model = model.to(torch.bfloat16)
    limits = Limits(**{"max_model_len": 512, "max_num_seqs": 8, "kv_cache_bytes": 1 << 24} | changes)
    engine = EmbeddedEngine(model.to(device), limits, END, text_of, None)
    assert engine._decoder._batch._cache.data.device.type == torch.device(device).type
    await engine.swap(None, ServedWeights("", 0, engine.base_digest()))
    try:
        yield engine
    finally:
        await engine.close()


def numbers(told: list[Told]) -> Floats:
    tops = [value for one in told for top in one.tops for value in top.values()]
    return [*(value for one in told for value in (*map(float, one.tokens), *one.logprobs)), *tops]


async def sampled(device: str) -> Floats:
    """Rows of other lengths and parameters side by side."""
    shaped: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"n": 3, "temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.2, "top": 4},
        {"n": 2, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "min_tokens": 8, "stop_token_ids": EVEN},
    ]
    async with running(device) as engine:
        answers = await asyncio.gather(
            *(complete(engine, prompt, seed=SEED, **how) for prompt, how in zip(PROMPTS, shaped, strict=True))
        )
    return [value for told in answers for value in numbers(told)]


async def updated(device: str) -> Floats:
    """Before and after an update, and how far a row that it met is from a plain forward pass of each."""
    models = {0: qwen3(0, **UNTIED), 1: qwen3(1, **UNTIED)}
    async with running(device) as engine:
        found = numbers(await complete(engine, PROMPTS[0], seed=SEED))
        before = engine.info().tokens_sampled
        met = asyncio.create_task(complete(engine, PROMPTS[2], seed=SEED, max_tokens=120, ignore_eos=True))
        await until(lambda: engine.info().tokens_sampled > before)
        await engine.pause()  # it would end before the weights are there
        await update(engine, models[1], ServedWeights("r", 1, b"one"))
        await engine.resume()
        (told,) = await met
        assert set(told.versions) == {0, 1}
        found += numbers(await complete(engine, PROMPTS[0], seed=SEED))
        return [*found, told.difference(models)]


async def kept(device: str) -> Floats:
    """A prefix that is used again."""
    async with running(device) as engine:
        (first,) = await complete(engine, PROMPTS[2], seed=SEED, keep_prefix=True)
        (second,) = await complete(engine, [*PROMPTS[2], *first.tokens, 8], seed=SEED)
    assert second.cached >= len(PROMPTS[2])
    return [*numbers([first, second]), float(second.cached)]


async def scored(device: str) -> Floats:
    async with running(device) as engine:
        answers = await asyncio.gather(
            *(
                engine.score(ScoreRequest(tuple(tokens), ((1, len(tokens) - 1),), top=3))
                for tokens in (*PROMPTS, LONG)
            )
        )
    return [
        value for one in answers for value in (*one.logprobs, *(p for top in one.tops for p in top.values()))
    ]


async def adapted(device: str) -> Floats:
    """Two adapters and the base model in one batch, then another version of one."""
    model = qwen3(0, **UNTIED)
    async with running(device) as engine:
        for seed, run_id in enumerate("ab", 1):
            await load(engine, run_id, 1, random_adapter(model, seed))

        async def all_of_them() -> Floats:
            asked = [
                complete(engine, PROMPTS[0], temperature=0.0, run_id=run_id) for run_id in ("", "a", "b")
            ]
            return [value for told in await asyncio.gather(*asked) for value in numbers(told)]

        found = await all_of_them()
        await load(engine, "a", 2, random_adapter(model, 3))
        return found + await all_of_them()


async def narrow(device: str) -> Floats:
    """In bfloat16, whose sums round otherwise in other orders: scores alone, which hang on no draw."""
    async with running(device, narrow=True) as engine:
        (told,) = await complete(engine, PROMPTS[0], temperature=0.0)
        assert told.finish
        return (await engine.score(ScoreRequest(tuple(LONG), ((1, 299),)))).logprobs


async def structured(device: str) -> Floats:
    """Rows with and without a structure side by side."""
    async with running(device) as engine:
        shaped: list[dict[str, Any]] = [
            {"temperature": 0.0, **FORMED},
            {"n": 2, "top_p": 0.9, "top": 2, **FORMED},
            {"n": 2, "temperature": 0.8},
        ]
        answers = await asyncio.gather(
            *(complete(engine, prompt, seed=SEED, **how) for prompt, how in zip(PROMPTS, shaped, strict=True))
        )
        for one in (told for group in answers[:2] for told in group):
            assert all(chr(token + 33) in "abcdef;" for token in one.tokens)
    return [value for told in answers for value in numbers(told)]


async def recorded(device: str) -> Floats:
    """Rows that come and go while their contexts grow, of the base model, of an adapter and its next version,
    and after an update: on CUDA most steps are recorded."""
    model, other = qwen3(0, **UNTIED), qwen3(1, **UNTIED)
    async with running(device) as engine:

        async def some(run_id: str = "") -> Floats:
            how: dict[str, Any] = {"temperature": 0.0, "run_id": run_id}
            asked = (
                complete(engine, [*PROMPTS[0], number], max_tokens=40 + 9 * number, n=n, **how)
                for number, n in enumerate((1, 2, 1, 3, 1, 2), 1)
            )
            return [value for told in await asyncio.gather(*asked) for value in numbers(told)]

        found = await some()
        for version in (1, 2):
            await load(engine, "a", version, random_adapter(model, version))
            found += await some("a")
        await update(engine, other, ServedWeights("r", 1, b"one"))
        found += await some()
        run = engine._decoder._batch._forward
        assert isinstance(run, GraphedForward) == (device == "cuda")
        if isinstance(run, GraphedForward):
            serials = {key[-1] for key, step in run._recorded.items() if step is not None}
            assert len(serials) == 3, "the base model and two versions of the adapter"
        return found


async def arriving(device: str) -> Floats:
    """How many tensors come to the device in a decode step: of a plain row, of one that asks for all, of one
    that follows a structure, too."""
    all_of_it = {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "top_p": 0.9, "top_k": 20, "top": 3}
    found = []
    async with running(device) as engine:
        for asked in ({}, all_of_it, {**all_of_it, **FORMED}):
            came = []
            for tokens in (1, 11, 51):  # the prompt is known from the first on
                ARRIVED.clear()
                await complete(engine, PROMPTS[0], seed=SEED, max_tokens=tokens, ignore_eos=True, **asked)
                came.append(len(ARRIVED))
            found.append((came[2] - came[1]) / 40)
    return found


CASES: dict[str, Callable[[str], Awaitable[Floats]]] = {
    case.__name__: case for case in (sampled, updated, kept, scored, adapted, narrow, recorded, structured)
}


def main() -> None:
    (device,) = sys.argv[1:]
    torch.set_num_threads(1)
    simulated = device == NAME
    registered = register() if simulated else []
    if simulated:
        # A tensor that holds another one cannot be made in inference mode.
        torch.inference_mode = torch.no_grad  # type: ignore[assignment,misc]
    found: dict[str, dict[str, Floats]] = {case: {} for case in CASES}
    run = Decoder.run
    for name, mode in modes(device).items():

        def run_there(self: Decoder, mode: Callable[[], AbstractContextManager[Any]] = mode) -> None:
            with mode():  # of this thread alone
                run(self)

        Decoder.run = run_there  # type: ignore[method-assign]
        with mode():
            for case, work in CASES.items():
                found[case][name] = asyncio.run(work(name))  # type: ignore[arg-type]
            if simulated:
                found.setdefault("arriving", {})[name] = asyncio.run(arriving(name))
    print(json.dumps(found))
    del registered  # the device is there for as long as this is


if __name__ == "__main__":
    main()
