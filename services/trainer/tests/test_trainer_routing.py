"""Mixture-of-experts models: what the routers did, against the model's own router logits, and training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from quartet.v1 import trainer_service_pb2 as pb
from quartet.weights.fetch import fetch_version
from quartet_trainer.logprobs import PolicyForward
from quartet_trainer.model import load_model
from quartet_trainer.packing import pack
from quartet_trainer.routing import ANSWER_PROBABILITIES, Routing, routing_values
from quartet_trainer.sample import make_sample

Make = Callable[..., Any]
EXPERTS, CHOICES, LAYERS = 6, 2, 2


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Qwen3-MoE whose routers have clear preferences."""
    torch.manual_seed(4)
    config = transformers.Qwen3MoeConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=64, moe_intermediate_size=16, num_experts=EXPERTS, norm_topk_prob=True,
        num_experts_per_tok=CHOICES, tie_word_embeddings=True, max_position_embeddings=128,
        initializer_range=0.2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("mixture")
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def routed(folder: Path, samples: list[pb.TrainingSample]) -> dict[str, float]:
    """The figures from the definition, in numpy, one sample at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    logits: list[list[np.ndarray]] = [[] for _ in range(LAYERS)]
    for one in samples:
        read = torch.tensor([list(one.sample.token_ids)[:-1]])
        with torch.no_grad():
            found = model(read, output_router_logits=True).router_logits
        for layer, values in enumerate(found):
            logits[layer].append(values.double().numpy())
    largest, unused, entropies = [], [], []
    for parts in logits:
        all_TE = np.concatenate(parts)
        p_TE = np.exp(all_TE - all_TE.max(1, keepdims=True))
        p_TE /= p_TE.sum(1, keepdims=True)
        counts = np.bincount(np.argsort(-all_TE, 1)[:, :CHOICES].flatten(), minlength=EXPERTS)
        largest.append(counts.max() / counts.mean())
        unused.append((counts == 0).mean())
        entropies.append(-(p_TE * np.log(p_TE)).sum(1).mean())
    return {
        "router_load_max": max(largest),
        "router_load_violation": float(np.mean(largest)) - 1,
        "router_unused_experts": float(np.mean(unused)),
        "router_entropy": float(np.mean(entropies)),
    }


@pytest.mark.parametrize("settings", [{}, {"microbatch_tokens": 30}, {"gradient_checkpointing": True}])
async def test_the_figures_are_those_of_the_definition(
    serve_trainer: Make, make_samples: Make, mixture: Path, settings: dict[str, Any]
) -> None:
    """Whatever the micro-batches; a layer computed anew counts once. Samples without advantage count, too."""
    samples = make_samples(groups=9, members=1)
    samples[2].advantages[0] = 0.0
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(mixture), **settings)
        for seq_id in (1, 2):  # of each batch by itself
            done = await trainer.forward_backward(seq_id, samples)
            found = {name: value for name, value in done.diagnostics.items() if name.startswith("router_")}
            assert found == pytest.approx(routed(mixture, samples), rel=1e-5)
    assert found["router_load_violation"] > 0.1 and found["router_entropy"] < np.log(EXPERTS)


def test_promise_1_no_token_is_dropped_and_no_padding_counted(mixture: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(mixture).eval()
    policy, routing = PolicyForward(model, torch.device("cpu"), None), Routing(model)
    samples = [make_sample(i, list(range(4 + 9 * i)), [(1, 3 + 9 * i, 0)], [], []) for i in range(4)]
    (batch,) = pack(samples, range(4), 1000, 256)
    assert not batch.present_T.all()
    with routing.watched(batch.present_T), torch.no_grad():
        watched, _ = policy(batch, 1.0)
    table = routing.table()
    assert table is not None and table.shape == (LAYERS, EXPERTS + 2)
    tokens = sum(3 + 9 * i for i in range(4))
    assert table[:, :-2].sum(1).tolist() == [CHOICES * tokens] * LAYERS
    assert table[:, -1].tolist() == [tokens] * LAYERS
    with torch.no_grad():
        plain, _ = policy(batch, 1.0)
    assert torch.equal(watched, plain)
    assert torch.equal(routing.table(), table), "nothing is counted outside"
    routing.begin()
    assert routing.table() is None


async def test_frozen_routers_stay_as_they_are(
    serve_trainer: Make, make_samples: Make, mixture: Path, folder: Path
) -> None:
    """They are published as they came and do not count as trainable; a run goes on from its state."""
    base = transformers.AutoModelForCausalLM.from_pretrained(mixture).state_dict()
    found = []
    async with serve_trainer() as trainer:
        refused = await trainer.refused(
            trainer.create("dense", base_model=str(folder), freeze_routers=True), "INVALID_CONFIG"
        )
        assert refused.metadata["key"] == "freeze_routers"
        lora = pb.LoraSpec(rank=2, alpha=4)
        refused = await trainer.refused(
            trainer.create("lora", base_model=str(mixture), lora=lora, freeze_routers=True), "INVALID_CONFIG"
        )
        assert refused.metadata["key"] == "freeze_routers"
        state = await trainer.create(base_model=str(mixture), freeze_routers=True)
        routers = [name for name in base if name.endswith("mlp.gate.weight")]
        frozen = sum(base[name].numel() for name in routers)
        assert state.parameters - state.trainable_parameters == frozen > 0
        for step in range(2):
            await trainer.one_step(3 * step + 1, make_samples(seed=step))
        await trainer.save(7, "two")
        published = await fetch_version(trainer.channel, "r", 2)
        found.append(await trainer.one_step(8, make_samples(seed=2)))
    for name, one in published.tensors.items():
        assert (bytes(one.data) == base[name].numpy().tobytes()) == (name in routers), name
    async with serve_trainer() as trainer:
        state = await trainer.create(base_model=str(mixture), freeze_routers=True)
        assert state.applied_seq_id == 7
        found.append(await trainer.one_step(8, make_samples(seed=2)))
    assert found[0] == found[1]


async def test_a_run_that_moves_routers_does_not_begin_with_a_state_that_froze_them(
    serve_trainer: Make, make_samples: Make, mixture: Path
) -> None:
    """beginning.py 1: their moments would be of other steps than the rest's. The other way round it may."""
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(mixture), freeze_routers=True)
        await trainer.one_step(1, make_samples())
        path = (await trainer.save(4, "there")).path
        moving = {"base_model": str(mixture), "initial_state": path}
        refused = await trainer.refused(trainer.create("moving", **moving), "INVALID_CONFIG")
        assert refused.metadata["key"] == "initial_state" and "set freeze_routers" in refused.message
        await trainer.create("frozen", freeze_routers=True, **moving)


SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1, "intermediate_size": 32, "max_position_embeddings": 64}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "is_counted"),
    [
        (transformers.AriaTextConfig(**SIZES, head_dim=16, moe_num_experts=4, moe_topk=2), True),
        (transformers.DogeConfig(**SIZES, is_moe=True, num_experts=4, num_experts_per_tok=1), False),
        (transformers.JetMoeConfig(**SIZES, kv_channels=16, num_local_experts=4), False),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)  # fmt: skip
def test_routers_of_every_form_let_a_model_compute(config: Any, is_counted: bool) -> None:
    """routing.py 3: one that says its choices is counted, whatever its configuration calls their number."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    policy, routing = PolicyForward(model, torch.device("cpu"), None), Routing(model)
    (batch,) = pack([make_sample(0, list(range(9)), [(1, 8, 0)], [], [])], range(1), 1000, 256)
    with routing.watched(batch.present_T), torch.no_grad():
        policy(batch, 1.0)
    table = routing.table()
    assert (table is not None) == is_counted
    if table is not None:
        assert table[0, :-2].sum() == 2 * 8 and 0 < routing_values(table)["router_entropy"] <= np.log(4)


def test_routers_that_answer_with_probabilities_have_the_entropy_of_their_logits() -> None:
    config = transformers.Gemma4TextConfig(
        **SIZES, head_dim=16, global_head_dim=16, num_global_key_value_heads=1, hidden_size_per_layer_input=0,
        layer_types=["full_attention"], vocab_size_per_layer_input=96, enable_moe_block=True, num_experts=4,
        top_k_experts=2, moe_intermediate_size=16, initializer_range=2.0,
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    policy, routing = PolicyForward(model, torch.device("cpu"), None), Routing(model)
    logits: list[np.ndarray] = []
    (router,) = [module for module in model.modules() if type(module).__name__ in ANSWER_PROBABILITIES]
    router.proj.register_forward_hook(lambda _, __, output: logits.append(output.double().numpy()))
    (batch,) = pack([make_sample(0, list(range(9)), [(1, 8, 0)], [], [])], range(1), 1000, 256)
    with routing.watched(batch.present_T), torch.no_grad():
        policy(batch, 1.0)
    (all_TE,) = logits
    p_TE = np.exp(all_TE) / np.exp(all_TE).sum(1, keepdims=True)
    expected = -(p_TE * np.log(p_TE)).sum(1)[batch.present_T].mean()
    assert expected < 0.9 * np.log(4), "the routers prefer some experts"
    table = routing.table()
    assert table is not None
    assert routing_values(table)["router_entropy"] == pytest.approx(expected, rel=1e-5)


async def test_a_dense_model_reports_nothing_of_routers(
    serve_trainer: Make, make_samples: Make, folder: Path
) -> None:
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(folder))
        done = await trainer.forward_backward(1, make_samples())
        assert not [name for name in done.diagnostics if name.startswith("router_")]


async def test_a_mixture_trains_publishes_and_scores(
    serve_trainer: Make, make_samples: Make, mixture: Path, plain_logprobs: Make
) -> None:
    samples = make_samples()
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(mixture), retain_versions=1)
        model = transformers.AutoModelForCausalLM.from_pretrained(mixture)
        for ours, plain in zip(await trainer.forward(samples), plain_logprobs(model, samples), strict=True):
            np.testing.assert_allclose(ours, plain, atol=1e-5)
        for one in samples:
            del one.advantages[:]
        likelihood = pb.LossSpec(kind=pb.LOSS_KIND_CROSS_ENTROPY)
        losses = []
        for step in range(5):
            losses.append((await trainer.forward_backward(2 * step + 1, samples, loss=likelihood)).loss)
            await trainer.optim_step(2 * step + 2)
        assert losses[-1] < 0.7 * losses[0], losses
        await trainer.publish(11)
        state = await trainer.save(12, "s", export=True)
        live = await trainer.forward(samples)
    exported = transformers.AutoModelForCausalLM.from_pretrained(state.model_path)
    for ours, plain in zip(live, plain_logprobs(exported, samples), strict=True):
        np.testing.assert_allclose(ours, plain, atol=1e-5)


def test_experts_compute_in_what_autocast_says_and_keep_their_masters(mixture: Path, tmp_path: Path) -> None:
    """experts.py: rounding the masters of the experts changes nothing where they are rounded anyway."""
    model = load_model(mixture, "m", device=torch.device("cpu"))
    policy = PolicyForward(model, torch.device("cpu"), torch.bfloat16)
    (batch,) = pack([make_sample(0, list(range(5, 30)), [(10, 15, 0)], [], [])], range(1), 1000, 256)
    wide, narrow = policy(batch, 1.0, full_precision=True)[0], policy(batch, 1.0)[0]
    narrow.sum().backward()
    held = model.model.layers[0].mlp.experts
    assert held.gate_up_proj.dtype == held.gate_up_proj.grad.dtype == torch.float32
    assert held.gate_up_proj.grad.abs().sum() > 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name:
                parameter.copy_(parameter.bfloat16())
    assert torch.equal(policy(batch, 1.0)[0], narrow)
    assert not torch.equal(policy(batch, 1.0, full_precision=True)[0], wide)
    model.save_pretrained(tmp_path)
    assert "quartet" not in (tmp_path / "config.json").read_text()
