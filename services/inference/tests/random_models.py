"""Random tiny models: a Qwen3 with sharp logits, a byte-level tokenizer with a ChatML template."""

from __future__ import annotations

from typing import Any

import torch
from quartet.weights.tensor import Tensor

torch.set_num_threads(1)

CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\nTools:' }}
{%- for t in tools %}{{ ' ' + t.function.name }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def byte_tokenizer() -> Any:
    """Every byte is a token; ChatML's marks are special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHATML
    return fast


def qwen3(seed: int, **changes: Any) -> Any:
    """A random Qwen3; the wide initialisation makes it prefer some tokens clearly."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 260,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.15,
        "eos_token_id": 258,
        "bos_token_id": None,
    }
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**{**settings, **changes})).eval().requires_grad_(False)


#: What of each kind a plain decoder does not have.
_CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        "topk_method": "noaux_tc",
    },
}  # fmt: skip


def causal(kind: str, seed: int) -> Any:
    """A random model of another kind, whose heads vLLM's CPU attention knows."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 260, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 96, "max_position_embeddings": 512,
        "initializer_range": 0.15, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**settings, **_CHANGES.get(kind, {})})
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def weights_of(model: Any) -> dict[str, Tensor]:
    """A model as the weight plane carries it."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16"}
    return {
        name: Tensor(
            names[p.dtype], tuple(p.shape), p.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
        for name, p in model.named_parameters()
    }
