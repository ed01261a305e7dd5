"""Engines asked directly, without a service in front."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from quartet.seeds import completion_seeds
from quartet_inference.embedded.engine import EmbeddedEngine
from quartet_inference.embedded.limits import Limits
from quartet_inference.engine import Delta, Engine, Request, Routed, Sampling, ServedWeights

from .adapters import Adapter
from .random_models import weights_of
from .told import Told

END = frozenset({258})
OF_REQUEST = {
    *("compiled", "seeds", "run_id", "min_version", "exact_version", "keep_prefix", "resumed", "top"),
    "experts_from",
}
UNTIL_SECONDS = 60


def text_of(tokens: Any) -> str:
    return "".join(chr(97 + token % 26) for token in tokens)


@asynccontextmanager
async def running(model: Any, **limits: Any) -> AsyncIterator[EmbeddedEngine]:
    """An embedded engine of its own copy of the model, which it serves as the folder's."""
    settings = {"max_model_len": 256, "max_num_seqs": 16, "kv_cache_bytes": 1 << 24, **limits}
    engine = EmbeddedEngine(copy.deepcopy(model), Limits(**settings), END, text_of, None)
    await engine.swap(None, ServedWeights("", 0, engine.base_digest()))
    try:
        yield engine
    finally:
        await engine.close()


async def complete(engine: Engine, prompt: list[int], n: int = 1, **wanted: Any) -> list[Told]:
    """Run a request; deltas and spans must be contiguous, every completion must end."""
    if "seed" in wanted:
        wanted["seeds"] = tuple(completion_seeds(wanted.pop("seed"), n))
    sampling = Sampling(**{"max_tokens": 24, **{k: v for k, v in wanted.items() if k not in OF_REQUEST}})
    request = Request(tuple(prompt), sampling, n, **{k: v for k, v in wanted.items() if k in OF_REQUEST})
    told = [Told(list(prompt)) for _ in range(n)]
    async for event in engine.generate(request):
        one = told[event.index]
        if isinstance(event, Delta):
            spans = [(span.start - request.resumed, span.length, span.version) for span in event.spans]
            one.extend(event.token_ids, event.logprobs, spans, event.tops)
        elif isinstance(event, Routed):
            assert one.finish is None and one.routed is None
            one.routed = event
        else:
            assert one.finish is None
            one.finish = event
    assert all(one.finish for one in told)
    return told


async def complete_one(engine: Engine, prompt: list[int], **wanted: Any) -> Told:
    """One completion of the length that was asked for."""
    return (await complete(engine, prompt, **{"ignore_eos": True, **wanted}))[0]


async def update(engine: Engine, model: Any, weights: ServedWeights) -> None:
    await engine.swap(await engine.stage(weights_of(model)), weights)


async def load(engine: Engine, run_id: str, version: int, adapter: Adapter) -> None:
    staged = await engine.stage_adapter(adapter.config, adapter.tensors)
    await engine.swap_adapter(staged, ServedWeights(run_id, version, f"{run_id}@{version}".encode()))


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(UNTIL_SECONDS):
        while not true():  # noqa: ASYNC110 - the engine's thread has no event to offer
            await asyncio.sleep(0.001)


async def paused_after(engine: Engine, calls: Sequence[asyncio.Task[Any]], completions: int, at: int) -> bool:
    """Pause the engine once it has sampled so many tokens in all; whether all of the completions go on then.

    It decodes on while this process is held up: where one has ended before the pause, all may end.
    """

    def midway() -> bool:
        info = engine.info()
        whole = info.running + info.waiting == completions
        return (info.tokens_sampled >= at and whole) or any(call.done() for call in calls)

    await until(midway)
    await engine.pause()
    info = engine.info()
    if info.running + info.waiting == completions:
        return True
    await engine.resume()
    await asyncio.gather(*calls)
    return False


async def caught_midway(
    engine: Engine, begin: Callable[[], Sequence[asyncio.Task[Any]]], completions: int, tokens: int
) -> list[asyncio.Task[Any]]:
    """Calls for so many completions, of which none has ended and so many tokens are sampled; it is paused."""
    for _ in range(10):
        at = engine.info().tokens_sampled + tokens
        calls = list(begin())
        if await paused_after(engine, calls, completions, at):
            return calls
    raise AssertionError("they always ended before the engine was paused")
