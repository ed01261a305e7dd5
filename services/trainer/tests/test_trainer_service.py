"""The RPCs of the trainer over gRPC: what they compute, what they refuse, and what a restart keeps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
import transformers
from quartet.errors import QuartetError, from_rpc
from quartet.v1 import rollout_pb2
from quartet.v1 import trainer_service_pb2 as pb
from quartet.weights.fetch import fetch_version
from quartet.weights.manifest import build_manifest
from quartet_trainer.publish import cast, wire_tensors
from safetensors.torch import load_file

CROSS_ENTROPY = pb.LossSpec(kind=pb.LOSS_KIND_CROSS_ENTROPY)


async def refused(call: Awaitable[Any], reason: str) -> QuartetError:
    with pytest.raises(grpc.RpcError) as raised:
        await call
    error = from_rpc(raised.value)
    assert error.reason == reason, error
    return error


def plain_logprobs(folder: Path, sample: rollout_pb2.Sample) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.tensor(list(sample.token_ids))
    with torch.no_grad():
        logp = torch.log_softmax(model(input_ids=tokens[None]).logits[0], -1)
    covered = [p for span in sample.spans for p in range(span.start, span.start + span.length)]
    return np.array([float(logp[p - 1, tokens[p]]) for p in covered], dtype=np.float32)


# -- what is computed ------------------------------------------------------------------------------------


async def test_forward_equals_the_plain_model(folder: Path, serve_trainer: Any, make_samples: Any) -> None:
    samples = make_samples()
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), retain_versions=1)
        live = await trainer.forward(samples)
        await trainer.publish(1)
        retained = await trainer.forward(samples, policy_version=0)
        for sample, ours, again in zip(samples, live, retained, strict=True):
            np.testing.assert_allclose(ours, plain_logprobs(folder, sample.sample), atol=1e-5)
            np.testing.assert_allclose(again, ours, atol=1e-6)
        with pytest.raises(grpc.RpcError) as raised:
            await trainer.forward(samples, policy_version=3)
        assert from_rpc(raised.value).reason == "VERSION_UNKNOWN"


async def test_cross_entropy_learns(folder: Path, serve_trainer: Any, make_samples: Any) -> None:
    samples = make_samples(groups=2, members=2)
    for one in samples:
        del one.sample.logprobs[:]
        del one.advantages[:]
    count = sum(span.length for one in samples for span in one.sample.spans)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), warmup_steps=2, max_grad_norm=1.0)
        losses = []
        for step in range(25):
            done = await trainer.forward_backward(2 * step + 1, samples, loss=CROSS_ENTROPY, normalizer=count)
            assert done.loss_tokens == count
            assert done.loss == pytest.approx(-done.diagnostics["logprob_mean"], rel=1e-5)
            losses.append(done.loss)
            stepped = await trainer.optim_step(2 * step + 2)
            assert stepped.policy_version == step + 1
        assert losses[-1] < losses[0] / 4, losses


async def test_gradients_accumulate_over_calls(folder: Path, serve_trainer: Any, make_samples: Any) -> None:
    samples = make_samples()
    async with serve_trainer() as trainer:
        norms = []
        for run_id, parts in (("r", [samples]), ("halves", [samples[:6], samples[6:]])):
            await trainer.create(run_id, base_model=str(folder))
            for seq_id, part in enumerate(parts, start=1):
                await trainer.forward_backward(seq_id, part, run_id=run_id, normalizer=50.0)
            step = pb.OptimStepRequest(run_id=run_id, seq_id=len(parts) + 1)
            norms.append((await trainer.stub.OptimStep(step)).grad_norm)
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)


async def test_samples_without_advantage_change_nothing_but_the_counts(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    samples, still = make_samples(seed=1), make_samples(seed=2)
    for one in still:
        one.advantages[0] = 0.0
    async with serve_trainer() as trainer:
        norms, tokens = [], []
        for run_id, batch in (("r", samples), ("more", samples + still)):
            await trainer.create(run_id, base_model=str(folder))
            done = await trainer.forward_backward(1, batch, run_id=run_id, normalizer=50.0)
            tokens.append(done.loss_tokens)
            step = pb.OptimStepRequest(run_id=run_id, seq_id=2)
            norms.append((await trainer.stub.OptimStep(step)).grad_norm)
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)
        assert tokens[1] > tokens[0]


async def test_verification_finds_what_was_sampled_by_which_version(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    """Invariant 6: what is trained on is checked against what was sampled."""
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), retain_versions=2, learning_rate=0.05)
        await trainer.publish(1)
        old = make_samples(seed=1, version=0)
        for one, logprobs in zip(old, await trainer.forward(old), strict=True):
            one.sample.logprobs[:] = logprobs
        first = await trainer.forward_backward(2, old, verify_logprobs=True)
        assert first.verification.tokens_compared == first.loss_tokens
        assert first.verification.max_difference < 1e-5
        assert first.diagnostics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
        await trainer.optim_step(3)
        await trainer.publish(4)
        new = make_samples(seed=2, version=1)
        for one, logprobs in zip(new, await trainer.forward(new), strict=True):
            one.sample.logprobs[:] = logprobs
        both = await trainer.forward_backward(5, old + new, verify_logprobs=True)
        assert both.verification.tokens_compared == both.loss_tokens
        assert both.verification.max_difference < 1e-5
        # The live weights differ from those that sampled the old ones: the right version was looked at.
        assert both.diagnostics["logprob_difference_max"] > 0.01
        new[0].sample.logprobs[0] += 0.25
        old[0].sample.spans[0].policy_version = 9
        wrong = await trainer.forward_backward(6, old + new, verify_logprobs=True)
        assert wrong.verification.max_difference == pytest.approx(0.25, abs=1e-4)
        assert wrong.verification.tokens_skipped == old[0].sample.spans[0].length


@pytest.mark.parametrize("served", ["float32", "bfloat16"])
async def test_published_weights_are_the_plain_model(folder: Path, serve_trainer: Any, served: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, served))
    expected = build_manifest("r", 0, wire_tensors(cast(model.named_parameters(), served)))
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), served_dtype=served)
        published = await trainer.publish(1)
        assert (published.version, published.digest) == (0, expected.digest)
        fetched = await fetch_version(trainer.channel, "r", 0)
        assert fetched.manifest.digest == expected.digest
        assert "lm_head.weight" not in fetched.tensors  # tied: there once


async def test_from_scratch_depends_on_the_seed_alone(folder: Path, serve_trainer: Any) -> None:
    digests = []
    async with serve_trainer() as trainer:
        for run_id, seed in (("a", 1), ("b", 1), ("c", 2)):
            await trainer.create(run_id, base_model=str(folder), from_scratch=True, seed=seed)
            request = pb.PublishWeightsRequest(run_id=run_id, seq_id=1)
            digests.append((await trainer.stub.PublishWeights(request)).digest)
    assert digests[0] == digests[1] != digests[2]


# -- order, torn streams, restarts -----------------------------------------------------------------------


async def one_step(trainer: Any, seq_id: int, samples: Any) -> tuple[float, float, bytes]:
    done = await trainer.forward_backward(seq_id, samples)
    stepped = await trainer.optim_step(seq_id + 1)
    published = await trainer.publish(seq_id + 2)
    return done.loss, stepped.grad_norm, published.digest


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
async def test_invariant_9_a_restart_continues_bit_equally_from_the_newest_state(
    folder: Path, serve_trainer: Any, make_samples: Any, monkeypatch: pytest.MonkeyPatch, compute: str
) -> None:
    # The output layer in pieces, too: they are computed anew in the backward pass.
    monkeypatch.setattr("quartet_trainer.logprobs.LOGIT_CHUNK_ELEMENTS", 96 * 7)
    spec = {"base_model": str(folder), "retain_versions": 2, "max_grad_norm": 1.0, "compute_dtype": compute}
    batches = [make_samples(seed=seed) for seed in range(4)]
    async with serve_trainer() as trainer:
        await trainer.create(**spec)
        await one_step(trainer, 1, batches[0])
        # Saved between two halves of a batch: accumulated gradients belong to the state.
        await trainer.forward_backward(4, batches[1])
        state = await trainer.save(5, "mid")
        assert (state.seq_id, state.policy_version) == (5, 1)
        for kind in ("weights", "moments", "gradients"):
            # Masters are float32 whatever the passes compute in.
            tensors = load_file(Path(state.path) / f"{kind}.safetensors")
            assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
        straight = [await one_step(trainer, 6, batches[2]), await one_step(trainer, 9, batches[3])]
    async with serve_trainer() as trainer:
        await refused(trainer.stub.GetRun(pb.GetRunRequest(run_id="r")), "RUN_UNKNOWN")
        run = await trainer.create(**spec)
        assert (run.applied_seq_id, run.policy_version, run.published_version) == (5, 1, 1)
        fetched = await fetch_version(trainer.channel, "r", 1)
        assert fetched.manifest.version == 1
        again = [await one_step(trainer, 6, batches[2]), await one_step(trainer, 9, batches[3])]
    assert again == straight


async def test_a_harmed_newest_state_gives_way_to_the_older_one(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        await trainer.save(1, "old")
        await one_step(trainer, 2, make_samples())
        state = await trainer.save(5, "new")
        file = Path(state.path) / "weights.safetensors"
        data = bytearray(file.read_bytes())
        data[-7] ^= 4
        file.write_bytes(data)
        load = pb.LoadStateRequest(run_id="r", seq_id=6, name="new")
        await refused(trainer.stub.LoadState(load), "CHECKSUM_MISMATCH")
        assert (await trainer.create(base_model=str(folder))).policy_version == 1
    async with serve_trainer() as trainer:
        run = await trainer.create(base_model=str(folder))
        assert (run.applied_seq_id, run.policy_version) == (1, 0)


async def test_load_state_returns_and_the_run_goes_on_from_there(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        await trainer.save(1, "start")
        first = await one_step(trainer, 2, make_samples())
        load = pb.LoadStateRequest(run_id="r", seq_id=5, name="start")
        for _ in range(2):  # a repeated LoadState is the same LoadState
            run = (await trainer.stub.LoadState(load)).run
            assert (run.applied_seq_id, run.policy_version) == (1, 0)
        other = await one_step(trainer, 2, make_samples(seed=9))
        assert other != first
        await trainer.stub.LoadState(load)
        assert await one_step(trainer, 2, make_samples()) == first
        missing = pb.LoadStateRequest(run_id="r", seq_id=5, name="nope")
        await refused(trainer.stub.LoadState(missing), "RESOURCE_UNKNOWN")


async def test_a_repeated_call_is_applied_once(folder: Path, serve_trainer: Any, make_samples: Any) -> None:
    """Invariant 2: applied at most once."""
    samples = make_samples()
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        first, second = await asyncio.gather(*(trainer.forward_backward(1, samples) for _ in range(2)))
        assert first == second == await trainer.forward_backward(1, samples)
        await refused(trainer.forward_backward(1, samples[1:]), "SEQUENCE_CONFLICT")
        await refused(trainer.optim_step(1), "SEQUENCE_CONFLICT")
        gap = await refused(trainer.optim_step(3), "SEQUENCE_GAP")
        assert gap.metadata == {"have": "1", "want": "3"}
        stepped = await trainer.optim_step(2)
        assert stepped == await trainer.optim_step(2)
        await refused(trainer.optim_step(3), "INVALID_REQUEST")  # no gradients
        run = (await trainer.stub.GetRun(pb.GetRunRequest(run_id="r"))).run
        assert (run.applied_seq_id, run.policy_version) == (2, 1)


async def test_a_torn_stream_applies_nothing(folder: Path, serve_trainer: Any, make_samples: Any) -> None:
    samples = make_samples()
    start = pb.ForwardBackwardStart(
        run_id="r", seq_id=1, normalizer=1.0, loss=pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT)
    )
    kind = pb.ForwardBackwardRequest
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        torn = trainer.frames(kind, start, samples, commit=False)
        await refused(trainer.stub.ForwardBackward(torn), "STREAM_TORN")

        async def miscounted(**commit: int) -> Any:
            async for frame in trainer.frames(kind, start, samples, commit=False):
                yield frame
            yield kind(commit=pb.StreamCommit(**commit))

        tokens = sum(len(one.sample.token_ids) for one in samples)
        short = miscounted(sample_count=len(samples) - 1, token_count=tokens)
        await refused(trainer.stub.ForwardBackward(short), "STREAM_TORN")
        await refused(
            trainer.stub.ForwardBackward(miscounted(sample_count=len(samples), token_count=1)), "STREAM_TORN"
        )
        await refused(trainer.optim_step(1), "INVALID_REQUEST")  # there are no gradients
        assert (await trainer.create(base_model=str(folder))).applied_seq_id == 0
        assert (await trainer.forward_backward(1, samples)).loss_tokens > 0


async def test_a_client_that_dies_in_its_stream_applies_nothing(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
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
        await refused(trainer.optim_step(1), "INVALID_REQUEST")


@pytest.mark.parametrize("served", ["float32", "bfloat16"])
async def test_exported_model_loads_and_equals_the_published_weights(
    folder: Path, serve_trainer: Any, make_samples: Any, served: str
) -> None:
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), served_dtype=served)
        *_, digest = await one_step(trainer, 1, make_samples())
        state = await trainer.save(4, "final", export=True)
        assert [
            one.name for one in (await trainer.stub.ListStates(pb.ListStatesRequest(run_id="r"))).states
        ] == ["final"]
    exported = Path(state.model_path)
    assert "lm_head.weight" not in load_file(exported / "model.safetensors")  # tied: there once
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=getattr(torch, served))
    assert build_manifest("r", 1, wire_tensors(cast(model.named_parameters(), served))).digest == digest
    assert (exported / "tokenizer_config.json").read_bytes() == (
        folder / "tokenizer_config.json"
    ).read_bytes()
    config = transformers.AutoConfig.from_pretrained(exported)
    assert (config.use_cache, config.dtype) == (True, getattr(torch, served))


# -- what is refused -------------------------------------------------------------------------------------


async def test_create_run_refuses(folder: Path, serve_trainer: Any, tmp_path: Path) -> None:
    async with serve_trainer(max_runs=1) as trainer:
        missing = await refused(trainer.create(base_model=str(tmp_path / "absent")), "INVALID_CONFIG")
        assert str(tmp_path / "absent") in missing.message and missing.metadata["key"] == "base_model"
        empty = tmp_path / "empty"
        empty.mkdir()
        await refused(trainer.create(base_model=str(empty)), "INVALID_CONFIG")
        (empty / "config.json").write_bytes((folder / "config.json").read_bytes())
        no_weights = await refused(trainer.create(base_model=str(empty)), "INVALID_CONFIG")
        assert "from_scratch" in no_weights.metadata["remedy"]
        await refused(trainer.create("../up", base_model=str(folder)), "INVALID_REQUEST")
        await refused(trainer.create("..", base_model=str(folder)), "INVALID_REQUEST")
        dtype = await refused(trainer.create(base_model=str(folder), served_dtype="int8"), "INVALID_CONFIG")
        assert dtype.metadata["key"] == "served_dtype"
        lora = await refused(
            trainer.create(base_model=str(folder), lora=pb.LoraSpec(rank=8)), "INVALID_CONFIG"
        )
        assert lora.metadata["key"] == "alpha"
        await refused(trainer.create(base_model=str(folder), schedule=pb.SCHEDULE_COSINE), "INVALID_CONFIG")
        unserved = await refused(
            trainer.create(base_model=str(folder), gradient_checkpointing=True), "INVALID_CONFIG"
        )
        assert unserved.metadata["key"] == "gradient_checkpointing" and "later" in unserved.message
        momentum = await refused(trainer.create(base_model=str(folder), momentum=0.9), "INVALID_CONFIG")
        assert "sgd and muon" in momentum.message
        await trainer.create(base_model=str(folder))
        conflict = await refused(trainer.create(base_model=str(folder), beta1=0.5), "RUN_CONFLICT")
        assert conflict.metadata["field"] == "optimizer.beta1"
        await refused(trainer.create("second", base_model=str(folder)), "OVERLOADED")


async def test_another_spec_is_refused_after_a_restart_too(folder: Path, serve_trainer: Any) -> None:
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        await trainer.save(1, "a")
    async with serve_trainer() as trainer:
        conflict = await refused(trainer.create(base_model=str(folder), seed=3), "RUN_CONFLICT")
        assert conflict.metadata["field"] == "seed"


def broken(change: str, one: pb.TrainingSample) -> None:
    sample = one.sample
    match change:
        case "a token outside the vocabulary":
            sample.token_ids[0] = 96
        case "more tokens than positions":
            sample.token_ids.extend([1] * 128)
        case "no tokens":
            sample.Clear()
        case "a span outside the tokens":
            sample.spans[0].length += 1
        case "a span over the first token":
            sample.spans[0].start = 0
        case "overlapping spans":
            sample.spans.append(sample.spans[0])
        case "too few logprobs":
            del sample.logprobs[0]
        case "no logprobs":
            del sample.logprobs[:]
        case "a logprob that is not finite":
            sample.logprobs[0] = float("nan")
        case "an advantage that is not finite":
            one.advantages[0] = float("inf")
        case "no advantages":
            del one.advantages[:]
        case "too many reference logprobs":
            one.reference_logprobs.extend([0.0] * 20)
        case _:
            raise AssertionError(change)


CHANGES = [
    "a token outside the vocabulary",
    "more tokens than positions",
    "no tokens",
    "a span outside the tokens",
    "a span over the first token",
    "overlapping spans",
    "too few logprobs",
    "no logprobs",
    "a logprob that is not finite",
    "an advantage that is not finite",
    "no advantages",
    "too many reference logprobs",
]


async def test_malformed_batches_are_refused_by_name_and_change_nothing(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        for change in CHANGES:
            samples = make_samples()
            broken(change, samples[3])
            error = await refused(trainer.forward_backward(1, samples), "INVALID_REQUEST")
            assert "sample" in error.metadata["field"] and "[3]" in error.metadata["field"], change
        no_kind = pb.LossSpec()
        cold = pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT, temperature=0.0)
        meaningless = [
            pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT, **fields)
            for fields in (
                {"ratio": pb.RATIO_TREATMENT_DPPO, "ratio_level": pb.RATIO_LEVEL_SEQUENCE},
                {"delta": 2.0},
                {"target_kl": 0.1},
                {"correction": pb.MismatchCorrection(cap=3.0)},
                {"correction": pb.MismatchCorrection(mode=pb.CORRECTION_MODE_MASK)},
                {"custom": "mine"},
                {"ratio": 17},
            )
        ]
        for loss in (no_kind, cold, *meaningless):
            error = await refused(trainer.forward_backward(1, make_samples(), loss=loss), "INVALID_REQUEST")
            assert error.metadata["field"].startswith("loss")
        for normalizer in (0.0, -1.0, float("nan")):
            call = trainer.forward_backward(1, make_samples(), normalizer=normalizer)
            await refused(call, "INVALID_REQUEST")
        await refused(trainer.forward_backward(1, []), "INVALID_REQUEST")
        await refused(trainer.forward_backward(0, make_samples()), "INVALID_REQUEST")
        await refused(trainer.forward_backward(1, make_samples(), run_id="other"), "RUN_UNKNOWN")
        await refused(trainer.save(1, "a/b"), "INVALID_REQUEST")
        assert (await trainer.create(base_model=str(folder))).applied_seq_id == 0


async def test_a_call_that_is_too_large_is_refused(
    folder: Path, serve_trainer: Any, make_samples: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 8."""
    monkeypatch.setattr("quartet_trainer.intake.MAX_CALL_BYTES", 500)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        await refused(trainer.forward_backward(1, make_samples()), "INVALID_REQUEST")
        monkeypatch.setattr("quartet_trainer.intake.MAX_CALL_BYTES", 2**20)
        assert (await trainer.forward_backward(1, make_samples())).loss_tokens > 0


