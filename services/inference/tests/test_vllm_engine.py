"""The vLLM engine where it is not like the other: keys that are kept, parallel workers, faults of its own.

The first engine keeps keys over an update and has an untied head; the second has two workers.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
import torch
from quartet.errors import QuartetError
from quartet.weights.tensor import Tensor
from quartet_inference.config import InferenceConfig
from quartet_inference.embedded.engine import EmbeddedEngine
from quartet_inference.embedded.limits import Limits
from quartet_inference.engine import Delta, Engine, Finish, Request, Sampling, ServedWeights
from quartet_inference.vllm import environment

pytest.importorskip("vllm", reason="vLLM is not installed in this interpreter (make install-vllm)")
pytestmark = pytest.mark.asyncio(loop_scope="module")

Make = Callable[..., Any]
END = frozenset({258})
TOLERANCE = 5e-5
SIZES: dict[str, Any] = {"head_dim": 32, "tie_word_embeddings": False}
PROMPT = list(range(100))


class Driver:
    """An engine, the models of the versions that it has served, and short ways to use it."""

    def __init__(self, engine: Any, make: Make) -> None:
        self.engine: Any = engine
        self.make = make
        self.models: dict[int, Any] = {0: make(0)}

    async def update(self, seed: int) -> int:
        version = max(self.models) + 1
        self.models[version] = self.make(seed)
        staged = await self.engine.stage(weights_of(self.models[version]))
        await self.engine.swap(staged, ServedWeights("r", version, b""))
        return version

    async def ask(self, prompt: list[int], **wanted: Any) -> Told:
        return (await complete(self.engine, prompt, **wanted))[0]

    def difference(self, told: Told) -> float:
        worst = 0.0
        for version in set(told.versions):
            ids = torch.tensor([told.prompt + told.tokens])
            with torch.no_grad():
                logits = (
                    self.models[version](ids, use_cache=False).logits[0, len(told.prompt) - 1 : -1].float()
                )
            plain = torch.log_softmax(logits, -1).gather(-1, torch.tensor(told.tokens)[:, None])[:, 0]
            mine = torch.tensor(told.versions) == version
            worst = max(worst, (plain - torch.tensor(told.logprobs))[mine].abs().max().item())
        return worst


class Told:
    """What an engine has told of one completion."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt = prompt
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.finish: Finish | None = None

    @property
    def cached(self) -> int:
        assert self.finish is not None
        return self.finish.cached_tokens


async def complete(engine: Engine, prompt: list[int], n: int = 1, **wanted: Any) -> list[Told]:
    sampling = Sampling(**{"max_tokens": 24, "ignore_eos": True, **wanted})
    told = [Told(prompt) for _ in range(n)]
    async for event in engine.generate(Request(tuple(prompt), sampling, n)):
        one = told[event.index]
        if isinstance(event, Delta):
            one.tokens += event.token_ids
            one.logprobs += event.logprobs
            for span in event.spans:
                one.versions += [span.version] * span.length
        else:
            one.finish = event
    return told


def weights_of(model: Any) -> dict[str, Tensor]:
    return {
        name: Tensor("F32", tuple(p.shape), p.detach().clone().numpy().tobytes())
        for name, p in model.named_parameters()
    }


def tear(path: Path, missing: int) -> None:
    """Cut off the end of a file."""
    os.truncate(path, path.stat().st_size - missing)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.002)


def launch(folder: Path, make: Make, **settings: Any) -> Driver:
    environment.prepare(threads=1)
    from quartet_inference.vllm.start import start

    make(0).save_pretrained(folder)
    config = InferenceConfig(
        model=folder, engine="vllm", max_model_len=256,
        vllm={"max_num_seqs": 16, "kv_cache_bytes": 1 << 25, **settings},
    )  # fmt: skip
    return Driver(start(config, END, lambda tokens: "", lambda: None), make)


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
    call = asyncio.create_task(keeping.ask(PROMPT, max_tokens=120))
    await until(lambda: keeping.engine.info().running == 1)
    version = await keeping.update(1)
    mixed = await call
    assert set(mixed.versions) == {before, version} and len(mixed.tokens) == 120
    cut = Told(PROMPT)
    count = mixed.versions.count(before)
    cut.tokens, cut.logprobs = mixed.tokens[:count], mixed.logprobs[:count]
    cut.versions = mixed.versions[:count]
    assert keeping.difference(cut) <= TOLERANCE
    assert keeping.difference(mixed) > 1e-3, "kept keys should differ from recomputed ones"
    fresh = await keeping.ask(PROMPT + mixed.tokens[:20])
    assert fresh.cached == 0 and keeping.difference(fresh) <= TOLERANCE
    again = await keeping.ask(PROMPT + mixed.tokens[:20])
    assert again.cached >= 96 and keeping.difference(again) <= TOLERANCE


