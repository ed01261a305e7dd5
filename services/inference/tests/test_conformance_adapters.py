"""Adapters in every engine, asked directly, against plain forward passes of the merged models."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from quartet.errors import QuartetError
from quartet_inference.config import InferenceConfig
from quartet_inference.engine import Engine, ScoreRequest, ServedWeights, adapter_gone
from quartet_inference.vllm import environment

from .adapters import EVERY, Adapter, random_adapter
from .conformance import Make, engines
from .engine_calls import END, caught_midway, complete_one, load, paused_after, running, update
from .told import TOLERANCE, Told, scores

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADAPTERS = 3
RANK = 8
CONTEXT = 1024
#: An adapter may have matrices for the head.
UNTIED = {"tie_word_embeddings": False, "max_position_embeddings": CONTEXT}
WITH_HEAD = (*EVERY, "lm_head")


def started(folder: Path) -> Engine:
    """The vLLM engine, with room for two adapters in a batch and three in all."""
    environment.prepare(1)
    from quartet_inference.vllm.start import start

    config = InferenceConfig(
        model=folder,
        engine="vllm",
        max_model_len=CONTEXT,
        vllm={"kv_cache_bytes": 1 << 24, "max_num_seqs": 16, "max_lora_rank": RANK, "max_loras": 2},
        adapters={"max_count": ADAPTERS},
    )
    return start(config, END, lambda tokens: "", lambda: None)


@pytest.fixture
def base(make: Make) -> Any:
    return make(0, **UNTIED)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=engines())
async def served(
    request: pytest.FixtureRequest, make: Make, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[str, Any]]:
    """An engine of each kind, which serves model seed 0."""
    if request.param == "embedded":
        async with running(make(0, **UNTIED), max_adapters=ADAPTERS, max_model_len=CONTEXT) as embedded:
            yield request.param, embedded
        return
    folder = tmp_path_factory.mktemp("adapters")
    make(0, **UNTIED).save_pretrained(folder)
    engine = await asyncio.to_thread(started, folder)
    yield request.param, engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(served: tuple[str, Any]) -> AsyncIterator[Any]:
    """The engine, which holds no adapters before and after a test."""
    yield served[1]
    for one in served[1].info().adapters:
        await served[1].drop_adapter(one.run_id, adapter_gone(one.run_id))


@pytest.fixture
def tolerance(served: tuple[str, Any]) -> float:
    return TOLERANCE[served[0]]


async def ask(engine: Any, prompt: list[int], run_id: str, **wanted: Any) -> Told:
    return await complete_one(engine, prompt, run_id=run_id, **{"seed": 5, **wanted})


async def test_adapters_and_the_base_in_one_batch(engine: Any, base: Any, tolerance: float) -> None:
    """Trap 8 of vLLM's CPU build: it gives rows without an adapter the last one's matrices."""
    adapters = {run: random_adapter(base, seed, rank=2 + 3 * seed) for seed, run in enumerate("abc")}
    for version, (run, adapter) in enumerate(adapters.items()):
        await load(engine, run, version, adapter)
    runs = ["a", "", "b", "", "c", "a", "b", ""]
    told = await asyncio.gather(*(ask(engine, [7, number], run) for number, run in enumerate(runs)))
    for run, one in zip(runs, told, strict=True):
        version = "abc".index(run) if run else 0
        model = adapters[run].merged if run else base
        assert set(one.versions) == {version}
        assert one.difference({version: model}) <= tolerance


async def test_an_adapter_is_replaced_in_flight_and_no_prefix_outlives_it(
    engine: Any, base: Any, tolerance: float
) -> None:
    adapters = {version: random_adapter(base, 40 + version) for version in range(3)}
    models = {version: one.merged for version, one in adapters.items()}
    prompt = list(range(100))
    await load(engine, "a", 0, adapters[0])
    first = await ask(engine, prompt, "a")
    assert (await ask(engine, prompt, "a")).cached > 0

    def begin() -> list[asyncio.Task[Told]]:
        of_a = [asyncio.create_task(ask(engine, prompt[:n], "a", max_tokens=120)) for n in (1, 50, 100)]
        return [*of_a, asyncio.create_task(ask(engine, prompt, "", max_tokens=120))]

    while True:
        await load(engine, "a", 0, adapters[0])
        tasks = await caught_midway(engine, begin, completions=4, tokens=100)
        await load(engine, "a", 1, adapters[1])
        await engine.resume()
        if await paused_after(engine, tasks, completions=4, at=engine.info().tokens_sampled + 50):
            break
    await load(engine, "a", 2, adapters[2])
    await engine.resume()
    told = await asyncio.gather(*tasks)
    assert {version for one in told[:3] for version in one.versions} == {0, 1, 2}
    assert all(len(one.tokens) == 120 for one in told)
    assert all(one.difference(models) <= tolerance for one in told[:3])
    assert told[3].difference({0: base}) <= tolerance
    again = await ask(engine, prompt, "a")
    assert set(again.versions) == {2} and again.difference(models) <= tolerance
    assert again.tokens != first.tokens


async def test_a_prefix_never_serves_another_adapter_or_version(
    engine: Any, base: Any, tolerance: float, served: tuple[str, Any]
) -> None:
    prompt = list(range(140, 180))
    whole = {"embedded": 40, "vllm": 32}[served[0]]  # vLLM shares whole blocks
    first, second = random_adapter(base, 1), random_adapter(base, 2)
    await load(engine, "a", 0, first)
    await load(engine, "b", 0, second)
    for run in ("", "a", "b"):
        assert (await ask(engine, prompt, run)).cached == 0
    assert (await ask(engine, prompt, "a")).cached == whole
    await load(engine, "a", 1, second)
    again = await ask(engine, prompt, "a")
    assert again.cached == 0
    assert (await ask(engine, prompt, "b")).cached == whole
    assert (await ask(engine, prompt, "")).cached == whole
    assert again.difference({1: second.merged}) <= tolerance


async def test_scores_are_those_of_the_adapter_and_are_pinned_to_its_version(
    engine: Any, base: Any, tolerance: float
) -> None:
    """Beside each other, and beside completions: see the mends of vLLM."""
    adapters = {"a": random_adapter(base, 0), "b": random_adapter(base, 1, targets=WITH_HEAD)}
    rng = random.Random(4)
    texts = [[rng.randrange(256) for _ in range(length)] for length in (2, 40, 250)]
    for version, (run, adapter) in enumerate(adapters.items()):
        await load(engine, run, version, adapter)
    noise = [asyncio.create_task(ask(engine, [1], run, max_tokens=100)) for run in ("a", "b", "")]
    wanted = [(run, text) for run in ("a", "b", "") for text in texts]
    scored = await asyncio.gather(
        *(engine.score(ScoreRequest(tuple(text), ((1, len(text) - 1),), run)) for run, text in wanted)
    )
    for (run, text), one in zip(wanted, scored, strict=True):
        expected = scores(adapters[run].merged if run else base, text)
        torch.testing.assert_close(torch.tensor(one.logprobs), expected, rtol=0, atol=tolerance)
        assert one.version == (1 if run == "b" else 0)
    for told, model in zip(
        await asyncio.gather(*noise), (adapters["a"].merged, adapters["b"].merged, base), strict=True
    ):
        assert told.difference({told.versions[0]: model}) <= tolerance
    with pytest.raises(QuartetError) as refused:
        await engine.score(ScoreRequest((1, 2), ((1, 1),), "a", exact_version=5))
    assert refused.value.reason == "VERSION_UNAVAILABLE"


async def test_long_texts_are_scored_as_by_plain_forward_passes(
    engine: Any, base: Any, tolerance: float
) -> None:
    """Beside each other, with the base model and with an adapter that has matrices for the head."""
    draw = random.Random(1)
    texts = [[draw.randrange(256) for _ in range(length)] for length in (1000, 700, 257, 3)]
    adapter = random_adapter(base, 3, targets=WITH_HEAD)
    await load(engine, "a", 0, adapter)
    asked = [ScoreRequest(tuple(text), ((1, len(text) - 1),), run) for run in ("", "a") for text in texts]
    scored = await asyncio.gather(*(engine.score(one) for one in asked))
    for request, one in zip(asked, scored, strict=True):
        expected = scores(adapter.merged if request.run_id else base, list(request.tokens))
        torch.testing.assert_close(torch.tensor(one.logprobs), expected, rtol=0, atol=tolerance)


async def test_unloading_ends_its_requests_and_no_others(engine: Any, base: Any) -> None:
    await load(engine, "a", 0, random_adapter(base, 1))
    await load(engine, "b", 0, random_adapter(base, 2))
    of_a, of_b = await caught_midway(
        engine,
        lambda: [asyncio.create_task(ask(engine, [1], run, max_tokens=200)) for run in "ab"],
        completions=2,
        tokens=20,
    )
    await engine.drop_adapter("a", adapter_gone("a"))
    await engine.resume()
    with pytest.raises(QuartetError) as gone:
        await of_a
    assert gone.value.reason == "RUN_NOT_SERVED"
    assert len((await of_b).tokens) == 200
    with pytest.raises(QuartetError):
        await ask(engine, [1], "a")
    assert [one.run_id for one in engine.info().adapters] == ["b"]
    await engine.drop_adapter("a", adapter_gone("a"))


async def test_adapters_are_bounded_in_number(engine: Any, base: Any) -> None:
    adapter = random_adapter(base, 60)
    for run in "abc":
        await load(engine, run, 0, adapter)
    with pytest.raises(QuartetError, match="max_count") as full:
        await load(engine, "d", 0, adapter)
    assert full.value.reason == "OVERLOADED"
    await load(engine, "a", 1, random_adapter(base, 3))  # a replacement needs no room of its own
    assert {one.version for one in engine.info().adapters} == {0, 1}


async def test_other_base_weights_take_the_adapters_with_them(
    engine: Any, base: Any, make: Make, tolerance: float
) -> None:
    """Invariant 3, swaps.py 3: upon other weights an adapter's version would compute something else."""
    adapter, other = random_adapter(base, 70), make(1, **UNTIED)
    await load(engine, "a", 0, adapter)
    await update(engine, other, ServedWeights("r", 1, b"other"))
    assert engine.info().adapters == ()
    assert (await ask(engine, [1, 2], "r")).difference({1: other}) <= tolerance
    with pytest.raises(QuartetError, match="the model of this replica's folder"):
        await load(engine, "a", 1, adapter)
    await update(engine, base, ServedWeights("", 0, engine.base_digest()))
    await load(engine, "a", 1, adapter)
    assert (await ask(engine, [1, 2], "a")).difference({1: adapter.merged}) <= tolerance


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        ({"config": "{}"}, "not peft's"),
        ({"settings": {"use_dora": True}}, "use_dora"),
        ({"settings": {"modules_to_save": ["norm"]}}, "modules_to_save"),
        ({"settings": {"target_parameters": ["experts.down_proj"]}}, "target_parameters"),
        ({"settings": {"init_lora_weights": "pissa_niter_4"}}, "init_lora_weights = 'pissa_niter_4'"),
        ({"settings": {"kasa_config": {}}}, "kasa_config"),
        ({"settings": {"rank_pattern": {"q_proj": 2}}}, "rank_pattern"),
        ({"settings": {"r": 3}}, "the model needs"),
        ({"rename": ("lora_B", "lora_C")}, "has no .lora_B"),
        ({"rename": ("layers.0", "layers.7")}, "no linear module"),
        ({"rename": ("q_proj.lora_A", "q_proj.magnitude")}, "no low-rank matrix"),
        ({"empty": True}, "no matrices"),
    ],
)
async def test_an_adapter_that_does_not_fit_is_refused_whole(
    engine: Any, base: Any, harm: dict[str, Any], why: str
) -> None:
    adapter = random_adapter(base, 1, targets=("q_proj",))
    config, tensors = adapter.config, adapter.tensors
    if "config" in harm:
        config = harm["config"]
    if "settings" in harm:
        config = json.dumps({**json.loads(config), **harm["settings"]})
    if "rename" in harm:
        tensors = {name.replace(*harm["rename"]): tensor for name, tensor in tensors.items()}
    if "empty" in harm:
        tensors = {}
    with pytest.raises(QuartetError, match=why) as refused:
        await load(engine, "a", 0, Adapter(config, tensors, None))
    assert refused.value.reason == "INVALID_REQUEST"
    assert engine.info().adapters == ()


