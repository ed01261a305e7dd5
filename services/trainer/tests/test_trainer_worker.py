"""The one thread that computes: order, jobs whose caller left, and the bound on those that wait."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncIterator
from functools import partial

import pytest
import pytest_asyncio
import torch
from quartet.errors import QuartetError
from quartet_trainer import worker as worker_module
from quartet_trainer.worker import Worker
from structlog.testing import capture_logs

WAIT_SECONDS = 60.0


@pytest_asyncio.fixture
async def worker() -> AsyncIterator[Worker]:
    made = Worker(threads=1, deterministic=True)
    yield made
    await made.close()


async def test_promise_1_jobs_run_in_their_order_on_one_thread(worker: Worker) -> None:
    done: list[tuple[int, int]] = []

    def job(number: int) -> None:
        done.append((number, threading.get_ident()))

    await asyncio.gather(*(worker.run(partial(job, number)) for number in range(20)))
    assert [number for number, _ in done] == list(range(20))
    assert len({thread for _, thread in done} | {threading.get_ident()}) == 2


async def test_promise_2_a_job_is_finished_though_its_caller_leaves(worker: Worker) -> None:
    go_on, finished = threading.Event(), threading.Event()
    began = asyncio.Event()
    loop = asyncio.get_running_loop()

    def job() -> None:
        loop.call_soon_threadsafe(began.set)
        assert go_on.wait(WAIT_SECONDS)
        finished.set()

    caller = asyncio.create_task(worker.run(job))
    await began.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert worker.pending and not finished.is_set()
    go_on.set()
    assert await worker.run(lambda: 7) == 7
    assert finished.is_set() and not worker.pending


async def test_promise_2_closing_finishes_the_job_under_way_and_no_other() -> None:
    """But the last: by it the first of several ranks lets the others go."""
    worker, ran = Worker(threads=1, deterministic=True), list[int]()
    began, go_on = threading.Event(), threading.Event()

    def job(number: int) -> None:
        began.set()
        assert go_on.wait(WAIT_SECONDS)
        ran.append(number)

    jobs = [asyncio.create_task(worker.run(partial(job, number))) for number in range(3)]
    assert await asyncio.to_thread(began.wait, WAIT_SECONDS)
    closing = asyncio.create_task(worker.close(lambda: ran.append(-1)))
    # Those that wait are cancelled before the one under way may end.
    await asyncio.wait(jobs[1:], timeout=WAIT_SECONDS)
    go_on.set()
    await closing
    assert ran == [0, -1] and not worker.pending
    done = await asyncio.gather(*jobs, return_exceptions=True)
    assert [type(one) for one in done] == [type(None), asyncio.CancelledError, asyncio.CancelledError]


async def test_promise_3_more_jobs_than_the_bound_are_refused(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "MAX_PENDING", 3)
    go_on = threading.Event()
    held = [asyncio.create_task(worker.run(lambda: go_on.wait(WAIT_SECONDS))) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(QuartetError) as raised:
        await worker.run(lambda: None)
    assert raised.value.reason == "OVERLOADED"
    go_on.set()
    assert await asyncio.gather(*held) == [True] * 3
    assert await worker.run(lambda: "again") == "again"


@pytest.mark.parametrize("device_speaks", [True, False])
async def test_promise_4_a_job_beyond_the_memory_is_refused_with_what_to_change(
    worker: Worker, device_speaks: bool
) -> None:
    def job() -> None:
        if device_speaks:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total")
        torch.empty(2**50)  # really tried: no machine has so much

    with pytest.raises(QuartetError) as caught:
        await worker.run(job)
    assert caught.value.reason == "OVERLOADED"
    assert "microbatch_tokens" in caught.value.message and "tried to allocate" in caught.value.message.lower()
    assert await worker.run(lambda: 7) == 7


async def test_promise_4_what_the_job_held_is_given_back(worker: Worker) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def job() -> None:
        activations = torch.ones(1024)
        held.append(weakref.ref(activations))
        torch.empty(2**50)

    with pytest.raises(QuartetError, match="memory") as caught:
        await worker.run(job)
    assert held[0]() is None, "while the caller still has the error"
    assert caught.value.__context__ is None


@pytest.mark.parametrize("device", ["none", "well", "lost"])
async def test_promise_5_another_error_stays_what_it_is_and_ends_the_process_whose_device_is_lost(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """CUDA says the same of every call once a kernel faulted, and is not asked where it computes nothing."""
    ended: list[int] = []

    def synchronize() -> None:
        assert device != "none"
        if device == "lost":
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: device != "none")
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(os, "_exit", ended.append)
    with capture_logs() as logs, pytest.raises(RuntimeError, match="size"):
        await worker.run(lambda: torch.ones(2) @ torch.ones(3))
    assert ended == ([1] if device == "lost" else [])
    assert [one["event"] for one in logs] == (["device_lost"] if device == "lost" else [])
