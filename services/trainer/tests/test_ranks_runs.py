"""What else ranks do together: experts, versions in another dtype, refusals that leave a run as it was."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from quartet.v1 import trainer_service_pb2 as pb

from .conftest import VOCAB
from .ranked import Ranked

EXPERTS_OWN = pb.LoraSpec(rank=2, alpha=4.0, target_parameters=["experts"], publish_merged=True)


@pytest.fixture(scope="module")
def experts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture of experts, of which some get no token on some rank."""
    torch.manual_seed(3)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=128,
    )
    path = tmp_path_factory.mktemp("experts")
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


async def steps(trainer: Any, run_id: str, make_samples: Any, **spec: Any) -> Any:
    """(loss, norm) of a few steps, the last diagnostics."""
    await trainer.create(run_id, learning_rate=1e-4, **spec)
    seen, done = [], None
    for step in range(3):
        done = await trainer.forward_backward(2 * step + 1, make_samples(seed=step), run_id)
        stepped = await trainer.stub.OptimStep(pb.OptimStepRequest(run_id=run_id, seq_id=2 * step + 2))
        seen.append((done.loss, stepped.grad_norm))
    return np.array(seen), dict(done.diagnostics)


async def published(trainer: Any, run_id: str, samples: Any) -> Any:
    """Log-probabilities of the version after these steps."""
    await trainer.stub.PublishWeights(pb.PublishWeightsRequest(run_id=run_id, seq_id=7))
    return await trainer.forward(samples, run_id=run_id, policy_version=3)


