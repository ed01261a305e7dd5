"""Reference models, proximal policies and adaptive coefficients, through the service."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from quartet.v1 import trainer_service_pb2 as pb
from quartet_trainer.kl_control import KlControl
from quartet_trainer.spec import LossSpec

HERE = __name__


def loss(**fields: Any) -> pb.LossSpec:
    return pb.LossSpec(**{"kind": pb.LOSS_KIND_POLICY_GRADIENT, **fields})


PENALTY = {"kl_coef": 0.5, "kl_estimator": pb.KL_ESTIMATOR_K3}


async def step(trainer: Any, seq_id: int, samples: Any, spec: pb.LossSpec) -> dict[str, float]:
    done = await trainer.forward_backward(seq_id, samples, loss=spec)
    await trainer.optim_step(seq_id + 1)
    return dict(done.diagnostics)


# -- reference models ------------------------------------------------------------------------------------


async def test_a_frozen_reference_stays_where_the_policy_began(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), reference=pb.ReferenceSpec())
        base = await trainer.forward(make_samples())
        assert (await step(trainer, 1, make_samples(), loss(**PENALTY)))["reference_kl"] == 0.0
        moved = await trainer.forward(make_samples())
        found = (await step(trainer, 3, make_samples(), loss(**PENALTY)))["reference_kl"]
        d = np.concatenate(base).astype(np.float64) - np.concatenate(moved)
        assert found == pytest.approx((np.exp(d) - d - 1).mean(), rel=1e-4) and found > 0
        saved = os.listdir((await trainer.save(5, "s")).path)
        assert "weights.safetensors" in saved and "reference.safetensors" not in saved, "reference.py 1"


async def test_a_reference_that_follows_is_the_stated_mixture(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    samples, spec = make_samples(), loss(**PENALTY)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), reference=pb.ReferenceSpec(sync_steps=2))
        kl = [(await step(trainer, seq_id, samples, spec))["reference_kl"] for seq_id in (1, 3, 5, 7)]
        # Synchronised whole after steps 2 and 4; so at the beginning of step 3 it is the policy.
        assert kl[0] == 0.0 and kl[1] > 0 and kl[2] == 0.0 and kl[3] > 0
        await trainer.stub.CloseRun(pb.CloseRunRequest(run_id="r"))
    async with serve_trainer() as trainer:
        await trainer.create(
            "half", base_model=str(folder), reference=pb.ReferenceSpec(sync_steps=1, mixup_alpha=0.25)
        )

        async def weights(seq_id: int, name: str) -> dict[str, dict[str, torch.Tensor]]:
            from safetensors.torch import load_file

            request = pb.SaveStateRequest(run_id="half", seq_id=seq_id, name=name)
            path = Path((await trainer.stub.SaveState(request)).state.path)
            return {stem: load_file(path / f"{stem}.safetensors") for stem in ("weights", "reference")}

        before = await weights(1, "before")
        await trainer.forward_backward(2, samples, run_id="half", loss=spec)
        await trainer.stub.OptimStep(pb.OptimStepRequest(run_id="half", seq_id=3))
        after = await weights(4, "after")
        for name, reference in after["reference"].items():
            mixed = 0.25 * after["weights"][name] + 0.75 * before["weights"][name]
            torch.testing.assert_close(reference, mixed, atol=1e-7, rtol=1e-6)


async def test_no_run_goes_on_beside_another_reference(
    folder: Path, serve_trainer: Any, tmp_path: Path
) -> None:
    """reference.py 1: a folder may have become another model's while the run was closed."""
    from safetensors.torch import load_file, save_file

    model = shutil.copytree(folder, tmp_path / "model")
    file = model / "model.safetensors"
    before = load_file(file)
    after = before | {"model.norm.weight": before["model.norm.weight"] * 2}
    whole, taught = pb.ReferenceSpec(), pb.ReferenceSpec(model=str(model))
    runs = {
        "whole": {"base_model": str(model), "reference": whole},
        "taught": {"base_model": str(folder), "reference": taught},
        "follows": {"base_model": str(model), "reference": pb.ReferenceSpec(sync_steps=2)},
        "free": {"base_model": str(model)},
    }
    async with serve_trainer() as trainer:
        for run_id, spec in runs.items():
            await trainer.create(run_id, **spec)
            await trainer.stub.SaveState(pb.SaveStateRequest(run_id=run_id, seq_id=1, name="s"))
            await trainer.stub.CloseRun(pb.CloseRunRequest(run_id=run_id))
        save_file(after, file, metadata={"format": "pt"})
        for run_id, key in (("whole", "base_model"), ("taught", "reference.model")):
            error = await trainer.refused(trainer.create(run_id, **runs[run_id]), "CHECKSUM_MISMATCH")
            assert f"other weights than {key} has now" in error.message
        # All that these compute with is in their states.
        for run_id in ("follows", "free"):
            assert (await trainer.create(run_id, **runs[run_id])).applied_seq_id == 1
        save_file(before, file, metadata={"format": "pt"})
        for run_id in ("whole", "taught"):
            assert (await trainer.create(run_id, **runs[run_id])).applied_seq_id == 1


