"""What the RPCs of the trainer compute, over gRPC."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from quartet.v1 import trainer_service_pb2 as pb
from quartet.weights.fetch import fetch_version
from quartet.weights.manifest import build_manifest
from quartet_trainer.publish import cast, wire_tensors
from safetensors.torch import load_file

WEIGHTS = (Path(__file__).resolve().parents[3] / "docs/weights.md").read_text()
CROSS_ENTROPY = pb.LossSpec(kind=pb.LOSS_KIND_CROSS_ENTROPY)


async def test_forward_equals_the_plain_model(
    folder: Path, serve_trainer: Any, make_samples: Any, plain_logprobs: Any
) -> None:
    samples = make_samples()
    expected = plain_logprobs(transformers.AutoModelForCausalLM.from_pretrained(folder), samples)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), retain_versions=1)
        live = await trainer.forward(samples)
        await trainer.publish(1)
        retained = await trainer.forward(samples, policy_version=0)
        for plain, ours, again in zip(expected, live, retained, strict=True):
            np.testing.assert_allclose(ours, plain, atol=1e-5)
            np.testing.assert_allclose(again, ours, atol=1e-6)
        await trainer.refused(trainer.forward(samples, policy_version=3), "VERSION_UNKNOWN")


async def test_what_the_model_does_not_have_is_not_scored(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    strange, long = make_samples(groups=2, members=1)
    strange.sample.token_ids[0] = 96
    long.sample.token_ids.extend([1] * 128)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        for one, said in ((strange, "has 96 tokens"), (long, "at most 128")):
            error = await trainer.refused(trainer.forward([one]), "INVALID_REQUEST")
            assert error.metadata["field"] == "samples[0].token_ids" and said in error.message


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


async def test_tokens_count_whose_advantage_alone_is_not_zero(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    """Of a sample with an advantage for each position; all of its tokens are counted."""
    sample = next(one for one in make_samples() if len(one.sample.logprobs) > 2)
    count = len(sample.sample.logprobs)
    loss = pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT, ratio=pb.RATIO_TREATMENT_NONE)
    norms = []
    async with serve_trainer() as trainer:
        for run_id, advantages in (("one", [0.0] * (count - 1) + [2.0]), ("none", [0.0] * count)):
            sample.advantages[:] = advantages
            await trainer.create(run_id, base_model=str(folder))
            done = await trainer.forward_backward(1, [sample], run_id=run_id, loss=loss, normalizer=1.0)
            assert (done.loss_tokens, done.tokens) == (count, len(sample.sample.token_ids))
            step = pb.OptimStepRequest(run_id=run_id, seq_id=2)
            norms.append((await trainer.stub.OptimStep(step)).grad_norm)
    assert norms[0] > 0 and norms[1] == 0


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
        told = list(wrong.verification.sample_tokens)
        covered = [len(one.sample.logprobs) for one in old + new]
        assert told == [covered[0] - wrong.verification.tokens_skipped, *covered[1:]]
        differences = list(wrong.verification.sample_differences)
        (off,) = [at for at, one in enumerate(differences) if one > 1e-4]
        assert off == len(old), "the one that was changed"
        assert differences[off] == pytest.approx(0.25 / covered[off], abs=1e-4)


@pytest.mark.parametrize("served", ["float32", "bfloat16"])
async def test_published_weights_are_the_plain_model(
    folder: Path, serve_trainer: Any, make_samples: Any, served: str
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, served))
    expected = build_manifest("r", 0, wire_tensors(cast(model.named_parameters(), served)))
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), served_dtype=served)
        published = await trainer.publish(1)
        assert (published.version, published.digest) == (0, expected.digest)
        fetched = await fetch_version(trainer.channel, "r", 0)
        assert fetched.manifest.digest == expected.digest
        assert "lm_head.weight" not in fetched.tensors  # tied: there once
        # As docs/weights.md reads it, and then what a step changed.
        program: dict[str, Any] = {}
        exec(WEIGHTS.split("```python\n")[1].split("```")[0], program)
        own = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
        async with contextlib.aclosing(program["versions"](trainer.address, "r", own)) as versions:
            assert await anext(versions) == 0
            assert all(torch.equal(one, own.get_parameter(name)) for name, one in model.named_parameters())
            await trainer.one_step(2, make_samples())
            assert await anext(versions) == 1
        read = build_manifest("r", 1, wire_tensors(cast(own.named_parameters(), served)))
        assert read.digest == (await fetch_version(trainer.channel, "r", 1)).manifest.digest


async def test_from_scratch_depends_on_the_seed_alone(folder: Path, serve_trainer: Any) -> None:
    digests = []
    async with serve_trainer() as trainer:
        for run_id, seed in (("a", 1), ("b", 1), ("c", 2)):
            await trainer.create(run_id, base_model=str(folder), from_scratch=True, seed=seed)
            request = pb.PublishWeightsRequest(run_id=run_id, seq_id=1)
            digests.append((await trainer.stub.PublishWeights(request)).digest)
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("served", ["float32", "bfloat16"])
async def test_exported_model_loads_and_equals_the_published_weights(
    folder: Path, serve_trainer: Any, make_samples: Any, served: str
) -> None:
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), served_dtype=served)
        *_, digest = await trainer.one_step(1, make_samples())
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