@pytest.mark.parametrize("lora", [None, EXPERTS_OWN])
async def test_a_mixture_of_experts_trains_as_in_one_process(
    serve_trainer: Callable[..., Any],
    call_ranks: Callable[..., Any],
    experts_folder: Path,
    make_samples: Any,
    lora: pb.LoraSpec | None,
) -> None:
    """The whole of it, and low-rank matrices of its experts, with layers computed anew."""
    spec = {"base_model": str(experts_folder), "gradient_checkpointing": lora is not None, "lora": lora}
    run_id = "whole" if lora is None else "low"
    samples = make_samples()
    scored = []
    async with serve_trainer() as alone:
        seen, diagnostics = await steps(alone, run_id, make_samples, **spec)
        scored.append(await published(alone, run_id, samples))
    async with call_ranks() as group:
        seen2, diagnostics2 = await steps(group, run_id, make_samples, **spec)
        scored.append(await published(group, run_id, samples))
    assert np.allclose(seen, seen2, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(*scored, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    assert diagnostics.keys() == diagnostics2.keys() >= {"router_load_max"}
    for name, value in diagnostics.items():
        assert diagnostics2[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


async def test_versions_are_scored_as_they_were_served(
    serve_trainer: Callable[..., Any], call_ranks: Callable[..., Any], folder: Path, make_samples: Any
) -> None:
    """Invariant 3: in bfloat16, which is what CUDA serves by default."""
    samples = make_samples()

    async def scored(trainer: Any) -> Any:
        await trainer.create(
            "r", base_model=str(folder), learning_rate=1e-2, compute_dtype="bfloat16", retain_versions=2
        )
        await trainer.one_step(1, samples)
        await trainer.publish(4)
        await trainer.forward_backward(5, samples)
        await trainer.optim_step(6)
        old = await trainer.forward(samples, policy_version=1)
        live = await trainer.forward(samples)
        again = await trainer.forward(samples, policy_version=1)
        assert old == again != live
        frames = trainer.frames(pb.ForwardRequest, pb.ForwardStart(run_id="r", tells_best=True), samples)
        best = [list(one.best) async for one in trainer.stub.Forward(frames)]
        assert [len(one) for one in best] == [len(one) for one in live]
        frames = trainer.frames(pb.ForwardRequest, pb.ForwardStart(run_id="r"), samples)
        assert not any([list(one.best) async for one in trainer.stub.Forward(frames)]), "unless asked for"
        return np.concatenate(old), np.concatenate(best)

    async with serve_trainer() as alone:
        old, best = await scored(alone)
    async with call_ranks() as group:
        old2, best2 = await scored(group)
    assert (best == best2).mean() > 0.9 and 0 < best.sum() < len(best), "of live weights, as above"
    # A master that ends in another bit may round to another bfloat16: rare, and 0.4 % of one weight.
    assert np.abs(old - old2).max() < 0.05


async def test_what_one_rank_refuses_all_do_and_the_run_goes_on(
    two_ranks: Ranked, call_ranks: Callable[..., Any], folder: Path, make_samples: Any
) -> None:
    loss = pb.LossSpec(kind=pb.LOSS_KIND_CUSTOM, custom="picky")
    samples, wild = make_samples(), make_samples()
    wild[-1].advantages[:] = [1000.0]
    async with call_ranks() as group:
        await group.create("refused", base_model=str(folder))
        for _ in range(2):
            error = await group.refused(
                group.forward_backward(1, wild, "refused", loss=loss), "INVALID_REQUEST"
            )
            raised = (
                r"losses\.picky: it raised at .*/picky_loss\.py:\d+ in picky: ValueError: an advantage beyond"
            )
            assert re.match(raised, error.message)
        stepping = group.stub.OptimStep(pb.OptimStepRequest(run_id="refused", seq_id=1))
        assert "no gradients" in (await group.refused(stepping, "INVALID_REQUEST")).message
        done = await group.forward_backward(1, samples, "refused", loss=loss)
        # Of the tokens of both ranks.
        weights = [one for s in samples for one in list(s.advantages) * len(s.sample.logprobs)]
        assert done.loss_tokens == len(weights)
        assert done.diagnostics["advantage"] == pytest.approx(sum(weights) / len(weights), abs=1e-6)
        unknown = await group.refused(group.create("away", base_model="/nowhere"), "INVALID_CONFIG")
        assert unknown.metadata["key"] == "base_model"
        # A folder that the first rank alone has, as on the first of several machines.
        first_only = f"/proc/self/task/{two_ranks.rank_pid(0)}/root{folder}"
        away = await group.refused(group.create("away", base_model=first_only), "INVALID_CONFIG")
        assert away.metadata["key"] == "base_model"
        lora = pb.LoraSpec(rank=2, alpha=2.0, modules_to_save=["norm"])
        error = await group.refused(
            group.create("saved", base_model=str(folder), lora=lora), "INVALID_CONFIG"
        )
        assert error.metadata["key"] == "lora.modules_to_save" and "ranks = 1" in error.message
        await group.stub.CloseRun(pb.CloseRunRequest(run_id="refused"))


async def test_ranks_drop_other_values(
    call_ranks: Callable[..., Any], folder: Path, make_samples: Any
) -> None:
    """Two equal samples, each of them on a rank of its own."""
    (sample,) = make_samples(groups=1, members=1)
    sample.sample.token_ids[:] = [5, 6, 7]
    sample.sample.spans[0].start, sample.sample.spans[0].length = 2, 1
    sample.sample.logprobs[:] = [-3.0]
    async with call_ranks() as group:
        for rate in (0.0, 0.5):
            lora = pb.LoraSpec(rank=4, alpha=8.0, dropout=rate)
            run_id = f"dropout-{rate}"
            await group.create(run_id, base_model=str(folder), learning_rate=0.1, lora=lora)
            # An adapter begins as nothing, of which nothing can be dropped.
            await group.forward_backward(1, [sample, sample], run_id)
            await group.stub.OptimStep(pb.OptimStepRequest(run_id=run_id, seq_id=2))
            done = await group.forward_backward(3, [sample, sample], run_id)
            apart = done.diagnostics["logprob_difference_max"] - done.diagnostics["logprob_difference_mean"]
            assert (apart > 1e-4) == (rate > 0)