async def test_requests_that_wait_over_an_update_begin_with_the_new_weights(keeping: Driver) -> None:
    """They would find the prefixes of the weights under which they were submitted."""
    await keeping.ask(PROMPT)
    await keeping.engine.pause()
    call = asyncio.create_task(keeping.ask(PROMPT))
    await until(lambda: keeping.engine.info().waiting == 1)
    await asyncio.sleep(0.05)
    version = await keeping.update(2)
    assert keeping.engine.info().paused and not call.done()
    assert await keeping.engine.resume() == 1
    told = await call
    assert told.cached == 0 and set(told.versions) == {version}
    assert keeping.difference(told) <= TOLERANCE


async def test_update_after_update_is_exact(keeping: Driver) -> None:
    for seed in range(3, 8):
        await keeping.update(seed)
        told = await keeping.ask([seed, 1, 2], temperature=0.0)
        assert keeping.difference(told) <= TOLERANCE
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
    assert keeping.difference(await keeping.ask([1, 2])) <= TOLERANCE


async def test_a_torn_file_leaves_the_old_weights_serving(keeping: Driver) -> None:
    served = keeping.engine.info().served
    staged = await keeping.engine.stage(weights_of(keeping.make(10)))
    tear(staged.path, 100)
    call = asyncio.create_task(keeping.ask([1, 2], max_tokens=100))
    await until(lambda: keeping.engine.info().running == 1)
    with pytest.raises(QuartetError, match="could not be loaded"):
        await keeping.engine.swap(staged, ServedWeights("r", 99, b""))
    assert keeping.engine.info().served == served
    told = await call
    assert set(told.versions) == {served.version} and keeping.difference(told) <= TOLERANCE
    path = staged.path
    del staged
    assert not path.exists(), "a staged file ends with the object that stands for it"


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
    assert set(told.versions) == {version} and keeping.difference(told) <= TOLERANCE


async def test_abandoned_requests_give_their_blocks_back(keeping: Driver) -> None:
    stream = keeping.engine.generate(Request((1, 2), Sampling(250, ignore_eos=True), n=12))
    await anext(stream)
    assert keeping.engine.info().running > 0
    await stream.aclose()
    assert keeping.engine.info().running == keeping.engine.info().waiting == 0
    # vLLM refuses to reset its prefix cache while a block is in use.
    async with asyncio.timeout(5):
        while not await keeping.engine._running.llm.reset_prefix_cache():  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
    assert keeping.engine._running.llm.output_processor.get_num_unfinished_requests() == 0


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
    async with asyncio.timeout(5):
        while not await llm.reset_prefix_cache():  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)


async def test_both_engines_draw_the_same_tokens_for_a_seed(keeping: Driver) -> None:
    model = keeping.make(12)
    await keeping.update(12)
    served = ServedWeights("", 0, b"")
    embedded = EmbeddedEngine(model, Limits(256, kv_cache_bytes=1 << 24), END, lambda tokens: "", served)
    try:
        for sampling in ({}, {"top_p": 0.8, "temperature": 1.2}, {"frequency_penalty": 0.6, "min_p": 0.05}):
            here = await complete(keeping.engine, PROMPT, n=3, seed=8, **sampling)
            there = await complete(embedded, PROMPT, n=3, seed=8, **sampling)
            assert [one.tokens for one in here] == [one.tokens for one in there]
    finally:
        await embedded.close()


async def test_half_loaded_weights_end_the_engine(keeping: Driver) -> None:
    """Invariant 3; trap 4 behind the check: what is neither old nor new never answers again."""
    whole = weights_of(keeping.make(13))
    partial = {k: v for k, v in whole.items() if "layers.1.self_attn.q_proj" not in k}
    call = asyncio.create_task(keeping.ask([1], max_tokens=240))
    await until(lambda: keeping.engine.info().running == 1)
    staged = await asyncio.to_thread(keeping.engine._staging.write, partial)
    with pytest.raises(QuartetError, match="could not be loaded"):
        await keeping.engine.swap(staged, ServedWeights("r", 100, b""))
    assert keeping.engine.info().closed
    for late in (call, keeping.ask([1]), keeping.engine.pause(), keeping.update(14)):
        with pytest.raises(QuartetError) as refused:
            await late
        assert refused.value.reason == "NOT_READY"


