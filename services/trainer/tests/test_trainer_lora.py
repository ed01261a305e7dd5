"""Adapters: what they compute, what is published and saved of them, and several on one base."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from quartet.v1 import trainer_service_pb2 as pb
from quartet.weights.fetch import fetch_version
from quartet_trainer.bases import Bases
from quartet_trainer.lora import Base
from quartet_trainer.model import ADAPTER_FOLDER
from quartet_trainer.spec import LoraSpec

LORA = pb.LoraSpec(rank=4, alpha=8.0)
Make = Callable[..., Any]


def cross_entropy() -> pb.LossSpec:
    return pb.LossSpec(kind=pb.LOSS_KIND_CROSS_ENTROPY)


async def train(trainer: Any, samples: Any, steps: int, run_id: str = "r", first: int = 1) -> int:
    """Forward and step; returns the next seq_id."""
    for _ in range(steps):
        await trainer.forward_backward(first, samples, run_id=run_id, loss=cross_entropy())
        await trainer.stub.OptimStep(pb.OptimStepRequest(run_id=run_id, seq_id=first + 1))
        first += 2
    return first


async def digest_of(trainer: Any, seq_id: int, run_id: str = "r") -> bytes:
    published = await trainer.stub.PublishWeights(pb.PublishWeightsRequest(run_id=run_id, seq_id=seq_id))
    return bytes(published.digest)


def assert_close(ours: Any, theirs: Any, tolerance: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


async def test_only_the_adapter_learns_and_it_is_what_is_published(
    serve_trainer: Make, make_samples: Make, folder: Path, plain_logprobs: Make
) -> None:
    samples = make_samples()
    async with serve_trainer() as trainer:
        run = await trainer.create(base_model=str(folder), lora=LORA)
        base = await trainer.forward(samples)
        # 2 layers, rank 4: q 32+32, k and v 32+16, o 32+32, gate and up 32+64, down 64+32.
        assert run.trainable_parameters == 2 * 4 * (64 + 2 * 48 + 64 + 2 * 96 + 96)
        assert run.parameters > run.trainable_parameters
        await digest_of(trainer, 1)
        next_seq = await train(trainer, samples, 3, first=2)
        await digest_of(trainer, next_seq)
        tuned = await trainer.forward(samples)
        fetched = await fetch_version(trainer.channel, "r", 3)
        config = json.loads(fetched.manifest.adapter_config)
        assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")
        assert len(fetched.tensors) == 2 * 2 * 7
        assert all(name.startswith("base_model.model.model.layers.") for name in fetched.tensors)
        assert fetched.manifest.HasField("canary")
    assert_close(base, plain_logprobs(transformers.Qwen3ForCausalLM.from_pretrained(folder), samples), 1e-5)
    assert (
        max(abs(a - b).max() for a, b in zip(map(np.array, base), map(np.array, tuned), strict=True)) > 0.05
    )


async def test_exported_merged_model_and_adapter_compute_what_the_run_computes(
    serve_trainer: Make, make_samples: Make, folder: Path, plain_logprobs: Make
) -> None:
    samples = make_samples()
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), lora=pb.LoraSpec(rank=3, alpha=5.0, rslora=True))
        next_seq = await train(trainer, samples, 3)
        ours = await trainer.forward(samples)
        state = await trainer.save(next_seq, "s", export=True)
    merged = transformers.Qwen3ForCausalLM.from_pretrained(state.model_path)
    assert_close(ours, plain_logprobs(merged, samples), 1e-5)
    base = transformers.Qwen3ForCausalLM.from_pretrained(folder)
    adapted = peft.PeftModel.from_pretrained(base, Path(state.model_path) / ADAPTER_FOLDER)
    assert_close(ours, plain_logprobs(adapted, samples), 1e-5)
    assert (Path(state.model_path) / "tokenizer_config.json").is_file()


@pytest.mark.parametrize("saved", [(), ("norm",)])
async def test_merged_versions_are_whole_models_and_verify(
    serve_trainer: Make, make_samples: Make, folder: Path, plain_logprobs: Make, saved: tuple[str, ...]
) -> None:
    samples = make_samples()
    lora = pb.LoraSpec(rank=4, alpha=8.0, publish_merged=True, modules_to_save=saved)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), lora=lora, retain_versions=3)
        next_seq = await train(trainer, samples, 3)
        await digest_of(trainer, next_seq)
        fetched = await fetch_version(trainer.channel, "r", 3)
        live = await trainer.forward(samples)
        published = await trainer.forward(samples, policy_version=3)
        await train(trainer, samples, 1, first=next_seq + 1)
        later = await trainer.forward(samples, policy_version=3)
        moved = await trainer.forward(samples)
        done = await digest_of(trainer, next_seq + 3)
        assert done != fetched.manifest.digest
    assert fetched.manifest.adapter_config == ""
    model = transformers.Qwen3ForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            raw = np.frombuffer(fetched.tensors[name].data, np.float32).copy()
            parameter.copy_(torch.from_numpy(raw).view(parameter.shape))
    assert_close(published, live, 1e-5)
    assert_close(published, plain_logprobs(model, samples), 1e-5)
    assert_close(later, published, 0.0)
    assert not np.allclose(moved[0], live[0], atol=1e-4)


async def test_sampled_tokens_are_verified_under_the_versions_that_sampled_them(
    serve_trainer: Make, make_samples: Make, folder: Path
) -> None:
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), lora=LORA, retain_versions=3)
        await digest_of(trainer, 1)
        seen, seq = [], 2
        for version in (0, 1, 2):
            samples = make_samples(groups=1, seed=version, version=version)
            for one, logprobs in zip(samples, await trainer.forward(samples), strict=True):
                one.sample.logprobs[:] = logprobs
            seen += samples
            if version < 2:
                seq = await train(trainer, make_samples(seed=version), 1, first=seq)
                await digest_of(trainer, seq)
                seq += 1
        done = await trainer.forward_backward(seq, seen, verify_logprobs=True)
    assert done.verification.tokens_skipped == 0
    assert done.verification.max_difference < 1e-5
    assert done.diagnostics["logprob_difference_max"] > 0.01


@pytest.mark.parametrize("published", [{"dropout": 0.5}, {"publish_merged": True}])
async def test_the_live_version_is_verified_as_it_was_published(
    serve_trainer: Make, make_samples: Make, folder: Path, published: dict[str, Any]
) -> None:
    """verification.py 3: nobody samples with dropout, and a merged product is rounded otherwise."""
    samples = make_samples(version=2)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), lora=pb.LoraSpec(rank=4, alpha=8.0, **published))
        seq = await train(trainer, samples, 2)
        await digest_of(trainer, seq)
        for one, logprobs in zip(samples, await trainer.forward(samples, policy_version=2), strict=True):
            one.sample.logprobs[:] = logprobs
        done = await trainer.forward_backward(seq + 1, samples, verify_logprobs=True)
    assert done.verification.tokens_compared == done.loss_tokens
    assert done.verification.max_difference == 0.0
    assert done.diagnostics["logprob_difference_max"] > 0.0


async def test_runs_on_one_base_do_not_touch_each_other(
    serve_trainer: Make, make_samples: Make, folder: Path, tmp_path: Path
) -> None:
    mine, theirs = make_samples(seed=1), make_samples(seed=2)
    async with serve_trainer() as trainer:
        await trainer.create("r", base_model=str(folder), lora=LORA)
        seq = await train(trainer, mine, 4)
        alone = await digest_of(trainer, seq)
        await trainer.stub.CloseRun(pb.CloseRunRequest(run_id="r"))
    shutil.rmtree(tmp_path / "states")
    async with serve_trainer() as trainer:
        await trainer.create("r", base_model=str(folder), lora=LORA)
        seq = 1
        for step in range(4):
            seq = await train(trainer, mine, 1, first=seq)
            if step == 0:
                other = pb.LoraSpec(rank=7, alpha=1.0, target_modules=["q_proj", "down_proj"])
                await trainer.create("other", base_model=str(folder), lora=other, seed=5)
                await trainer.create("third", base_model=str(folder), lora=LORA)
            # Gradients of one accumulate while the other steps.
            await trainer.forward_backward(2 * step + 1, theirs, run_id="other", loss=cross_entropy())
            if step == 2:
                await trainer.stub.CloseRun(pb.CloseRunRequest(run_id="third"))
            request = pb.OptimStepRequest(run_id="other", seq_id=2 * step + 2)
            assert (await trainer.stub.OptimStep(request)).grad_norm > 0
        assert await digest_of(trainer, seq) == alone
        other_digest = await digest_of(trainer, 9, "other")
        assert other_digest != alone


async def test_runs_share_the_memory_of_their_base(folder: Path) -> None:
    from quartet_trainer.spec import OptimizerSpec, RunSpec

    loaded = []

    def load() -> Any:
        loaded.append(1)
        return transformers.Qwen3ForCausalLM.from_pretrained(folder).eval()

    bases = Bases()
    spec = RunSpec(base_model=str(folder), optimizer=OptimizerSpec(learning_rate=1.0))
    one = bases.open(folder, spec, load, None)
    a = one.join(LoraSpec(rank=2, alpha=2.0), str(folder), 0)
    assert bases.open(folder, spec.model_copy(update={"seed": 3}), load, None) is one
    b = one.join(LoraSpec(rank=2, alpha=2.0), str(folder), 1)
    assert a.model is b.model and loaded == [1]
    # Initial weights follow from the seed, whatever was there before.
    again = one.join(LoraSpec(rank=2, alpha=2.0), str(folder), 0)
    for name in a.parameters:
        assert torch.equal(a.parameters[name], again.parameters[name])
    low = next(name for name in a.parameters if "lora_A" in name)
    assert not torch.equal(a.parameters[low], b.parameters[low])
    b.close()
    with a.learning():
        assert [name for name, one in a.model.named_parameters() if one.requires_grad] == list(
            a._inner.values()
        )
    assert not [name for name, _ in a.model.named_parameters() if ".adapter1." in name]
    a.close()
    again.close()
    assert bases.open(folder, spec, load, None) is not one, "what all have left is gone, whoever refers to it"


@pytest.mark.parametrize("saved", ["layers.0.mlp", "down_proj", "norm"])
async def test_a_run_beside_one_that_trains_whole_modules_gives_the_bits_it_gives_alone(
    serve_trainer: Make, make_samples: Make, folder: Path, tmp_path: Path, saved: str
) -> None:
    """bases.py 1; whichever of the two comes first, and two of a kind."""
    whole = pb.LoraSpec(
        rank=2, alpha=4.0, target_modules=["q_proj", "up_proj"], modules_to_save=[saved], publish_merged=True
    )
    runs = {"whole": whole, "plain": LORA, "whole-too": whole, "plain-too": LORA}

    async def digests(*names: str) -> dict[str, bytes]:
        async with serve_trainer() as trainer:
            for name in names:
                await trainer.create(name, base_model=str(folder), lora=runs[name])
            for seq in (1, 3):
                for name in names:
                    await train(trainer, make_samples(), 1, name, seq)
            found = {name: await digest_of(trainer, 5, name) for name in names}
        shutil.rmtree(tmp_path / "states")
        return found

    alone = await digests("whole") | await digests("plain")
    assert await digests(*runs) == {name: alone[name.partition("-")[0]] for name in runs}


@pytest.mark.parametrize(
    ("dropout", "kind"),
    [
        (0.0, pb.OPTIMIZER_KIND_ADAMW),
        (0.2, pb.OPTIMIZER_KIND_ADAMW),
        (0.0, pb.OPTIMIZER_KIND_MUON),
        (0.0, pb.OPTIMIZER_KIND_SGD),
    ],
)
async def test_a_restored_adapter_continues_bit_equal(
    serve_trainer: Make, make_samples: Make, folder: Path, tmp_path: Path, dropout: float, kind: int
) -> None:
    lora, samples = pb.LoraSpec(rank=4, alpha=8.0, dropout=dropout), make_samples()
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), lora=lora, kind=kind)
        seq = await train(trainer, samples, 2)
        published = await digest_of(trainer, seq)
        await trainer.forward_backward(seq + 1, samples, loss=cross_entropy())  # half of a step
        await trainer.save(seq + 2, "s")
        await trainer.stub.OptimStep(pb.OptimStepRequest(run_id="r", seq_id=seq + 3))
        await train(trainer, samples, 2, first=seq + 4)
        expected = await digest_of(trainer, seq + 8)
    async with serve_trainer() as trainer:
        run = await trainer.create(base_model=str(folder), lora=lora, kind=kind)
        assert run.applied_seq_id == seq + 2
        assert (await fetch_version(trainer.channel, "r", 2)).manifest.digest == published
        await trainer.stub.OptimStep(pb.OptimStepRequest(run_id="r", seq_id=seq + 3))
        await train(trainer, samples, 2, first=seq + 4)
        assert await digest_of(trainer, seq + 8) == expected
    weights = next((tmp_path / "states").glob("r/s@*/weights.safetensors"))
    assert weights.stat().st_size < 40_000  # the adapter and nothing of the base


async def test_an_adapter_served_in_bfloat16_stands_upon_a_base_in_bfloat16(
    serve_trainer: Make, make_samples: Make, folder: Path, plain_logprobs: Make
) -> None:
    samples = make_samples()
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), lora=LORA, served_dtype="bfloat16")
        seq = await train(trainer, samples, 3)
        await digest_of(trainer, seq)
        ours = await trainer.forward(samples, policy_version=3)
        fetched = await fetch_version(trainer.channel, "r", 3)
    assert {tensor.dtype for tensor in fetched.tensors.values()} == {"BF16"}
    model = transformers.Qwen3ForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
        for name, module in model.named_modules():
            pair = [f"base_model.model.{name}.lora_{side}.weight" for side in "AB"]
            if pair[0] in fetched.tensors:
                low, high = (
                    torch.frombuffer(bytearray(one.data), dtype=torch.bfloat16).view(one.shape).float()
                    for one in map(fetched.tensors.__getitem__, pair)
                )
                module.weight += (high @ low) * 2.0
    assert_close(ours, plain_logprobs(model, samples), 1e-5)


async def test_dropout_disturbs_training_and_no_scoring(
    serve_trainer: Make, make_samples: Make, folder: Path
) -> None:
    samples = make_samples()
    async with serve_trainer() as trainer:
        await trainer.create("r", base_model=str(folder), lora=pb.LoraSpec(rank=4, alpha=8.0, dropout=0.5))
        await train(trainer, samples, 2)
        assert await trainer.forward(samples) == await trainer.forward(samples)
        one = await trainer.forward_backward(5, samples, loss=cross_entropy())
        two = await trainer.forward_backward(6, samples, loss=cross_entropy())
        assert one.loss != two.loss


async def test_promise_4_a_restored_adapter_drops_nothing_before_it_learns_again(
    serve_trainer: Make, make_samples: Make, folder: Path
) -> None:
    samples, spec = make_samples(), {"lora": pb.LoraSpec(rank=4, alpha=8.0, dropout=0.5)}
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), **spec)
        seq = await train(trainer, samples, 2)
        await digest_of(trainer, seq)
        await trainer.save(seq + 1, "s")
        canary = (await fetch_version(trainer.channel, "r", 2)).manifest.canary
        scores = await trainer.forward(samples)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), **spec)
        assert (await fetch_version(trainer.channel, "r", 2)).manifest.canary == canary
        assert await trainer.forward(samples) == scores


async def test_a_state_does_not_go_on_upon_another_base(
    serve_trainer: Make, make_samples: Make, folder: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "base"
    shutil.copytree(folder, moved)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(moved), lora=LORA)
        await trainer.save(1, "s")
    other = transformers.Qwen3ForCausalLM.from_pretrained(moved)
    with torch.no_grad():
        other.model.norm.weight.mul_(1.001)
    other.save_pretrained(moved)
    async with serve_trainer() as trainer:
        error = await trainer.refused(trainer.create(base_model=str(moved), lora=LORA), "CHECKSUM_MISMATCH")
    assert "other base weights" in error.message


async def test_the_reference_of_an_adapter_is_the_base_with_the_adapter_off(
    serve_trainer: Make, make_samples: Make, folder: Path
) -> None:
    """policy.py 2."""
    samples = make_samples()
    loss = pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT, ratio=pb.RATIO_TREATMENT_NONE, kl_coef=0.1)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), lora=LORA, reference=pb.ReferenceSpec())
        base = await trainer.forward(samples)
        seq = await train(trainer, samples, 3)
        tuned = await trainer.forward(samples)
        done = await trainer.forward_backward(seq, samples, loss=loss)
    gap = np.concatenate(base) - np.concatenate(tuned)
    assert done.diagnostics["reference_kl"] == pytest.approx(float((np.expm1(gap) - gap).mean()), rel=1e-4)


async def test_a_reference_that_follows_an_adapter_has_its_weights(
    serve_trainer: Make, make_samples: Make, folder: Path
) -> None:
    """reference.py 2 and 4."""
    samples = make_samples()
    loss = pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT, ratio=pb.RATIO_TREATMENT_NONE, kl_coef=0.1)
    found = []
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), lora=LORA, reference=pb.ReferenceSpec(sync_steps=2))
        for step in range(3):
            done = await trainer.forward_backward(2 * step + 1, samples, loss=loss)
            found.append(done.diagnostics["reference_kl"])
            await trainer.optim_step(2 * step + 2)
    assert found[0] == found[2] == 0.0 and found[1] > 0.0


@pytest.mark.parametrize(
    ("lora", "why"),
    [
        (pb.LoraSpec(alpha=1.0), "rank"),
        (pb.LoraSpec(rank=4), "alpha"),
        (
            pb.LoraSpec(rank=4, alpha=1.0, target_modules=["w_q"]),
            "no such module; its linear ones are down_proj",
        ),
        (pb.LoraSpec(rank=4, alpha=1.0, target_modules=["norm"]), "is no linear module"),
        (pb.LoraSpec(rank=4, alpha=1.0, target_modules=["lm_head"]), "one matrix"),
        (pb.LoraSpec(rank=4, alpha=1.0, modules_to_save=["embed_tokens"]), "one matrix"),
        (
            pb.LoraSpec(rank=4, alpha=1.0, target_modules=["down_proj"], modules_to_save=["mlp"]),
            "nothing is left for low-rank matrices (down_proj)",
        ),
        (pb.LoraSpec(rank=4, alpha=1.0, dropout=1.0), "dropout"),
    ],
)
async def test_an_adapter_that_cannot_be_is_refused(
    serve_trainer: Make, folder: Path, lora: pb.LoraSpec, why: str
) -> None:
    async with serve_trainer() as trainer:
        error = await trainer.refused(trainer.create(base_model=str(folder), lora=lora), "INVALID_CONFIG")
    assert why in error.message


def test_a_base_of_its_own_is_hashed_once(folder: Path) -> None:
    model = transformers.Qwen3ForCausalLM.from_pretrained(folder)
    shared = Base(model)
    before = shared.digest()
    shared.join(LoraSpec(rank=2, alpha=2.0), str(folder), 0)
    assert shared.digest() == before == Base(transformers.Qwen3ForCausalLM.from_pretrained(folder)).digest()
