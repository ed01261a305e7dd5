"""The model of the benchmarks on a GPU: random, of the shape of Qwen3-0.6B, and smaller ones for a trial."""

from __future__ import annotations

import argparse
import sys
from typing import Any

#: Qwen3-0.6B as it is published, but for its 40,960 positions.
SIZES: dict[str, Any] = {
    "vocab_size": 151_936, "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "max_position_embeddings": 65_536,
    "rope_theta": 1_000_000, "tie_word_embeddings": True, "eos_token_id": None, "bos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
#: For a trial without a GPU.
TRIAL = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What both benchmarks are asked."""
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--trial", action="store_true", help="a tiny model: whether it runs, not how fast")


def require(device: str) -> None:
    """End, saying so, where there is no such device."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        print("skipped: torch finds no CUDA device; --device cpu --trial shows that the script runs")
        sys.exit(0)


def model(seed: int, *, trial: bool, device: str) -> Any:
    """A random one, in float32; it is made on a device because a CPU takes long."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    with torch.device(device):
        return Qwen3ForCausalLM(Qwen3Config(**SIZES | (TRIAL if trial else {}))).eval()


def named(device: str) -> str:
    """The device, for the results."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "cpu"