async def test_another_model_teaches(
    folder: Path, serve_trainer: Any, make_samples: Any, tmp_path: Path
) -> None:
    """On-policy distillation from a model that the trainer holds: the policy comes to agree with it."""
    torch.manual_seed(99)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.num_hidden_layers, config.layer_types = 1, config.layer_types[:1]
    teacher = transformers.Qwen3ForCausalLM(config).eval()
    teacher.save_pretrained(tmp_path / "teacher")
    samples = make_samples()
    for one in samples:
        del one.advantages[:]
    one = samples[0].sample
    logits = teacher(input_ids=torch.tensor([list(one.token_ids)])).logits[0]
    start, length = one.spans[0].start, one.spans[0].length
    logp = torch.log_softmax(logits, -1)[range(start - 1, start + length - 1), list(one.token_ids)[start:]]
    distil = pb.LossSpec(kind=pb.LOSS_KIND_REFERENCE_KL, ratio=pb.RATIO_TREATMENT_NONE)
    async with serve_trainer() as trainer:
        await trainer.create(
            base_model=str(folder), reference=pb.ReferenceSpec(model=str(tmp_path / "teacher"))
        )
        (policy,) = await trainer.forward([samples[0]])
        done = await trainer.forward_backward(1, samples[:1], loss=distil)
        expected = -np.mean((logp.detach().numpy() - np.array(policy)) * np.array(policy))
        assert done.loss == pytest.approx(expected, rel=1e-4)
        # The gradient pushes each token towards the teacher's opinion of it.
        await trainer.optim_step(2, learning_rate=1e-3)
        (moved,) = await trainer.forward([samples[0]])
        direction = np.sign(logp.detach().numpy() - np.array(policy))
        assert np.sum(direction * (np.array(moved) - np.array(policy))) > 0
        gone = await trainer.refused(
            trainer.create("x", base_model=str(folder), reference=pb.ReferenceSpec(model="nowhere")),
            "INVALID_CONFIG",
        )
        assert gone.metadata["key"] == "reference.model" and gone.message.startswith("reference.model: ")


