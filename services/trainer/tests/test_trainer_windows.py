"""Layers that look through a window, or are no attention at all: rows are computed as their samples alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t
from quartet.v1 import trainer_service_pb2 as pb
from quartet_trainer import attention, masks, tiles
from quartet_trainer.logprobs import PolicyForward
from quartet_trainer.model import load_model
from quartet_trainer.packing import pack
from quartet_trainer.probe import probe
from quartet_trainer.sample import Sample, make_sample

CPU = torch.device("cpu")
VOCAB, WINDOW = 96, 5
TINY: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 64, "initializer_range": 0.2,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXED = ["sliding_attention", "full_attention"]
CONFIGS = [
    t.MistralConfig(**TINY, sliding_window=WINDOW),
    t.Phi3Config(**TINY, sliding_window=WINDOW),
    t.Starcoder2Config(**TINY, sliding_window=WINDOW),
    t.MixtralConfig(**TINY, sliding_window=WINDOW, num_local_experts=4),
    t.Qwen2Config(**TINY, use_sliding_window=True, sliding_window=WINDOW, layer_types=MIXED),
    t.Olmo3Config(**TINY, sliding_window=WINDOW, layer_types=MIXED),
    t.Gemma3TextConfig(**TINY, head_dim=16, sliding_window=WINDOW, layer_types=MIXED),
    t.GptOssConfig(**TINY, head_dim=16, sliding_window=WINDOW, layer_types=MIXED, num_local_experts=4),
]


def loaded(config: Any, folder: Path) -> Any:
    torch.manual_seed(3)
    t.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return load_model(folder, "m", device=CPU)


def ragged() -> list[Sample]:
    """Two groups; prompts and tails are longer than the window, and a row ends in padding."""
    made = []
    for group, prompt in enumerate(
        ([7, 3, 11, 19, 23, 5, 2, 31, 41, 8], [13, 17, 4, 9, 33, 21, 6, 28, 14, 12])
    ):
        for member, length in enumerate((8, 3, 6 + group)):
            tail = [(5 * i + 7 * member + group + 1) % VOCAB for i in range(length)]
            made.append(make_sample(len(made), prompt + tail, [(10, length, 0)], [], []))
    return made


def plain(model: Any, sample: Sample) -> torch.Tensor:
    tokens = torch.from_numpy(sample.tokens_T)
    logp = torch.log_softmax(model(input_ids=tokens[None]).logits[0].float(), -1)
    covered = torch.from_numpy(sample.covered_K)
    return logp[covered - 1, tokens[covered]]


def gradients(model: Any, logp: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    (logp * torch.linspace(-1, 1, len(logp))).sum().backward()
    return [one.grad for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_a_packed_row_is_computed_as_its_samples_alone(config: Any, tmp_path: Path) -> None:
    """masks.py 1 to 3, probe.py 1 and 2: values and gradients."""
    model = loaded(config, tmp_path)
    policy = PolicyForward(model, CPU, None)
    probe(policy, VOCAB, "m", 64)
    assert model.config.get_text_config().sliding_window == WINDOW, "the probe leaves it as it was"
    samples = ragged()
    (batch,) = pack(samples, range(len(samples)), 1000, 256)
    assert batch.needs_mask and not batch.present_T.all()
    packed, _ = policy(batch, 1.0)
    alone = torch.cat([plain(model, samples[member]) for member in batch.members])
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=0)
    for one, other in zip(gradients(model, packed), gradients(model, alone), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4 * float(other.abs().max()) + 1e-7, rtol=0)
    with masks.narrowed(model.config, 64):
        wide, _ = policy(batch, 1.0)
    assert (wide - packed).abs().max() > 1e-3, "the window cuts something off"


def test_a_row_of_one_sample_needs_no_mask_of_ours(tmp_path: Path) -> None:
    model = loaded(CONFIGS[0], tmp_path)
    (sample,) = ragged()[:1]
    (batch,) = pack([sample], range(1), 1000, 256)
    assert not batch.needs_mask
    packed, _ = PolicyForward(model, CPU, None)(batch, 1.0)
    torch.testing.assert_close(packed, plain(model, sample), atol=1e-5, rtol=0)


FULL = t.Qwen3Config(**TINY, head_dim=16)


def test_rows_are_as_long_as_the_attention_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments where every layer attends to all in float32, else a mask, which costs the row's square."""
    model, windowed = loaded(FULL, tmp_path / "full"), loaded(CONFIGS[0], tmp_path / "windowed")
    policy = PolicyForward(model, CPU, None)
    assert policy.shared_tokens(None) == masks.SEGMENTED_ROW_TOKENS
    assert policy.shared_tokens(300) == 300
    for masked in (PolicyForward(windowed, CPU, None), PolicyForward(model, CPU, torch.bfloat16)):
        assert masked.shared_tokens(None) == masks.MASKED_ROW_TOKENS
    samples = ragged()
    (batch,) = pack(samples, range(len(samples)), 1000, 256)
    monkeypatch.setattr(attention, "row_mask", None)
    given = []
    monkeypatch.setattr(attention, "tiles_of", lambda *said: given.append(said[0]) or tiles.tiles_of(*said))
    policy(batch, 1.0)
    assert len(given) == model.config.num_hidden_layers
    assert all(one.tolist() == batch.segments_RL.tolist() for one in given)
    model.set_attn_implementation("eager")
    assert policy.shared_tokens(None) == masks.MASKED_ROW_TOKENS


