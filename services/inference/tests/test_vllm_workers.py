"""vLLM's workers: two that take an update together, and what is made of their faults and their end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quartet.errors import QuartetError
from quartet_inference.engine import Request, Sampling, ScoreRequest, ServedWeights
from quartet_inference.vllm import environment
from safetensors.torch import save_file
from structlog.testing import capture_logs

from .adapters import random_adapter
from .engine_calls import END, caught_midway, load, until
from .random_models import weights_of
from .told import TOLERANCE
from .vllm_driver import PROMPT, Make, launch, tear

pytest.importorskip("vllm", reason="vLLM is not installed in this interpreter (make install-vllm)")


class Core:
    """vLLM's side of an engine whose workers do as they are told here."""

    def __init__(self, failing: str) -> None:
        self.failing = failing
        self.asked: list[str] = []
        self.paused = False
        self.meanwhile: dict[str, Callable[[], Any]] = {}  # what happens while this is asked for
        self.submitted = 0
        self.reloads = ""
        self.model_config = SimpleNamespace(dtype=torch.float32, max_model_len=64, get_vocab_size=lambda: 387)
        scheduler = SimpleNamespace(max_num_seqs=1)
        self.vllm_config = SimpleNamespace(scheduler_config=scheduler, lora_config=None)
        self.engine_core = self
        self.utility_results: dict[int, asyncio.Future[Any]] = {}  # nobody waits for an answer
        self.output_handler = None
        self.errored = False

    async def pause_scheduler_async(self, **_: Any) -> None:
        self.paused = True

    async def resume_scheduler_async(self) -> None:
        self.paused = False

    async def call_utility_all_async(self, _: str, method: str, *__: Any) -> list[list[dict[str, Any]]]:
        self.asked.append(method)
        await self._meanwhile(method)
        if self.failing == f"{method} raises":
            raise RuntimeError("no answer")
        ok = method != self.failing
        more = self.asked.count(method) % 3 > 0
        answer = {"ok": ok, "touched": False, "why": "full", "more": more, "reloads": self.reloads}
        return [[answer, answer]]

    async def _meanwhile(self, method: str) -> None:
        self.meanwhile.get(method, lambda: None)()
        for _ in range(8):
            await asyncio.sleep(0)

    async def add_request(self, *_: Any, **__: Any) -> Any:
        self.submitted += 1
        await asyncio.Event().wait()  # nothing is ever sampled

    async def abort(self, *_: Any, **__: Any) -> None: ...

    async def remove_lora(self, _: int) -> None: ...

    async def update_weight_version(self, _: str) -> None:
        await self._meanwhile("label")
        if self.failing == "label":
            raise RuntimeError("no answer")

    def shutdown(self, **_: Any) -> None: ...


def engine_of(core: Any, folder: Path, served: ServedWeights | None = None) -> Any:
    from quartet_inference.vllm.checkpoint import Held
    from quartet_inference.vllm.engine import VllmEngine
    from quartet_inference.vllm.staging import Staging

    checkpoint: Any = SimpleNamespace(tensors=dict)
    held = Held({}, checkpoint, b"", END, lambda _: "", served)
    return VllmEngine(core, held, Staging(folder), 8, False)


def pinned(run_id: str = "") -> Request:
    return Request((1, 2), Sampling(8), run_id=run_id, exact_version=0)


@pytest.mark.parametrize("failing", ["", "quartet_load"])
async def test_who_is_answered_by_the_old_weights_ends_only_with_them(failing: str, tmp_path: Path) -> None:
    """engine.py 2 and 5: adapters and pinned requests, those included that came during the change."""
    from quartet_inference.vllm.flight import ServedAdapter

    core: Any = Core(failing)
    engine = engine_of(core, tmp_path, ServedWeights("", 0, b""))
    lora: Any = SimpleNamespace(lora_int_id=1)
    adapter = ServedAdapter(ServedWeights("a", 0, b"a"), lora, staged=lora)
    engine._adapters._served["a"] = adapter
    engine._adapters._tell()
    calls = [asyncio.ensure_future(anext(engine.generate(request))) for request in (pinned(), pinned("a"))]
    await until(lambda: core.submitted == 2)
    for moment in ("quartet_load", "label"):
        core.meanwhile[moment] = lambda: calls.append(asyncio.ensure_future(anext(engine.generate(pinned()))))
    swap = engine.swap(await engine.stage({}), ServedWeights("", 1, b"1"))
    if failing:
        with pytest.raises(QuartetError, match="could not be loaded"):
            await swap
        assert not any(call.done() for call in calls) and len(calls) == 3
        assert [one.run_id for one in engine.info().adapters] == ["a"]
    else:
        await swap
        await asyncio.wait(calls, timeout=5)
        reasons = [call.exception().reason for call in calls]
        assert reasons == ["VERSION_UNAVAILABLE", "RUN_NOT_SERVED", *["VERSION_UNAVAILABLE"] * 2]
        assert not engine.info().adapters
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await engine.close()