async def test_what_a_teacher_does_not_have_is_refused(
    folder: Path, serve_trainer: Any, make_samples: Any, tmp_path: Path
) -> None:
    """Its vocabulary may be padded to less than the policy's, and its sequences may end before."""
    config = transformers.AutoConfig.from_pretrained(folder)
    config.vocab_size, config.max_position_embeddings = 80, 24
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "teacher")
    samples = make_samples(groups=1, members=3)
    for one in samples:
        one.sample.token_ids[:] = [token % 80 for token in one.sample.token_ids]
    strange, long = (pb.TrainingSample.FromString(samples[2].SerializeToString()) for _ in range(2))
    strange.sample.token_ids[0] = 80
    long.sample.token_ids.extend([1] * 24)
    spec = loss(**PENALTY)
    async with serve_trainer() as trainer:
        reference = pb.ReferenceSpec(model=str(tmp_path / "teacher"))
        await trainer.create(base_model=str(folder), reference=reference)
        for one, says in (
            (strange, "token_ids is 80; the vocabulary of the reference model has 80 tokens"),
            (long, "the reference model takes at most 24"),
        ):
            call = trainer.forward_backward(1, [*samples[:2], one], loss=spec)
            error = await trainer.refused(call, "INVALID_REQUEST")
            assert error.metadata["field"] == "samples[2].token_ids" and says in error.message
        assert (await step(trainer, 1, samples, spec))["reference_kl"] > 0
        # Nobody asks it about these.
        await trainer.forward_backward(3, [strange, long], loss=loss())


async def test_references_that_samples_carry_go_before_the_held_one(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    samples = make_samples()
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        error = await trainer.refused(
            trainer.forward_backward(1, samples, loss=loss(**PENALTY)), "INVALID_REQUEST"
        )
        assert error.metadata["field"] == "samples[0].reference_logprobs"
        logprobs = await trainer.forward(samples)
        for one, logp in zip(samples, logprobs, strict=True):
            one.reference_logprobs.extend(value - 0.5 for value in logp)
        done = await trainer.forward_backward(
            1, samples, loss=loss(kl_coef=0.5, kl_estimator=pb.KL_ESTIMATOR_K2)
        )
        assert done.diagnostics["reference_kl"] == pytest.approx(0.125, rel=1e-4)
        del samples[5].reference_logprobs[:]
        error = await trainer.refused(
            trainer.forward_backward(2, samples, loss=loss(**PENALTY)), "INVALID_REQUEST"
        )
        assert error.metadata["field"] == "samples[5].reference_logprobs"


async def test_what_samples_carry_counts_although_a_reference_is_held(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    samples = make_samples()
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), reference=pb.ReferenceSpec())
        for one, logp in zip(samples, await trainer.forward(samples), strict=True):
            one.reference_logprobs.extend(value - 0.5 for value in logp)
        spec = loss(kl_coef=0.5, kl_estimator=pb.KL_ESTIMATOR_K2)
        done = await trainer.forward_backward(1, samples, loss=spec)
        assert done.diagnostics["reference_kl"] == pytest.approx(0.125, rel=1e-4)
        held = await trainer.forward_backward(2, make_samples(), loss=spec)
        assert held.diagnostics["reference_kl"] == 0.0


async def test_a_temperature_divides_the_logits_of_every_pass(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    """Scores, training, reference, proximal policy and verification: what was sampled at it is compared."""
    samples, warm = make_samples(), 1.7
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected, entropies = [], []
    for one in samples:
        ids = torch.tensor([list(one.sample.token_ids)])
        start = one.sample.spans[0].start
        with torch.no_grad():
            logp = torch.log_softmax(model(ids).logits[0, start - 1 : -1].float() / warm, -1)
        expected.append(logp.gather(1, ids[0, start:, None])[:, 0].tolist())
        entropies += (-logp.exp() * logp).sum(-1).tolist()
    ppo = {"ratio": pb.RATIO_TREATMENT_PPO, "temperature": warm, "proximal_version": 0}
    spec = loss(**PENALTY, **ppo)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), reference=pb.ReferenceSpec())
        await trainer.publish(1)
        live = await trainer.forward(samples, temperature=warm)
        published = await trainer.forward(samples, temperature=warm, policy_version=0)
        for one, logprobs, *others in zip(samples, expected, live, published, strict=True):
            assert others == [pytest.approx(logprobs, abs=1e-5)] * 2
            one.sample.logprobs[:] = logprobs
        done = await trainer.forward_backward(2, samples, loss=spec, verify_logprobs=True)
        assert done.diagnostics["reference_kl"] == 0.0
        assert done.diagnostics["mismatch_kl"] < 1e-9
        assert done.diagnostics["entropy"] == pytest.approx(np.mean(entropies), rel=1e-5)
        await trainer.optim_step(3)
        now = np.concatenate(await trainer.forward(samples, temperature=warm))
        done = await trainer.forward_backward(4, samples, loss=spec, verify_logprobs=True)
        await trainer.create("taught", base_model=str(folder), reference=pb.ReferenceSpec(model=str(folder)))
        kept = loss(**PENALTY, temperature=warm)
        taught = await trainer.forward_backward(1, samples, run_id="taught", loss=kept)
        assert taught.diagnostics["reference_kl"] == 0.0
    assert done.verification.tokens_compared > 0 and done.verification.max_difference < 1e-5
    ratios = np.exp(now - np.concatenate(expected))
    assert done.diagnostics["ratio_mean"] == pytest.approx(ratios.mean(), rel=1e-5)
    assert abs(ratios - 1).max() > 0.01