STATES = t.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4)
HYBRID = t.Qwen3NextConfig(
    **TINY, head_dim=16, layer_types=["linear_attention", "full_attention"], num_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
)  # fmt: skip
#: Its window is cut in the row, and is wider than a row of the probe.
LOCAL = t.GPTNeoConfig(
    vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=2, max_position_embeddings=64, window_size=20,
    attention_types=[[["global", "local"], 1]], initializer_range=0.2,
)  # fmt: skip


@pytest.mark.parametrize("config", [STATES, HYBRID, LOCAL], ids=lambda config: config.model_type)
def test_where_no_mask_keeps_samples_apart_every_row_is_one(config: Any, tmp_path: Path) -> None:
    model = loaded(config, tmp_path)
    policy = PolicyForward(model, CPU, None)
    probe(policy, VOCAB, "m", 256)
    samples, row_tokens = ragged(), masks.shared_tokens(model.config, 256)
    (batch,) = pack(samples, range(len(samples)), 1000, row_tokens)
    assert len(batch.token_ids_RL) == len(samples) and not batch.needs_mask
    packed, _ = policy(batch, 1.0)
    alone = torch.cat([plain(model, samples[member]) for member in batch.members])
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=0)
    for one, other in zip(gradients(model, packed), gradients(model, alone), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4 * float(other.abs().max()) + 1e-7, rtol=0)


#: A token looks at the best 4 of those before it, or at the best block of 4 besides its own. Fewer heads give
#: several of them a score of zero, and chance would choose.
LATENT: dict[str, Any] = {
    **TINY, "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "index_topk": 4, "index_head_dim": 16, "index_n_heads": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
CHOOSING = [
    t.DeepseekV32Config(**LATENT),
    t.GlmMoeDsaConfig(**LATENT),
    t.MiniMaxM3VLTextConfig(
        **TINY, head_dim=16, index_block_size=4, index_topk_blocks=1, index_head_dim=16, index_n_heads=1,
        num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention", "minimax_m3_sparse"],
    ),
]  # fmt: skip


@pytest.mark.parametrize("config", CHOOSING, ids=lambda config: config.model_type)
def test_layers_choose_what_they_look_at_as_in_transformers(config: Any, tmp_path: Path) -> None:
    """attention.py 5, against a model as it comes: the probe's sequences are too short for it."""
    ours = loaded(config, tmp_path)
    theirs = t.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    (sample,) = ragged()[:1]
    (batch,) = pack([sample], [0], 1000, 1)
    packed, _ = PolicyForward(ours, CPU, None)(batch, 1.0)
    alone = plain(theirs, sample)
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=0)
    for one, other in zip(gradients(ours, packed), gradients(theirs, alone), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4 * float(other.abs().max()) + 1e-7, rtol=0)


@pytest.mark.parametrize("config", [CONFIGS[6], HYBRID], ids=lambda config: config.model_type)
async def test_such_models_train_and_publish(
    config: Any, tmp_path: Path, serve_trainer: Any, make_samples: Any, plain_logprobs: Any
) -> None:
    loaded(config, tmp_path / "model")
    samples = make_samples(groups=2, members=2)
    for one in samples:
        del one.advantages[:]
    likelihood = pb.LossSpec(kind=pb.LOSS_KIND_CROSS_ENTROPY)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(tmp_path / "model"))
        losses = []
        for step in range(4):
            losses.append((await trainer.forward_backward(2 * step + 1, samples, loss=likelihood)).loss)
            await trainer.optim_step(2 * step + 2)
        await trainer.publish(9)
        state = await trainer.save(10, "s", export=True)
        live = await trainer.forward(samples)
    assert losses[-1] < 0.9 * losses[0], losses
    exported = t.AutoModelForCausalLM.from_pretrained(state.model_path)
    for ours, alone in zip(live, plain_logprobs(exported, samples), strict=True):
        np.testing.assert_allclose(ours, alone, atol=1e-4)
