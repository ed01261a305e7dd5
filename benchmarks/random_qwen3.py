"""The model of the benchmarks of activations: a random Qwen3 with a small vocabulary."""

from __future__ import annotations

from typing import Any

VOCABULARY = 512


def random_qwen3(hidden: int, layers: int) -> Any:
    """So wide and so deep. Heads of 64, two of the queries for each of the keys."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        intermediate_size=3 * hidden,
        tie_word_embeddings=True,
    )
    return transformers.Qwen3ForCausalLM(config)