async def test_a_reference_follows_over_steps_that_were_skipped(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    """run.py 4: they are optimizer steps, so after the second one it is the policy. The coefficient does not:
    kl_control.py 1."""
    samples, spec = make_samples(), loss(**PENALTY, target_kl=1e-3)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), reference=pb.ReferenceSpec(sync_steps=2))
        await step(trainer, 1, samples, spec)
        done = await trainer.forward_backward(3, samples, loss=spec, normalizer=1e-300)
        assert done.diagnostics["reference_kl"] > 0
        assert done.diagnostics["kl_coef"] == pytest.approx(0.5 * (1 - 0.1 * 0.2))
        assert (await trainer.optim_step(4)).skipped_nonfinite
        after = await trainer.forward_backward(5, samples, loss=spec)
        assert after.diagnostics["reference_kl"] == 0.0
        assert after.diagnostics["kl_coef"] == done.diagnostics["kl_coef"]


async def test_equal_weights_have_equal_log_probabilities_in_bfloat16_too(
    folder: Path, serve_trainer: Any, make_samples: Any, plain_logprobs: Any
) -> None:
    """reference.py 4, and passes.py: a proximal policy computes as the live one does; a version that is asked
    for, and one that is verified, in float32 as it was published."""
    samples = make_samples()
    run = {"base_model": str(folder), "compute_dtype": "bfloat16", "kind": pb.OPTIMIZER_KIND_SGD}
    ppo = loss(ratio=pb.RATIO_TREATMENT_PPO, proximal_version=0, **PENALTY)
    async with serve_trainer() as trainer:
        await trainer.create(**run, served_dtype="float32", reference=pb.ReferenceSpec(sync_steps=9))
        wide = (await trainer.publish(1)).payload_bytes
        await trainer.forward_backward(2, samples)
        assert (await trainer.optim_step(3, learning_rate=0.0)).learning_rate == 0.0
        for one, logprobs in zip(samples, await trainer.forward(samples), strict=True):
            one.sample.logprobs[:] = logprobs
        found = (await trainer.forward_backward(4, samples, loss=ppo)).diagnostics
        assert found["ratio_max"] == found["ratio_mean"] == 1.0
        assert found["reference_kl"] == found["mismatch_kl"] == 0.0
        await trainer.create("served", **run)
        publish = pb.PublishWeightsRequest(run_id="served", seq_id=1)
        assert (await trainer.stub.PublishWeights(publish)).payload_bytes < 0.6 * wide
        scores = await trainer.forward(samples, run_id="served", policy_version=0)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float()
        for one, logprobs, plain in zip(samples, scores, plain_logprobs(model, samples), strict=True):
            assert logprobs == pytest.approx(plain, abs=1e-4)
            one.sample.logprobs[:] = logprobs
        done = await trainer.forward_backward(2, samples, run_id="served", verify_logprobs=True)
    assert done.verification.tokens_compared > 0 and done.verification.max_difference < 1e-6
    assert done.diagnostics["logprob_difference_max"] > 1e-3


