"""What is held of the samples of all calls together."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import grpc
import pytest
from quartet.errors import QuartetError, from_rpc
from quartet.v1 import rollout_pb2
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


async def use(
    samples: Any,
    work: Any,
    *more: pb.ForwardRequest,
    taken: intake.Intake | None = None,
    start: pb.ForwardStart | None = None,
) -> Any:
    """What comes of a stream of these samples, and of more frames behind its commit."""

    async def frames() -> Any:
        yield pb.ForwardRequest(start=start or pb.ForwardStart(run_id="r"))
        yield pb.ForwardRequest(batch=pb.SampleBatch(samples=samples))
        tokens = sum(len(one.sample.token_ids) for one in samples)
        yield pb.ForwardRequest(commit=pb.StreamCommit(sample_count=len(samples), token_count=tokens))
        for frame in more:
            yield frame

    return await (taken or intake.Intake()).use(frames(), lambda start: work)


async def test_work_that_fails_gives_back_what_it_held(make_samples: Any) -> None:
    """intake.py 3: otherwise batches that are refused would leave no room for those that are not."""
    taken, held = intake.Intake(), []

    async def fails(batch: intake.Batch[Any]) -> None:
        held.append(taken.held_bytes)
        raise QuartetError("INVALID_REQUEST", "no advantages")

    for _ in range(2):
        with pytest.raises(QuartetError, match="no advantages"):
            await use(make_samples(), fails, taken=taken)
        assert taken.held_bytes == (0, 0)
    assert held[0] == held[1] and held[0][0] > 0


@pytest.mark.parametrize("ends", ["left", "refused"])
async def test_an_upload_that_ends_early_gives_back_what_it_held(make_samples: Any, ends: str) -> None:
    """intake.py 3: once, of samples and of experts."""
    (sample, *_) = make_samples()
    tokens = len(sample.sample.token_ids)
    told = rollout_pb2.RoutedExperts(layers=1, slots=1, width=1, numbers=bytes(tokens - 1))
    sample.sample.experts.CopyFrom(told)
    taken, arrived, go_on = intake.Intake(), asyncio.Event(), asyncio.Event()

    async def frames() -> Any:
        yield pb.ForwardRequest(start=pb.ForwardStart(run_id="r"))
        yield pb.ForwardRequest(batch=pb.SampleBatch(samples=[sample]))
        arrived.set()
        await go_on.wait()

    async def works(batch: intake.Batch[Any]) -> None:
        pytest.fail("it has no commit")

    async with asyncio.timeout(WAIT_SECONDS):
        reading = asyncio.create_task(taken.use(frames(), lambda start: works))
        await arrived.wait()
        held, held_experts = taken.held_bytes
        assert held > 0 and held_experts == tokens - 1
        if ends == "left":
            reading.cancel()
            await asyncio.wait({reading})
        else:
            go_on.set()
            with pytest.raises(QuartetError, match="STREAM_TORN"):
                await reading
    assert taken.held_bytes == (0, 0)


async def test_nothing_is_held_of_what_was_answered(make_samples: Any) -> None:
    """The log-probabilities of a batch are as many as its tokens."""

    class Answer:
        pass

    async def answers(batch: intake.Batch[Any]) -> Answer:
        return Answer()

    taken = intake.Intake()
    answer = weakref.ref(await use(make_samples(), answers, taken=taken))
    await asyncio.sleep(0)
    gc.collect()
    assert answer() is None


@pytest.mark.parametrize("kind", ["start", "batch", "commit"])
async def test_nothing_comes_behind_the_commit(make_samples: Any, kind: str) -> None:
    """intake.py 1: who sends on counted otherwise than the commit says."""
    parts = {"start": pb.ForwardStart(), "batch": pb.SampleBatch(), "commit": pb.StreamCommit()}
    worked = []

    async def works(batch: intake.Batch[Any]) -> None:
        worked.append(batch)

    with pytest.raises(QuartetError, match=rf"INVALID_REQUEST.*a frame '{kind}' after the commit"):
        await use(make_samples(), works, pb.ForwardRequest(**{kind: parts[kind]}))
    assert not worked


async def test_experts_count_for_themselves_and_not_as_samples(
    make_samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """intake.py 3: each of the two has a bound of its own, in a call and over all of them."""
    samples, taken = make_samples(), intake.Intake()
    plain = sum(one.ByteSize() for one in samples)
    of_experts = 0
    for one in samples:
        rows = bytes(len(one.sample.token_ids) - 1)
        one.sample.experts.CopyFrom(rollout_pb2.RoutedExperts(layers=1, slots=1, width=1, numbers=rows))
        of_experts += len(rows)
    size = sum(one.ByteSize() for one in samples) - of_experts
    assert len(samples) > 1 and plain < size

    async def held(batch: intake.Batch[Any]) -> tuple[int, int]:
        return taken.held_bytes

    def bound(samples_bytes: int, experts_bytes: int, calls: int) -> None:
        monkeypatch.setattr(intake, "MAX_CALL_BYTES", samples_bytes)
        monkeypatch.setattr(intake.experts, "MAX_CALL_BYTES", experts_bytes)
        monkeypatch.setattr(intake, "MAX_BUFFERED_BYTES", calls * samples_bytes)
        monkeypatch.setattr(intake, "MAX_BUFFERED_EXPERTS_BYTES", calls * experts_bytes)

    for at_once in (1, 2):  # what was held is given back
        bound(size, of_experts, at_once)
        assert await use(samples, held, taken=taken) == (size, of_experts)
    for least, said in (((size - 1, of_experts), "bytes of samples"), ((size, of_experts - 1), "of experts")):
        bound(*least, calls=2)
        with pytest.raises(QuartetError, match=f"INVALID_REQUEST.*{said}; split the batch"):
            await use(samples, held, taken=taken)

    async def second(batch: intake.Batch[Any]) -> tuple[int, int]:
        return await use(samples, held, taken=taken)

    for of_samples, experts_bytes, said in ((2 * size - 1, 2 * of_experts, "samples"),
                                            (2 * size, 2 * of_experts - 1, "experts")):  # fmt: skip
        bound(size, of_experts, calls=2)
        assert await use(samples, second, taken=taken) == (2 * size, 2 * of_experts)
        monkeypatch.setattr(intake, "MAX_BUFFERED_BYTES", of_samples)
        monkeypatch.setattr(intake, "MAX_BUFFERED_EXPERTS_BYTES", experts_bytes)
        with pytest.raises(QuartetError, match=f"OVERLOADED.*bytes of {said} already"):
            await use(samples, second, taken=taken)
    assert taken.held_bytes == (0, 0)


@pytest.mark.parametrize("second", ["start", None])
async def test_between_start_and_commit_come_batches_alone(make_samples: Any, second: str | None) -> None:
    """intake.py 5: a start that nobody read would be no part of the digest."""
    start = pb.ForwardRequest(start=pb.ForwardStart(run_id="r"))
    other = pb.ForwardRequest(start=pb.ForwardStart(run_id="q")) if second else pb.ForwardRequest()

    async def frames() -> Any:
        for one in (start, other, pb.ForwardRequest(commit=pb.StreamCommit())):
            yield one

    def begin(started: Any) -> Any:
        return lambda batch: pytest.fail(f"it was worked on {batch}")

    with pytest.raises(QuartetError, match=rf"INVALID_REQUEST.*a frame {second!r} after the start"):
        await intake.Intake().use(frames(), begin)


async def test_the_digest_knows_batches_of_one_size_apart(make_samples: Any) -> None:
    """intake.py 5: a number that was given to one batch would answer another one with its result."""

    async def digest_of(batch: intake.Batch[Any]) -> bytes:
        return batch.digest

    samples, digests = make_samples(), []
    digests.append(await use(samples, digest_of))
    digests.append(await use(samples, digest_of))
    samples[-1].advantages[0] += 1.0
    digests.append(await use(samples, digest_of))
    samples[-1].sample.token_ids[-1] = (samples[-1].sample.token_ids[-1] + 1) % 32
    digests.append(await use(samples, digest_of))
    digests.append(await use(samples, digest_of, start=pb.ForwardStart(run_id="r", temperature=0.5)))
    assert digests[0] == digests[1] and len(set(digests)) == 4


@pytest.mark.parametrize("first", [None, "batch", "commit"])
async def test_a_stream_begins_with_its_start(first: str | None) -> None:
    parts = {"batch": pb.SampleBatch(), "commit": pb.StreamCommit()}

    async def frames() -> Any:
        if first is not None:
            yield pb.ForwardRequest(**{first: parts[first]})

    said = f"INVALID_REQUEST.*the first frame is '{first}'" if first else "STREAM_TORN.*before its start"
    with pytest.raises(QuartetError, match=said):
        await intake.Intake().use(frames(), lambda start: pytest.fail("there is no start"))


@pytest.mark.parametrize(
    ("pauses_s", "large", "said", "waited_for"),
    [
        ([29.0] * 10, "", None, None),
        ([29.0, 31.0], "", "no frame came for 30 s", "frame"),
        ([29.0] * 11, "", "the upload took longer than 300 s", "commit"),
        ([29.0] * 11, "sample", None, None),
        ([29.0] * 11, "experts", None, None),
        ([29.0] * 20, "experts", "the upload took longer than 400 s", "commit"),
    ],
)
async def test_how_long_an_upload_may_take(
    make_samples: Any,
    monkeypatch: pytest.MonkeyPatch,
    pauses_s: list[float],
    large: str,
    said: str | None,
    waited_for: str | None,
) -> None:
    """intake.py 3: each frame has its time from the one before; 100 seconds' bytes have as much more."""
    (sample, *_) = make_samples()
    tokens = len(sample.sample.token_ids)
    if large == "experts":
        told = rollout_pb2.RoutedExperts(layers=1, slots=1, width=1, numbers=bytes(tokens - 1))
        sample.sample.experts.CopyFrom(told)
    if large:
        monkeypatch.setattr(intake, "UPLOAD_BYTES_PER_SECOND", sample.ByteSize() / 100)
    loop, late_s = asyncio.get_running_loop(), [0.0]
    plain = loop.time
    monkeypatch.setattr(loop, "time", lambda: plain() + late_s[0])

    async def frames() -> Any:
        yield pb.ForwardRequest(start=pb.ForwardStart(run_id="r"))
        yield pb.ForwardRequest(batch=pb.SampleBatch(samples=[sample]))
        for pause_s in pauses_s:
            late_s[0] += pause_s
            for _ in range(3):  # the loop looks at its clock
                await asyncio.sleep(0)
            yield pb.ForwardRequest(batch=pb.SampleBatch())
        yield pb.ForwardRequest(commit=pb.StreamCommit(sample_count=1, token_count=tokens))

    async def count(batch: intake.Batch[Any]) -> int:
        return len(batch.samples)

    taken = intake.Intake()
    if said is None:
        assert await taken.use(frames(), lambda start: count) == 1
    else:
        with pytest.raises(QuartetError, match=f"DEADLINE.*{said}") as raised:
            await taken.use(frames(), lambda start: count)
        assert raised.value.metadata["waited_for"] == waited_for
    assert taken.held_bytes == (0, 0)