# -- what it costs ---------------------------------------------------------------------------------------


async def test_the_event_loop_answers_while_a_batch_is_computed(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        batch = asyncio.create_task(trainer.forward_backward(1, make_samples(groups=150, members=4)))
        slowest, answered = 0.0, 0
        while not batch.done():
            began = time.monotonic()
            await trainer.stub.GetRun(pb.GetRunRequest(run_id="r"))
            slowest, answered = max(slowest, time.monotonic() - began), answered + 1
            await asyncio.sleep(0.005)
        await batch
        assert answered > 2 and slowest < 1.0


async def test_cpu_time_of_a_step(serve_trainer: Any, tmp_path: Path, capsys: Any) -> None:
    """128 samples of 33 tokens in 16 groups, on a model like the main job's; the figure is printed."""
    config = transformers.Qwen3Config(
        vocab_size=320,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        tie_word_embeddings=True,
    )
    config.save_pretrained(tmp_path / "model")
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(16):
        prompt = rng.integers(0, 320, 22).tolist()
        for _ in range(8):
            sample = rollout_pb2.Sample(
                token_ids=prompt + rng.integers(0, 320, 11).tolist(),
                spans=[rollout_pb2.PolicySpan(start=22, length=11)],
                logprobs=[-5.7] * 11,
            )
            samples.append(pb.TrainingSample(sample=sample, advantages=[float(rng.normal())]))
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(tmp_path / "model"), from_scratch=True, retain_versions=3)
        await trainer.publish(1)
        spent = []
        for step in range(4):
            began = time.process_time()
            done = await trainer.forward_backward(3 * step + 2, samples, verify_logprobs=True)
            await trainer.optim_step(3 * step + 3)
            await trainer.publish(3 * step + 4)
            spent.append(time.process_time() - began)
        first = trainer.forward_backward(14, samples[:1])
        await first
        began = time.process_time()
        for _ in range(10):
            await trainer.forward_backward(14, samples[:1])
        repeated_ms = 100 * (time.process_time() - began)
    with capsys.disabled():
        print(
            f"\n128 x 33 tokens, forward, backward, verification, step, publish: {min(spent):.3f} CPU s "
            f"(compute {done.compute_ms} ms); a call that computes nothing: {repeated_ms:.1f} CPU ms"
        )
    assert min(spent) < 0.6