async def test_samples_without_advantage_learn_from_the_divergence(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    samples = make_samples()
    for one in samples:
        one.advantages[:] = [0.0]
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), reference=pb.ReferenceSpec())
        await trainer.forward_backward(1, make_samples(), loss=loss())
        await trainer.optim_step(2)
        await trainer.forward_backward(3, samples, loss=loss())
        assert (await trainer.optim_step(4)).grad_norm == 0
        await trainer.forward_backward(5, samples, loss=loss(**PENALTY))
        assert (await trainer.optim_step(6)).grad_norm > 0
        for seq_id, coefficient in ((7, 0.1), (9, -0.1)):
            await trainer.forward_backward(seq_id, samples, loss=loss(entropy_coef=coefficient))
            assert (await trainer.optim_step(seq_id + 1)).grad_norm > 0


# -- the adaptive coefficient ----------------------------------------------------------------------------


def test_the_coefficient_follows_the_formula() -> None:
    control, spec = KlControl(), LossSpec(kl_coef=0.2, target_kl=0.1)
    assert control.of(spec) == 0.2
    control.observe(spec, 0.5, 10)
    control.observe(spec, 0.1, 30)
    control.step(taken=True)
    assert control.of(spec) == pytest.approx(0.2 * (1 + 0.1 * 0.2)), (
        "kl 0.2 is 1 above target; bounded by 0.2"
    )
    control.observe(spec, 0.09, 10)
    control.step(taken=True)
    assert control.of(spec) == pytest.approx(0.2 * 1.02 * (1 + 0.1 * -0.1))
    assert control.of(LossSpec(kl_coef=0.7)) == 0.7
    held = control.of(spec)
    control.observe(spec, 5.0, 10)
    control.step(taken=False)
    control.step(taken=True)
    assert control.of(spec) == held, "a skipped step measures nothing"
    control.observe(spec, math.inf, 10)
    control.step(taken=True)
    assert control.of(spec) == held


def test_the_coefficient_follows_the_mean_over_all_tokens_since_the_last_step() -> None:
    """kl_control.py 1: from the first step on, and by no more downwards than upwards."""
    control, spec = KlControl(), LossSpec(kl_coef=0.2, target_kl=0.1)
    control.observe(spec, 0.14, 10)
    control.observe(spec, 0.1, 30)
    control.step(taken=True)
    assert control.of(spec) == pytest.approx(0.2 * (1 + 0.1 * 0.1))
    control.observe(spec, 0.01, 10)
    control.step(taken=True)
    assert control.of(spec) == pytest.approx(0.2 * 1.01 * (1 - 0.1 * 0.2))


def test_another_target_moves_the_same_coefficient() -> None:
    """kl_control.py 2: it begins once; the target is that of the batch before the step."""
    control, spec = KlControl(), LossSpec(kl_coef=0.2, target_kl=0.1)
    control.observe(spec, 0.1, 10)
    control.step(taken=True)
    assert control.of(spec) == 0.2
    other = LossSpec(kl_coef=9.0, target_kl=0.2)
    control.observe(other, 0.18, 10)
    control.step(taken=True)
    assert control.of(other) == pytest.approx(0.2 * (1 - 0.1 * 0.1))
    # kl_control.py 3: a loss without one changes nothing.
    control.observe(other, 0.2, 10)
    control.observe(LossSpec(kl_coef=0.7), 5.0, 1000)
    control.step(taken=True)
    assert control.of(other) == pytest.approx(0.2 * (1 - 0.1 * 0.1))