async def test_a_score_is_of_what_serves_when_it_begins(tmp_path: Path) -> None:
    """scoring.py 1: its adapter leaves, or has other weights, once it is admitted and has not begun."""
    from quartet_inference.vllm.flight import ServedAdapter

    core: Any = Core("")
    engine = engine_of(core, tmp_path, ServedWeights("", 0, b""))
    lora: Any = SimpleNamespace(lora_int_id=1)

    def serve(version: int) -> None:
        weights = ServedWeights("a", version, b"a")
        engine._adapters._served["a"] = ServedAdapter(weights, lora, staged=lora)
        engine._adapters._tell()

    for change in (lambda: serve(1), lambda: engine._adapters.retire_all()):
        serve(0)
        call = asyncio.create_task(engine.score(ScoreRequest((1, 2), ((1, 1),), "a", exact_version=0)))
        await asyncio.sleep(0)
        change()
        with pytest.raises(QuartetError) as refused:
            await asyncio.wait_for(call, 5)
        assert refused.value.reason in ("VERSION_UNAVAILABLE", "RUN_NOT_SERVED")
    assert core.submitted == 0
    await engine.close()


async def test_who_comes_while_weights_are_renamed_is_held_to_the_new_name(tmp_path: Path) -> None:
    core: Any = Core("")
    engine = engine_of(core, tmp_path, ServedWeights("", 0, b""))
    calls: list[asyncio.Future[Any]] = []
    core.meanwhile["label"] = lambda: calls.append(asyncio.ensure_future(anext(engine.generate(pinned()))))
    await engine.swap(None, ServedWeights("", 1, b""))
    with pytest.raises(QuartetError) as refused:
        await asyncio.wait_for(calls[0], 5)
    assert refused.value.reason == "VERSION_UNAVAILABLE"
    await engine.close()


@pytest.mark.parametrize("failing", ["quartet_wipe", "label", "quartet_load raises", "quartet_load"])
async def test_loaded_weights_never_answer_under_the_old_version(failing: str, tmp_path: Path) -> None:
    """Invariant 3: what fails between load and label ends the engine; what fails before changes nothing."""
    core: Any = Core(failing)
    served = ServedWeights("", 0, b"")
    engine = engine_of(core, tmp_path, served)
    engine._workers._unsound = True
    staged = await engine.stage({})
    with pytest.raises(QuartetError, match="INTERNAL"):
        await engine.swap(staged, ServedWeights("r", 1, b""))
    untouched = failing == "quartet_load"
    assert engine.info().served == served
    assert (engine.info().closed, core.paused) == ((False, False) if untouched else (True, True))
    await engine.close()


async def test_that_versions_are_reloaded_is_said_once(tmp_path: Path) -> None:
    core: Any = Core("")
    engine = engine_of(core, tmp_path)
    with capture_logs() as told:
        for version, core.reloads in enumerate(["", "packed", "packed", "", "moved"], 1):
            await engine.swap(await engine.stage({}), ServedWeights("r", version, b""))
    said = [one["why"] for one in told if one["event"] == "weights_are_reloaded_layer_by_layer"]
    assert said == ["packed", "moved"]
    await engine.close()


@pytest.mark.parametrize("failing", ["", "quartet_fetch"])
async def test_memory_is_touched_and_weights_are_fetched_before_a_pause(failing: str, tmp_path: Path) -> None:
    """In the first pause fresh pages would cost a third of it; what is not fetched is read in the pause."""
    core: Any = Core(failing)
    engine = engine_of(core, tmp_path)
    for version in (1, 2):
        staged = await engine.stage({})
        assert not core.paused
        await engine.swap(staged, ServedWeights("r", version, b""))
    fetched = ["quartet_fetch"] * (1 if failing else 3)  # in three pieces
    assert core.asked == ["quartet_warm", *fetched, "quartet_load", *fetched, "quartet_load"]
    await engine.close()