@pytest.mark.parametrize("served", engines()[1:], indirect=True)
async def test_an_adapter_that_vllm_refuses_leaves_the_one_before(
    engine: Any, base: Any, tolerance: float
) -> None:
    sound, unfit = random_adapter(base, 5), random_adapter(base, 6)
    await load(engine, "a", 0, sound)
    settings = json.loads(unfit.config)
    del settings["target_modules"]
    for run, version in (("a", 1), ("b", 0)):
        with pytest.raises(QuartetError, match=f"{run}@{version}.*target_modules") as refused:
            await load(engine, run, version, Adapter(json.dumps(settings), unfit.tensors, None))
        assert refused.value.reason == "INVALID_REQUEST"
    assert [(one.run_id, one.version) for one in engine.info().adapters] == [("a", 0)]
    assert (await ask(engine, [1, 2], "a")).difference({0: sound.merged}) <= tolerance
    assert len(await engine._running.llm.list_loras()) == 1
    await load(engine, "a", 2, unfit)
    assert (await ask(engine, [1, 2], "a")).difference({2: unfit.merged}) <= tolerance


@pytest.mark.parametrize("served", engines()[1:], indirect=True)
async def test_vllm_refuses_ranks_beyond_its_slots_and_lets_replaced_adapters_go(
    engine: Any, base: Any
) -> None:
    with pytest.raises(QuartetError, match="max_lora_rank"):
        await load(engine, "a", 0, random_adapter(base, 1, rank=RANK + 1))
    for version in range(3):
        await load(engine, "a", version, random_adapter(base, version))
        await ask(engine, [1, 2], "a")
    async with asyncio.timeout(20):
        while len(await engine._running.llm.list_loras()) > 1:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.05)
