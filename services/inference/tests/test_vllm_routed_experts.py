"""Experts that vLLM's workers note, against those of a plain forward pass of transformers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet_inference.config import InferenceConfig
from quartet_inference.vllm import environment

from .engine_calls import END, caught_midway, complete, complete_one, text_of, until
from .random_models import causal
from .routes import as_sets, routes, told_as_computed
from .scripted_engine import Scores
from .told import TOLERANCE, random_prompt
from .vllm_driver import PROMPT, Driver, started

pytest.importorskip("vllm", reason="vLLM is not installed in this interpreter (make install-vllm)")

#: Splits the longer prompts.
CHUNKS = {"max_num_batched_tokens": 64}


def sparse(seed: int, experts: int = 6) -> Any:
    """A Qwen3-MoE whose second layer has no router."""
    from transformers import AutoModelForCausalLM

    config = causal("qwen3_moe", 0).config
    config.num_hidden_layers, config.mlp_only_layers = 3, [1]
    config.num_experts, config.num_experts_per_tok = experts, 3
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def mixtral(seed: int) -> Any:
    return causal("mixtral", seed)


#: Room for 20 blocks of 32 tokens; of each, keys and values of 2 layers with 2 heads of 32 floats. Eight
#: requests want more of them, and two do not.
ROOM = 20 * 32 * 2 * 2 * 2 * 32 * 4
shared_loop = pytest.mark.asyncio(loop_scope="module")


async def launched(folder: Path, make: Any = sparse, **settings: Any) -> Driver:
    """An engine that has shown that it computes and notes what it should, also behind an update."""
    driver = Driver(await started(folder, make(0), routed_experts=True, **settings), make)
    from quartet_inference.vllm import probe

    config = InferenceConfig(model=folder, engine="vllm", routed_experts=True)
    known = probe.known_of(driver.models[0], True, experts=True)
    assert known.experts is not None
    await probe.check(driver.engine, config, known)
    assert driver.engine.info().served.version == driver.engine.info().updates_applied == 0
    return driver


Shared = AsyncIterator[Driver]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def plain(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """The engine of several tests, which plans steps ahead."""
    args = {"async_scheduling": True, **CHUNKS}
    driver = await launched(tmp_path_factory.mktemp("plain"), args=args)
    yield driver
    await driver.engine.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def mixture(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """One with little room, which does not."""
    args = {"async_scheduling": False, **CHUNKS}
    driver = await launched(tmp_path_factory.mktemp("mixture"), mixtral, kv_cache_bytes=ROOM, args=args)
    yield driver
    await driver.engine.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def keeping(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """One with little room, which does, and keeps the keys of running requests over an update."""
    kept: dict[str, Any] = {"kv_cache_bytes": ROOM, "kv_on_update": "keep"}
    args = {"async_scheduling": True, **CHUNKS}
    driver = await launched(tmp_path_factory.mktemp("keeping"), mixtral, **kept, args=args)
    yield driver
    await driver.engine.close()


async def nothing_kept(driver: Driver) -> None:
    """In no worker; the engine tells them in a task of its own."""
    workers = driver.engine._workers
    async with asyncio.timeout(10):
        while any(one["kept"] for core in await workers._in_workers("quartet_forget", "") for one in core):
            pass


def submitted_again(engine: Any) -> None:
    """As adapters have what runs submitted again."""
    for flight in engine._running.flights:
        flight.again = True
        flight.submission.move()


async def noted_first_outlives(driver: Driver, recomputes: bool) -> None:
    """An update of its weights."""
    engine, before = driver.engine, max(driver.models)
    asked = {"experts_from": 0, "max_tokens": 120}
    sampled = engine.info().tokens_sampled
    # It must not be through before the pause, however late that comes on a machine that is busy.
    call = asyncio.create_task(driver.ask([5, 6, 7], **asked | {"max_tokens": 220}))
    await until(lambda: engine.info().tokens_sampled > sampled + 20)
    await engine.pause()
    late = asyncio.create_task(driver.ask([9, *PROMPT], **asked))
    await asyncio.sleep(0.1)
    after = await driver.update(before + 1)
    await engine.resume()
    told, fresh = await call, await late
    assert set(told.versions) == {before, after} and set(fresh.versions) == {after}
    old, new = driver.models[before], driver.models[after]
    assert told_as_computed(fresh, new)
    sets, first = as_sets(told.routed.experts), told.versions.count(before)
    tokens = [*told.prompt, *told.tokens[:-1]]
    assert len(sets) == len(tokens) and sets[: 2 + first] == routes(old, tokens)[: 2 + first]
    if recomputes:  # of the last token both have computed the experts
        assert driver.difference(told) <= TOLERANCE["vllm"]
        assert sets[2 + first :] == routes(new, tokens)[2 + first :]
    await nothing_kept(driver)


async def lost_keys_lose_no_experts(driver: Driver) -> None:
    """Of requests that are preempted, or submitted again with the tokens that they have."""
    engine, model = driver.engine, driver.models[max(driver.models)]
    prompts = [[at, *range(at % 3 * 20)] for at in range(8)]
    asked = {"experts_from": 0, "max_tokens": 100}
    told = await asyncio.gather(*(driver.ask(prompt, **asked) for prompt in prompts))
    assert all(told_as_computed(one, model) for one in told)
    call = asyncio.create_task(driver.ask(PROMPT, experts_from=20, max_tokens=140))
    for _ in range(3):
        before = engine.info().tokens_sampled
        await until(lambda before=before: engine.info().tokens_sampled > before or call.done())
        submitted_again(engine)
    assert told_as_computed(await call, model, 20)
    await nothing_kept(driver)


@shared_loop
async def test_experts_are_those_of_a_plain_pass(plain: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """noting.py 1 and 4, experts.py: of every kind of request, beside others that do not ask."""
    engine, model, rng = plain.engine, plain.models[max(plain.models)], random.Random(5)
    assert engine.info().routers == 2
    prompts = [random_prompt(rng, 200), [7], random_prompt(rng, 12), PROMPT, PROMPT]
    greedy = {"experts_from": 0, "temperature": 0.0}
    asked = [complete_one(engine, prompt, max_tokens=50, **greedy) for prompt in prompts]
    silent = [complete_one(engine, random_prompt(rng), max_tokens=50) for _ in prompts]
    told = await asyncio.gather(*asked, *silent)
    assert all(told_as_computed(one, model) for one in told[: len(asked)])
    assert not any(one.routed for one in told[len(asked) :])
    assert {one.routed.experts.dtype.name for one in told[: len(asked)]} == {"uint8"}

    group = await complete(engine, list(range(40, 150)), n=3, ignore_eos=True, experts_from=0)
    assert all(told_as_computed(one, model) for one in group) and min(one.cached for one in group[1:])
    for start in (0, 1, 70, len(PROMPT)):  # what others have computed is found in the prefix cache
        known = await plain.ask(PROMPT, experts_from=start, max_tokens=1)
        assert known.cached == 96 and told_as_computed(known, model, start)
    turn = [*group[1].prompt, *group[1].tokens, 1, 2, 3]
    later = await plain.ask(turn, experts_from=120)
    assert later.cached >= 96 and told_as_computed(later, model, 120)
    resumed = await plain.ask(turn, experts_from=0, resumed=3)
    assert told_as_computed(resumed, model)

    completions = engine._completions
    monkeypatch.setattr(completions, "_held", replace(completions._held, detokenize=text_of))
    stop = text_of(told[0].tokens[20:23])
    (stopped,) = await complete(engine, prompts[0], ignore_eos=True, stop=(stop,), max_tokens=50, **greedy)
    assert len(stopped.tokens) == 23 and told_as_computed(stopped, model)
    await nothing_kept(plain)


@shared_loop
async def test_whoever_leaves_leaves_nothing_behind(plain: Driver) -> None:
    """experts.py 2, noting.py 4: before the first token, in the midst, while waiting."""
    engine = plain.engine
    calls = [
        asyncio.create_task(complete_one(engine, [at, 1, 2], experts_from=0, max_tokens=200))
        for at in range(30)  # more than the batch takes
    ]
    for at, call in enumerate(calls):
        await asyncio.sleep(0.01 * (at % 3))
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert not engine._running.flights
    await nothing_kept(plain)
    assert told_as_computed(await plain.ask(PROMPT, experts_from=0), plain.models[max(plain.models)])


@shared_loop
async def test_what_was_noted_first_outlives_an_update(plain: Driver) -> None:
    """noting.py 3: it is what the log-probabilities that were told came from."""
    await noted_first_outlives(plain, recomputes=True)


@shared_loop
async def test_what_was_noted_first_outlives_an_update_between_steps(mixture: Driver) -> None:
    """noting.py 3, where no step is planned ahead."""
    await noted_first_outlives(mixture, recomputes=True)


@shared_loop
async def test_who_loses_its_keys_loses_no_experts(mixture: Driver) -> None:
    """noting.py 2 and 3."""
    await lost_keys_lose_no_experts(mixture)


@shared_loop
async def test_the_experts_of_a_mixture_take_updates(mixture: Driver) -> None:
    """checkpoint.py 1, mends.py 4, probe.py 1: in the checkpoint they have other names, one by one."""
    engine, before = mixture.engine, max(mixture.models)
    first = await mixture.ask(PROMPT)
    assert set(first.versions) == {before} and mixture.difference(first) <= TOLERANCE["vllm"]
    [call] = await caught_midway(
        engine, lambda: [asyncio.create_task(mixture.ask([1, 2], max_tokens=150))], completions=1, tokens=5
    )
    after = await mixture.update(before + 1)
    await engine.resume()
    for told in (await call, await mixture.ask(PROMPT, temperature=0.0)):
        assert told.versions[-1] == after and mixture.difference(told) <= TOLERANCE["vllm"]


@shared_loop
async def test_what_was_noted_first_outlives_an_update_of_kept_keys(keeping: Driver) -> None:
    """noting.py 3."""
    await noted_first_outlives(keeping, recomputes=False)


@shared_loop
async def test_who_loses_its_keys_where_steps_are_planned_ahead_loses_no_experts(keeping: Driver) -> None:
    """noting.py 2 and 3."""
    await lost_keys_lose_no_experts(keeping)


async def test_two_workers_and_many_experts(tmp_path: Path) -> None:
    """noting.py: of the workers that share a model one keeps; more than 256 experts take two bytes."""
    driver = await launched(tmp_path, lambda seed: sparse(seed, 300), args={"tensor_parallel_size": 2})
    engine = driver.engine
    try:
        told = await asyncio.gather(*(driver.ask(PROMPT[at:], experts_from=0) for at in range(3)))
        assert all(told_as_computed(one, driver.models[0]) for one in told)
        assert told[0].routed.experts.dtype == np.uint16 and told[0].routed.experts.max() > 255
        await driver.update(1)
        assert told_as_computed(await driver.ask(PROMPT, experts_from=0), driver.models[1])
        await nothing_kept(driver)
    finally:
        await engine.close()


@pytest.mark.parametrize("kind, args, why", [
    ("llama", {}, "LlamaForCausalLM has no routers; leave it out"),
    ("mixtral", {"pipeline_parallel_size": 2}, r"does not go with vllm\.args\.pipeline_parallel_size = 2"),
    ("mixtral", {"enable_dbo": True}, r"does not go with vllm\.args\.enable_dbo = True"),
    ("mixtral", {"kv_offloading_size": 1}, r"does not go with vllm\.args\.kv_offloading_size = 1"),
])  # fmt: skip
def test_what_cannot_be_noted_is_refused(kind: str, args: dict[str, Any], why: str, tmp_path: Path) -> None:
    environment.prepare(threads=1)
    from quartet_inference.vllm.start import start

    causal(kind, 0).save_pretrained(tmp_path)
    config = InferenceConfig(model=tmp_path, engine="vllm", routed_experts=True, vllm={"args": args})
    with pytest.raises(ConfigError, match=f"routed_experts = true.*{why}"):
        start(config, END, lambda tokens: "", lambda: None)


@pytest.mark.parametrize("noted, why", [
    ([[[0, 1], [2, 3]]] * 3, ""),
    ([[[1, 0], [3, 2]], [[1, 0], [3, 2]], [[0, 3], [0, 1]]], ""),
    ([[[2, 3], [0, 1]]] * 3, r"notes others: 0% of them"),
    ([[[0, 1]]] * 3, "notes those of 1 layers, not of 2"),
    (None, "notes none"),
    (QuartetError("NOT_READY", "it has ended"), "cannot note experts: it has ended"),
])  # fmt: skip
async def test_a_start_that_notes_other_experts_is_refused(noted: Any, why: str, model_folder: Path) -> None:
    """probe.py 2"""
    from quartet_inference.vllm import probe

    class Notes(Scores):
        async def experts_unnamed(self, tokens: Any) -> Any:
            assert tokens == (3, 10, 17)
            if isinstance(noted, QuartetError):
                raise noted
            return np.array(noted) if noted else None

    config = InferenceConfig(model=model_folder, engine="vllm", routed_experts=True)
    known = probe.Known((3, 10, 17, 24, 31), (-1.0, -2.0, -3.0, -4.0), np.array([[[0, 1], [2, 3]]] * 5))
    engine: Any = Notes([-1.0, -2.0, -3.0])
    if why:
        with pytest.raises(ConfigError, match=why):
            await probe.check(engine, config, known)
    else:
        await probe.check(engine, config, known)


class Cache:
    """Of vLLM a runner's states, and a scheduler that gives and takes its few blocks at random."""

    BLOCKS, SIZE = 7, 4

    def __init__(self, seed: int) -> None:
        from quartet_inference.vllm.noting import Noting

        self.draw, self.computed = random.Random(seed), 0
        self.requests: dict[str, Any] = {}
        self.running: list[str] = []
        self.waiting: dict[str, None] = {}  # preempted
        self.free = list(range(self.BLOCKS))
        self.truth: dict[str, list[int]] = {}
        self.noting: Any = object.__new__(Noting)
        self.noting.__dict__ |= {
            "_runner": self, "_group": 0, "_block_size": self.SIZE,
            "_noted": {}, "_running": {}, "_scheduled": {},
            "_slots_SNk": torch.zeros(self.BLOCKS * self.SIZE + 1, 1, 1, dtype=torch.int16),
            "_aside": SimpleNamespace(filled=lambda: None, on_host=lambda pick: pick()),
        }  # fmt: skip

    def step(self, came: list[str], finished: set[str]) -> None:
        """Some requests leave, those that get blocks go on or come back."""
        for name in self.draw.sample(self.running, self.draw.randrange(len(self.running) + 1)):
            if self.draw.random() < 0.5:
                self._preempt(name)
        scheduled: dict[str, int] = {}
        back = set()
        for name in [*self.running, *self.waiting, *came]:
            state = self.requests[name]
            left = len(state.tokens) - state.computed
            count = self.draw.randint(1, left)
            need = -(-(state.computed + count) // self.SIZE) - len(state.blocks)
            if need > len(self.free) or name in finished:
                continue
            state.blocks = [*state.blocks, *(self.free.pop(0) for _ in range(need))]
            scheduled[name] = count
            if name in self.waiting:
                back.add(name)
                del self.waiting[name]
            if name not in self.running:
                self.running.append(name)
        self._tell(scheduled, back, came, finished)
        for name, count in scheduled.items():
            self._compute(name, count)

    def _tell(self, scheduled: dict[str, int], back: set[str], came: list[str], finished: set[str]) -> None:
        new = [name for name in came if name in scheduled]
        old = [name for name in scheduled if name not in new]
        sampled = [len(self.requests[name].tokens) - self.requests[name].num_prompt_tokens for name in old]
        asked = [SimpleNamespace(extra_args={"quartet_experts": (f"our {name}", 0)}) for name in new]
        self.noting.before_step(SimpleNamespace(
            num_scheduled_tokens=scheduled, finished_req_ids=finished,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=old, resumed_req_ids=back, num_output_tokens=sampled
            ),
            scheduled_new_reqs=[
                SimpleNamespace(req_id=name, sampling_params=params)
                for name, params in zip(new, asked, strict=True)
            ],
        ))  # fmt: skip
        for name, state in self.requests.items():
            if name in back:  # what was drawn behind the last token that is known, if any, was dropped
                drawn = len(state.tokens) - state.num_prompt_tokens
                self.truth[name] = self.truth[name][: len(state.tokens) - 1 if drawn else 0]
            if name in scheduled:
                state.block_ids, state.num_computed_tokens = [list(state.blocks)], state.computed

    def _compute(self, name: str, count: int) -> None:
        state, truth = self.requests[name], self.truth[name]
        for at in range(state.computed, state.computed + count):
            self.computed += 1
            slot = state.blocks[at // self.SIZE] * self.SIZE + at % self.SIZE
            self.noting._slots_SNk[slot] = self.computed
            truth[at:] = truth[at:] or [self.computed]
        state.computed += count
        if state.computed == len(state.tokens):
            if self.draw.random() < 0.8:
                state.tokens.append(0)
            else:  # what was drawn is dropped
                self._preempt(name)

    def _preempt(self, name: str) -> None:
        state = self.requests[name]
        self.running.remove(name)
        self.waiting[name] = None
        self.free += state.blocks
        state.blocks, state.computed = [], 0

    def come(self, name: str) -> None:
        tokens = [0] * self.draw.randint(1, 9)
        self.requests[name] = SimpleNamespace(
            tokens=tokens, num_prompt_tokens=len(tokens), blocks=[], computed=0
        )
        self.truth[name] = []

    def check(self, name: str) -> None:
        """What is told is what was computed."""
        end = min(len(self.requests[name].tokens) - 1, len(self.truth[name]))
        told = self.noting.told(f"our {name}", 0, end)
        assert np.frombuffer(told["experts"], told["dtype"]).tolist() == self.truth[name][:end]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_is_scheduled_each_token_keeps_its_experts(seed: int) -> None:
    """noting.py 2 to 4"""
    cache = Cache(seed)
    waiting: list[str] = []
    for number in range(150):
        if len(cache.requests) + len(waiting) < 4:
            cache.come(f"{number}")
            waiting.append(f"{number}")
        finished = {
            name
            for name in cache.running
            if len(cache.requests[name].tokens) > 10 and cache.draw.random() < 0.3
        }
        for name in finished:
            cache.free += cache.requests[name].blocks
            cache.running.remove(name)
        cache.step(waiting, finished)
        waiting = [name for name in waiting if f"our {name}" not in cache.noting._noted]
        for name in cache.requests:
            if name not in waiting:
                cache.check(name)
        cache.noting.forget([f"our {name}" for name in finished])
        for name in finished:
            del cache.requests[name]
    assert cache.noting.count() == 2 * len(set(cache.requests) - set(waiting))