@pytest.mark.parametrize("kept", ["no room", "a piece", "another version"])
def test_a_worker_keeps_nothing_of_a_version_beyond_a_load(
    kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staged files lie in memory, and what is fetched on the device: the next version may be hours away."""
    from quartet_inference.vllm import fetched
    from quartet_inference.vllm.worker import WeightWorker

    def no_model() -> None:
        raise RuntimeError("it is as far as this")

    monkeypatch.setattr(fetched, "PIECE_BYTES", 4096)
    monkeypatch.setattr(fetched, "SMALL_BYTES", 0 if kept == "no room" else 1 << 20)
    path, loaded = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    for one in (path, loaded):
        save_file({"a": torch.zeros(2048), "b": torch.zeros(2048)}, one)
    worker = WeightWorker()
    worker.device, worker.model_runner = torch.device("cpu"), SimpleNamespace(get_model=no_model)
    assert worker.quartet_fetch(str(path)) == {"ok": True, "more": kept != "no room"}
    held = weakref.ref(worker.quartet_fetched)
    gc.disable()
    try:
        answer = worker.quartet_load(str(loaded if kept == "another version" else path))
        assert not answer["touched"] and "as far as this" in answer["why"]
        assert held() is None and str(path) not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


async def test_keys_that_cannot_be_wiped_end_the_engine(tmp_path: Path) -> None:
    core: Any = Core("quartet_wipe")
    engine = engine_of(core, tmp_path)
    engine._workers._unsound = True
    await engine._workers.heal()
    assert engine.info().closed and core.paused
    await engine.close()


def shared_by_workers(core: int) -> list[str]:
    """What the processes of a core have of vLLM's in /dev/shm."""
    children = [int(one) for one in Path(f"/proc/{core}/task/{core}/children").read_text().split()]
    maps = [line for child in children for line in Path(f"/proc/{child}/maps").read_text().splitlines()]
    return [line for line in maps if "cpushm" in line]


async def test_two_workers_take_an_update_together_and_their_end_is_told(
    make_model: Make, tmp_path: Path
) -> None:
    """Trap 7: a fault in a worker's call must not be taken for the answer to the next."""

    def make(seed: int) -> Any:
        return make_model(seed, head_dim=32)

    driver = await asyncio.to_thread(
        launch, tmp_path, make, max_lora_rank=8, args={"tensor_parallel_size": 2}
    )
    engine = driver.engine
    try:
        assert driver.difference(await driver.ask(PROMPT)) <= TOLERANCE["vllm"]
        assert os.listdir(environment.socket_folder()), "vLLM's own are nowhere else"
        cores = engine._running.llm.engine_core.resources.engine_manager.processes
        shared = [line for core in cores for line in shared_by_workers(core.pid)]
        assert shared and all(line.endswith(" (deleted)") for line in shared), "it has a name, and would stay"
        torn = await engine.stage(weights_of(make(1)))
        await engine.stage(weights_of(make(2)))  # the first is in no worker any more
        tear(torn.path, 100)
        for _ in range(2):
            with pytest.raises(QuartetError, match="could not be loaded"):
                await engine.swap(torn, ServedWeights("r", 7, b""))
        adapter = random_adapter(make(0), 3)
        unfit = replace(adapter, config=adapter.config.replace("target_modules", "targets"))
        for _ in range(2):
            with pytest.raises(QuartetError, match="refused by vLLM"):
                await load(engine, "a", 0, unfit)
        await load(engine, "a", 0, adapter)
        told = await driver.ask(PROMPT, run_id="a")
        assert told.difference({0: adapter.merged}) <= TOLERANCE["vllm"]
        [call] = await caught_midway(
            engine, lambda: [asyncio.create_task(driver.ask(PROMPT, max_tokens=100))], completions=1, tokens=5
        )
        version = await driver.update(1)
        await engine.resume()
        told = await call
        assert set(told.versions) == {0, version} and driver.difference(told) <= TOLERANCE["vllm"]
        staged = await engine.stage(weights_of(make(3)))
        [call] = await caught_midway(
            engine, lambda: [asyncio.create_task(driver.ask([1], max_tokens=250))], completions=1, tokens=1
        )
        await engine.resume()
        # running.py 2: vLLM leaves those waiting who have asked a core that ends.
        for process in cores:
            os.kill(process.pid, signal.SIGSTOP)
        swap = asyncio.create_task(engine.swap(staged, ServedWeights("r", 9, b"")))
        await until(lambda: bool(engine._running.llm.engine_core.utility_results))
        for process in cores:
            os.kill(process.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            for waiting in (call, swap):
                with pytest.raises(QuartetError) as ended:
                    await waiting
                assert ended.value.reason == "NOT_READY" and engine.info().closed
        await until(lambda: bool(engine.info().ended))
        with pytest.raises(QuartetError):
            await driver.ask([1])
    finally:
        await engine.close()
