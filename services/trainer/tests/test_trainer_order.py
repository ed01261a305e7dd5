"""Repeated calls, torn streams, states and restarts, over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from quartet.v1 import trainer_service_pb2 as pb
from quartet.weights.fetch import fetch_version
from quartet_trainer import intake
from quartet_trainer.worker import Worker
from safetensors.torch import load_file


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
async def test_invariant_9_a_restart_continues_bit_equally_from_the_newest_state(
    folder: Path, serve_trainer: Any, make_samples: Any, monkeypatch: pytest.MonkeyPatch, compute: str
) -> None:
    """run.py 3, live_state.py 1: accumulated gradients and the published version, too."""
    # The output layer in pieces, too: they are computed anew in the backward pass.
    monkeypatch.setattr("quartet_trainer.logprobs.LOGIT_CHUNK_ELEMENTS", 96 * 7)
    spec = {"base_model": str(folder), "retain_versions": 2, "max_grad_norm": 1.0, "compute_dtype": compute}
    batches = [make_samples(seed=seed) for seed in range(4)]
    async with serve_trainer() as trainer:
        await trainer.create(**spec)
        await trainer.one_step(1, batches[0])
        # Saved between two halves of a batch: accumulated gradients belong to the state.
        await trainer.forward_backward(4, batches[1])
        state = await trainer.save(5, "mid")
        assert (state.seq_id, state.policy_version) == (5, 1)
        for kind in ("weights", "moments", "gradients"):
            # Masters are float32 whatever the passes compute in.
            tensors = load_file(Path(state.path) / f"{kind}.safetensors")
            assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
        straight = [await trainer.one_step(6, batches[2]), await trainer.one_step(9, batches[3])]
    async with serve_trainer() as trainer:
        await trainer.refused(trainer.stub.GetRun(pb.GetRunRequest(run_id="r")), "RUN_UNKNOWN")
        run = await trainer.create(**spec)
        assert (run.applied_seq_id, run.policy_version, run.published_version) == (5, 1, 1)
        fetched = await fetch_version(trainer.channel, "r", 1)
        assert fetched.manifest.version == 1
        again = [await trainer.one_step(6, batches[2]), await trainer.one_step(9, batches[3])]
    assert again == straight


async def test_a_harmed_newest_state_gives_way_to_the_older_one(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        await trainer.save(1, "old")
        await trainer.one_step(2, make_samples())
        state = await trainer.save(5, "new")
        file = Path(state.path) / "weights.safetensors"
        data = bytearray(file.read_bytes())
        data[-7] ^= 4
        file.write_bytes(data)
        load = pb.LoadStateRequest(run_id="r", seq_id=6, name="new")
        await trainer.refused(trainer.stub.LoadState(load), "CHECKSUM_MISMATCH")
        assert (await trainer.create(base_model=str(folder))).policy_version == 1
    async with serve_trainer() as trainer:
        run = await trainer.create(base_model=str(folder))
        assert (run.applied_seq_id, run.policy_version) == (1, 0)
        # Which is the newest then: the next save must not let it go for the harmed one.
        listed = await trainer.stub.ListStates(pb.ListStatesRequest(run_id="r"))
        assert [state.name for state in listed.states] == ["new", "old"]


async def test_load_state_returns_and_the_run_goes_on_from_there(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        await trainer.save(1, "start")
        first = await trainer.one_step(2, make_samples())
        load = pb.LoadStateRequest(run_id="r", seq_id=5, name="start")
        for _ in range(2):  # a repeated LoadState is the same LoadState
            run = (await trainer.stub.LoadState(load)).run
            assert (run.applied_seq_id, run.policy_version) == (1, 0)
        other = await trainer.one_step(2, make_samples(seed=9))
        assert other != first
        await trainer.stub.LoadState(load)
        assert await trainer.one_step(2, make_samples()) == first
        missing = pb.LoadStateRequest(run_id="r", seq_id=5, name="nope")
        await trainer.refused(trainer.stub.LoadState(missing), "RESOURCE_UNKNOWN")


async def test_a_return_drops_the_gradients_that_the_state_does_not_have(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        await trainer.save(1, "start")
        await trainer.forward_backward(2, make_samples(seed=1))
        straight = await trainer.optim_step(3)
        load = pb.LoadStateRequest(run_id="r", seq_id=5, name="start")
        await trainer.forward_backward(4, make_samples(seed=2))
        await trainer.stub.LoadState(load)
        await trainer.refused(trainer.optim_step(2), "INVALID_REQUEST")  # there are no gradients
        await trainer.forward_backward(2, make_samples(seed=1))
        assert await trainer.optim_step(3) == straight


async def test_a_state_that_was_returned_to_is_listed_last_and_restarted_from(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    """states.py 4 and roster.py 1: in this process and in the next; of models only what was asked for."""

    async def listed(trainer: Any) -> list[tuple[str, bool]]:
        states = (await trainer.stub.ListStates(pb.ListStatesRequest(run_id="r"))).states
        return [(state.name, bool(state.model_path)) for state in states]

    async with serve_trainer(keep_last=3) as trainer:
        await trainer.create(base_model=str(folder))
        await trainer.save(1, "first", export=True)
        await trainer.one_step(2, make_samples())
        await trainer.save(5, "second")
        assert await listed(trainer) == [("first", True), ("second", False)]
        load = pb.LoadStateRequest(run_id="r", seq_id=6, name="first")
        await trainer.stub.LoadState(load)
        assert await listed(trainer) == [("second", False), ("first", True)]
    async with serve_trainer(keep_last=3) as trainer:
        run = await trainer.create(base_model=str(folder))
        assert (run.applied_seq_id, run.policy_version) == (1, 0)
        assert await listed(trainer) == [("second", False), ("first", True)]


async def test_a_repeated_call_is_applied_once(folder: Path, serve_trainer: Any, make_samples: Any) -> None:
    """Invariant 2: applied at most once."""
    samples = make_samples()
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        first, second = await asyncio.gather(*(trainer.forward_backward(1, samples) for _ in range(2)))
        assert first == second == await trainer.forward_backward(1, samples)
        await trainer.refused(trainer.forward_backward(1, samples[1:]), "SEQUENCE_CONFLICT")
        await trainer.refused(trainer.optim_step(1), "SEQUENCE_CONFLICT")
        gap = await trainer.refused(trainer.optim_step(3), "SEQUENCE_GAP")
        assert gap.metadata == {"have": "1", "want": "3"}
        stepped = await trainer.optim_step(2)
        assert stepped == await trainer.optim_step(2)
        await trainer.refused(trainer.optim_step(3), "INVALID_REQUEST")  # no gradients
        run = (await trainer.stub.GetRun(pb.GetRunRequest(run_id="r"))).run
        assert (run.applied_seq_id, run.policy_version) == (2, 1)


async def test_a_run_is_told_as_it_stands_after_one_call(
    folder: Path, serve_trainer: Any, make_samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """roster.py 2: also between the end of a job and that of its call."""
    told, plain = list[tuple[int, int]](), Worker.run

    async def then_looked_at(worker: Worker, job: Any, **options: Any) -> Any:
        result = await plain(worker, job, **options)
        with contextlib.suppress(grpc.RpcError):  # it is being opened
            run = (await trainer.stub.GetRun(pb.GetRunRequest(run_id="r"))).run
            told.append((run.applied_seq_id, run.policy_version))
        return result

    monkeypatch.setattr(Worker, "run", then_looked_at)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        await trainer.forward_backward(1, make_samples())
        await trainer.optim_step(2)
        await trainer.forward_backward(3, make_samples())
    assert told == [(0, 0), (1, 0), (2, 1)]


async def test_how_a_batch_is_cut_into_frames_does_not_make_it_another(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    """intake.py 5."""
    samples = make_samples()
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        first = await trainer.forward_backward(1, samples)
        count = sum(len(one.sample.logprobs) for one in samples)
        start = pb.ForwardBackwardStart(
            run_id="r", seq_id=1, normalizer=count, loss=pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT)
        )
        tokens = sum(len(one.sample.token_ids) for one in samples)
        commit = pb.StreamCommit(sample_count=len(samples), token_count=tokens)
        whole = [
            pb.ForwardBackwardRequest(start=start),
            pb.ForwardBackwardRequest(batch=pb.SampleBatch(samples=samples)),
            pb.ForwardBackwardRequest(commit=commit),
        ]
        assert await trainer.stub.ForwardBackward(iter(whole)) == first


async def test_a_torn_stream_applies_nothing(folder: Path, serve_trainer: Any, make_samples: Any) -> None:
    """intake.py 1 and 2."""
    samples = make_samples()
    start = pb.ForwardBackwardStart(
        run_id="r", seq_id=1, normalizer=1.0, loss=pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT)
    )
    kind = pb.ForwardBackwardRequest
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        torn = trainer.frames(kind, start, samples, commit=False)
        await trainer.refused(trainer.stub.ForwardBackward(torn), "STREAM_TORN")

        async def miscounted(**commit: int) -> Any:
            async for frame in trainer.frames(kind, start, samples, commit=False):
                yield frame
            yield kind(commit=pb.StreamCommit(**commit))

        tokens = sum(len(one.sample.token_ids) for one in samples)
        short = miscounted(sample_count=len(samples) - 1, token_count=tokens)
        await trainer.refused(trainer.stub.ForwardBackward(short), "STREAM_TORN")
        await trainer.refused(
            trainer.stub.ForwardBackward(miscounted(sample_count=len(samples), token_count=1)), "STREAM_TORN"
        )
        await trainer.refused(trainer.optim_step(1), "INVALID_REQUEST")  # there are no gradients
        assert (await trainer.create(base_model=str(folder))).applied_seq_id == 0
        assert (await trainer.forward_backward(1, samples)).loss_tokens > 0


@pytest.mark.parametrize(
    ("start", "reason", "said"),
    [
        ({"run_id": "gone"}, "RUN_UNKNOWN", "call CreateRun"),
        ({"normalizer": -1.0}, "INVALID_REQUEST", "normalizer"),
        ({"loss": pb.LossSpec()}, "INVALID_REQUEST", "loss.kind"),
    ],
)
async def test_a_start_is_refused_before_the_samples_come(
    start: dict[str, Any], reason: str, said: str,
    folder: Path, serve_trainer: Any, make_samples: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """None of them is kept: a client of a trainer that was restarted has hundreds of megabytes."""
    monkeypatch.setattr(intake, "REFUSED_SECONDS", 0.2)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        fields = {"run_id": "r", "seq_id": 1, "normalizer": 1.0, "loss": pb.LossSpec(kind=1), **start}

        async def frames() -> Any:
            yield pb.ForwardBackwardRequest(start=pb.ForwardBackwardStart(**fields))
            await asyncio.Event().wait()

        async with asyncio.timeout(10):
            error = await trainer.refused(trainer.stub.ForwardBackward(frames()), reason)
        assert said in error.message


async def test_a_teachers_log_probabilities_count_wherever_they_stand(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    """A rollout's sample is passed on as it is: whoever distils has them in there."""
    loss = pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT, kl_coef=1.0, kl_estimator=pb.KL_ESTIMATOR_K3)
    found = []
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        for number, place in enumerate((lambda one: one, lambda one: one.sample), start=1):
            samples = make_samples()
            for one in samples:
                place(one).reference_logprobs.extend([-1.5] * len(one.sample.logprobs))
            done = await trainer.forward_backward(number, samples, loss=loss)
            found.append((done.loss, done.diagnostics["reference_kl"]))
        assert found[0] == found[1] and found[0][1] > 0
        samples[0].reference_logprobs.extend([-1.0] * len(samples[0].sample.logprobs))
        refused = trainer.forward_backward(3, samples, loss=loss)
        assert "not in both" in (await trainer.refused(refused, "INVALID_REQUEST")).message


async def test_a_client_that_dies_in_its_stream_applies_nothing(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    """intake.py 1."""
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        call = trainer.stub.ForwardBackward()
        start = pb.ForwardBackwardStart(
            run_id="r", seq_id=1, normalizer=1.0, loss=pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT)
        )
        await call.write(pb.ForwardBackwardRequest(start=start))
        await call.write(pb.ForwardBackwardRequest(batch=pb.SampleBatch(samples=make_samples())))
        call.cancel()
        await asyncio.sleep(0.1)
        await trainer.refused(trainer.optim_step(1), "INVALID_REQUEST")