async def test_invariant_9_reference_and_coefficient_are_restored_bit_equally(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    spec = loss(kl_coef=0.5, target_kl=1e-3, entropy_coef=0.1, target_entropy=10.0)
    run = {
        "base_model": str(folder),
        "reference": pb.ReferenceSpec(sync_steps=2, mixup_alpha=0.5),
        "retain_versions": 2,
    }

    async def rest(trainer: Any) -> list[Any]:
        # The batch before the save was measured and not stepped yet.
        await trainer.optim_step(7)
        found = [await step(trainer, seq_id, make_samples(seed=seq_id), spec) for seq_id in (8, 10, 12)]
        return [*found, (await trainer.publish(14)).digest]

    async with serve_trainer() as trainer:
        await trainer.create(**run)
        await step(trainer, 1, make_samples(seed=1), spec)
        await step(trainer, 3, make_samples(seed=2), spec)
        await trainer.forward_backward(5, make_samples(seed=3), loss=spec)
        await trainer.save(6, "mid")
        straight = await rest(trainer)
    async with serve_trainer() as trainer:
        await trainer.create(**run)
        assert await rest(trainer) == straight
    for adapted in ("kl_coef", "entropy_coef"):
        assert len({values[adapted] for values in straight[:3]}) == 3


# -- proximal policies -----------------------------------------------------------------------------------


async def test_the_ratio_is_taken_against_the_version_that_is_named(
    folder: Path, serve_trainer: Any, make_samples: Any
) -> None:
    samples = make_samples()
    ppo = {"ratio": pb.RATIO_TREATMENT_PPO, "proximal_version": 0}
    correction = pb.MismatchCorrection(mode=pb.CORRECTION_MODE_TRUNCATE, cap=1.5)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        await trainer.publish(1)
        begun = np.concatenate(await trainer.forward(samples)).astype(np.float64)
        sampled = np.concatenate([one.sample.logprobs for one in samples]).astype(np.float64)
        done = await trainer.forward_backward(2, samples, loss=loss(**ppo, correction=correction))
        assert done.diagnostics["ratio_max"] == done.diagnostics["ratio_mean"] == 1.0, "it is the live one"
        weight = np.minimum(np.exp(begun - sampled), 1.5)
        assert done.diagnostics["correction_mean"] == pytest.approx(weight.mean(), rel=1e-5)
        advantages = np.repeat([a.advantages[0] for a in samples], [len(a.sample.logprobs) for a in samples])
        assert done.loss == pytest.approx(-(weight * advantages).mean(), rel=1e-4)
        await trainer.optim_step(3)
        now = np.concatenate(await trainer.forward(samples)).astype(np.float64)
        done = await trainer.forward_backward(4, samples, loss=loss(**ppo))
        assert done.diagnostics["ratio_mean"] == pytest.approx(np.exp(now - begun).mean(), rel=1e-5)
        assert done.diagnostics["mismatch_kl"] == pytest.approx(
            np.mean(np.exp(now - sampled) - 1 - (now - sampled)), rel=1e-4
        )
        unknown = {**ppo, "proximal_version": 7}
        await trainer.refused(trainer.forward_backward(5, samples, loss=loss(**unknown)), "VERSION_UNKNOWN")
        done = await trainer.forward_backward(5, samples, loss=loss(**{**ppo, "proximal_version": 1}))
        assert done.diagnostics["ratio_max"] == 1.0, "the live one, of which nothing was published"


@pytest.mark.parametrize("budget", [40, 10_000])
async def test_losses_of_samples_do_not_depend_on_the_packing(
    folder: Path, serve_trainer: Any, make_samples: Any, budget: int
) -> None:
    samples = make_samples(groups=2)
    gspo = {
        "ratio": pb.RATIO_TREATMENT_PPO,
        "ratio_level": pb.RATIO_LEVEL_SEQUENCE,
        "aggregation": pb.AGGREGATION_SEQUENCE,
    }
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder), microbatch_tokens=budget)
        logprobs = await trainer.forward(samples)
        done = await trainer.forward_backward(1, samples, loss=loss(**gspo), normalizer=len(samples))
        expected = 0.0
        for one, logp in zip(samples, logprobs, strict=True):
            ratio = math.exp(np.mean(np.array(logp) - np.array(one.sample.logprobs)))
            a = one.advantages[0]
            expected -= min(ratio * a, min(max(ratio, 0.8), 1.2) * a) / len(samples)
        assert done.loss == pytest.approx(expected, rel=1e-5)