class Core:
    """vLLM's side of an engine whose workers do as they are told here."""

    def __init__(self, failing: str) -> None:
        self.failing = failing
        self.paused = False
        self.model_config = SimpleNamespace(dtype=torch.float32, max_model_len=64, get_vocab_size=lambda: 387)
        scheduler = SimpleNamespace(max_num_seqs=1)
        self.vllm_config = SimpleNamespace(scheduler_config=scheduler, lora_config=None)
        self.engine_core = self
        self.output_handler = None

    async def pause_scheduler_async(self, **_: Any) -> None:
        self.paused = True

    async def resume_scheduler_async(self) -> None:
        self.paused = False

    async def call_utility_all_async(self, _: str, method: str, *__: Any) -> list[list[dict[str, Any]]]:
        if self.failing == f"{method} raises":
            raise RuntimeError("no answer")
        ok = method != self.failing
        return [[{"ok": ok, "touched": False, "why": "full"}]]

    async def update_weight_version(self, _: str) -> None:
        if self.failing == "label":
            raise RuntimeError("no answer")

    def shutdown(self, **_: Any) -> None: ...


@pytest.mark.parametrize("failing", ["quartet_wipe", "label", "quartet_load raises", "quartet_load"])
async def test_loaded_weights_never_answer_under_the_old_version(failing: str, tmp_path: Path) -> None:
    """Invariant 3: what fails between load and label ends the engine; what fails before changes nothing."""
    from quartet_inference.vllm.engine import Held, VllmEngine
    from quartet_inference.vllm.staging import Staging

    core: Any = Core(failing)
    served = ServedWeights("", 0, b"")
    engine = VllmEngine(core, Held({}, b"", END, lambda _: "", served), Staging(tmp_path), 8, False)
    engine._workers.unsound = True
    staged = await engine.stage({})
    with pytest.raises(QuartetError, match="INTERNAL"):
        await engine.swap(staged, ServedWeights("r", 1, b""))
    untouched = failing == "quartet_load"
    assert engine.info().served == served
    assert (engine.info().closed, core.paused) == ((False, False) if untouched else (True, True))
    await engine.close()


async def test_keys_that_cannot_be_wiped_end_the_engine(tmp_path: Path) -> None:
    from quartet_inference.vllm.engine import Held, VllmEngine
    from quartet_inference.vllm.staging import Staging

    core: Any = Core("quartet_wipe")
    engine = VllmEngine(core, Held({}, b"", END, lambda _: "", None), Staging(tmp_path), 8, False)
    engine._workers.unsound = True
    await engine._heal()
    assert engine.info().closed and core.paused
    await engine.close()


async def test_two_workers_take_an_update_together_and_their_end_is_told(
    make_model: Make, tmp_path: Path
) -> None:
    """Trap 7: a fault in a worker's call must not be taken for the answer to the next."""

    def make(seed: int) -> Any:
        return make_model(seed, head_dim=32)

    driver = await asyncio.to_thread(launch, tmp_path, make, args={"tensor_parallel_size": 2})
    engine = driver.engine
    try:
        assert driver.difference(await driver.ask(PROMPT)) <= TOLERANCE
        torn = await engine.stage(weights_of(make(1)))
        tear(torn.path, 100)
        for _ in range(2):
            with pytest.raises(QuartetError, match="could not be loaded"):
                await engine.swap(torn, ServedWeights("r", 7, b""))
        call = asyncio.create_task(driver.ask(PROMPT, max_tokens=100))
        await until(lambda: engine.info().running == 1)
        version = await driver.update(1)
        told = await call
        assert set(told.versions) == {0, version} and driver.difference(told) <= TOLERANCE
        call = asyncio.create_task(driver.ask([1], max_tokens=250))
        await until(lambda: engine.info().running == 1)
        for process in engine._running.llm.engine_core.resources.engine_manager.processes:
            os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(QuartetError) as ended:
            await call
        assert ended.value.reason == "NOT_READY" and engine.info().closed
        with pytest.raises(QuartetError):
            await driver.ask([1])
    finally:
        await engine.close()
