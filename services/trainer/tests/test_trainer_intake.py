"""What is held of the samples of all calls together."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from quartet.errors import QuartetError, from_rpc
from quartet.v1 import trainer_service_pb2 as pb
from quartet_trainer import intake
from quartet_trainer.run import Run

from .held_up import WAIT_SECONDS, held_up, jobs_pending, until


async def overloaded(trainer: Any, samples: Any) -> bool:
    try:
        await trainer.forward(samples)
    except grpc.RpcError as error:
        assert from_rpc(error).reason == "OVERLOADED"
        return True
    return False


@pytest.mark.parametrize("caller_leaves", [False, True])
async def test_invariant_8_samples_that_wait_for_the_worker_count_until_their_job_ended(
    folder: Path, serve_trainer: Any, make_samples: Any, monkeypatch: pytest.MonkeyPatch, caller_leaves: bool
) -> None:
    samples = make_samples()
    size = sum(one.ByteSize() for one in samples)
    monkeypatch.setattr(intake, "MAX_BUFFERED_BYTES", 2 * size - 1)
    begun, go_on = held_up(monkeypatch, "forward")
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        first = asyncio.create_task(trainer.forward(samples))
        try:
            assert await asyncio.to_thread(begun.wait, WAIT_SECONDS)
            if caller_leaves:
                first.cancel()
                await asyncio.wait({first})
            # The stream was read to its end long ago, and its caller may be gone: the samples are still here.
            assert await overloaded(trainer, samples)
        finally:
            go_on.set()
        if not caller_leaves:
            assert len(await first) == len(samples)
        async with asyncio.timeout(WAIT_SECONDS):
            while await overloaded(trainer, samples):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_scores_that_nobody_waits_for_any_more_are_not_computed(
    folder: Path, serve_trainer: Any, make_samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, begun, go_on = make_samples(), threading.Event(), threading.Event()
    scored: list[Any] = []
    stepped: list[Any] = []
    batches: list[intake.Batch[Any]] = []
    plain_forward, plain_step, plain_batch = Run.forward, Run.forward_backward, intake.Batch

    def collected(*args: Any) -> intake.Batch[Any]:
        batches.append(plain_batch(*args))
        return batches[-1]

    def noted(*args: Any) -> Any:
        scored.append(args)
        return plain_forward(*args)

    def waiting(*args: Any) -> Any:
        stepped.append(args)
        begun.set()
        assert go_on.wait(WAIT_SECONDS)
        return plain_step(*args)

    monkeypatch.setattr(Run, "forward", noted)
    monkeypatch.setattr(Run, "forward_backward", waiting)
    monkeypatch.setattr(intake, "Batch", collected)
    pending = jobs_pending(monkeypatch)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        await trainer.create("other", base_model=str(folder))
        first = asyncio.create_task(trainer.forward_backward(1, samples))
        try:
            assert await asyncio.to_thread(begun.wait, WAIT_SECONDS)
            scores = [asyncio.create_task(trainer.forward(samples)) for _ in range(3)]
            step = asyncio.create_task(trainer.forward_backward(1, samples, run_id="other"))
            await until(lambda: pending() == 1 + len(scores) + 1)
            for one in (*scores[:2], step):
                one.cancel()
            await asyncio.wait([*scores[:2], step])
            # The service hears of it later than the callers are rid of their calls.
            await until(lambda: sum(one.left for one in batches) == 3)
        finally:
            go_on.set()
        await first
        assert len(await scores[2]) == len(samples) and len(scored) == 1
        # A call that changes its run is applied all the same, once: its caller may ask again.
        assert (await trainer.forward_backward(1, samples, run_id="other")).loss_tokens > 0
        assert len(stepped) == 2


async def test_a_refused_call_gives_back_what_it_held(
    folder: Path, serve_trainer: Any, make_samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "MAX_BUFFERED_BYTES", 2**12)
    samples = make_samples(groups=1)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        for _ in range(20):
            torn = trainer.frames(pb.ForwardRequest, pb.ForwardStart(run_id="r"), samples, commit=False)
            await trainer.refused(anext(aiter(trainer.stub.Forward(torn))), "STREAM_TORN")
        assert not await overloaded(trainer, samples)


@pytest.mark.parametrize("bound", ["IDLE_SECONDS", "UPLOAD_SECONDS"])
async def test_invariant_7_an_upload_that_stops_or_trickles_gives_its_bytes_back(
    folder: Path, serve_trainer: Any, make_samples: Any, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    samples = make_samples(groups=1)
    monkeypatch.setattr(intake, "MAX_BUFFERED_BYTES", sum(one.ByteSize() for one in samples))
    over = asyncio.Event()

    async def endless() -> Any:
        loss = pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT)
        start = pb.ForwardBackwardStart(run_id="r", seq_id=1, normalizer=1.0, loss=loss)
        yield pb.ForwardBackwardRequest(start=start)
        yield pb.ForwardBackwardRequest(batch=pb.SampleBatch(samples=samples))
        while bound == "UPLOAD_SECONDS" and not over.is_set():
            yield pb.ForwardBackwardRequest(batch=pb.SampleBatch())
            await asyncio.sleep(0.05)
        await over.wait()

    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        async with asyncio.timeout(WAIT_SECONDS):
            with monkeypatch.context() as patched:  # not for the next call, which does not stop
                patched.setattr(intake, bound, 0.5)
                await trainer.refused(trainer.stub.ForwardBackward(endless()), "DEADLINE")
        over.set()
        assert not await overloaded(trainer, samples)


@pytest.mark.parametrize("ends", [True, False])
async def test_who_is_refused_is_heard_out_and_held_no_longer(
    make_samples: Any, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """intake.py 3 and 4"""
    samples = make_samples()
    monkeypatch.setattr(intake, "REFUSED_SECONDS", WAIT_SECONDS if ends else 0.5)
    monkeypatch.setattr(intake, "MAX_BUFFERED_BYTES", sum(one.ByteSize() for one in samples))
    heard, taken = asyncio.Event(), intake.Intake()

    async def whole() -> Any:
        yield pb.ForwardRequest(start=pb.ForwardStart(run_id="r"))
        yield pb.ForwardRequest(batch=pb.SampleBatch(samples=samples))
        tokens = sum(len(one.sample.token_ids) for one in samples)
        yield pb.ForwardRequest(commit=pb.StreamCommit(sample_count=len(samples), token_count=tokens))

    async def bad() -> Any:
        yield pb.ForwardRequest(start=pb.ForwardStart(run_id="r"))
        yield pb.ForwardRequest(batch=pb.SampleBatch(samples=samples[1:]))
        yield pb.ForwardRequest(batch=pb.SampleBatch(samples=[pb.TrainingSample()]))
        yield pb.ForwardRequest(batch=pb.SampleBatch())
        heard.set()
        if not ends:
            await asyncio.Event().wait()

    async def count(batch: intake.Batch[Any]) -> int:
        return len(batch.samples)

    async with asyncio.timeout(WAIT_SECONDS):
        refused = asyncio.create_task(taken.use(bad(), lambda start: count))
        await heard.wait()
        assert await taken.use(whole(), lambda start: count) == len(samples), (
            "there is room for all of another"
        )
        with pytest.raises(QuartetError, match="token_ids is empty"):
            await refused


async def test_the_digest_of_two_samples_is_not_that_of_their_merge(
    make_samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """intake.py 5."""
    (whole, *_) = make_samples()
    parts = [pb.TrainingSample(sample=whole.sample), pb.TrainingSample(advantages=whole.advantages)]
    # As if a sample without tokens were one: the digest must not lean on what else refuses it.
    plain = intake.training_sample
    monkeypatch.setattr(intake, "training_sample", lambda index, _: plain(index, whole))

    async def digest(samples: list[pb.TrainingSample]) -> bytes:
        async def frames() -> Any:
            yield pb.ForwardBackwardRequest(start=pb.ForwardBackwardStart(run_id="r", seq_id=1))
            yield pb.ForwardBackwardRequest(batch=pb.SampleBatch(samples=samples))
            tokens = len(samples) * len(whole.sample.token_ids)
            yield pb.ForwardBackwardRequest(
                commit=pb.StreamCommit(sample_count=len(samples), token_count=tokens)
            )

        async def digest_of(batch: intake.Batch[Any]) -> bytes:
            return batch.digest

        return await intake.Intake().use(frames(), lambda start: digest_of)

    assert await digest(parts) != await digest([whole])
    assert await digest(parts) == await digest(parts)
