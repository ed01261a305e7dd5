"""checkpoint.py: a version goes back to the names and shapes that its model's checkpoint has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quartet_inference.embedded import model
from quartet_inference.embedded.model import as_torch
from quartet_inference.vllm.checkpoint import Checkpoint
from safetensors.torch import load_file

from .random_models import causal, weights_of

#: With how many parameters of another name, or in other pieces, in the checkpoint.
KINDS = {"llama": 0, "gpt_neox": 1, "qwen3_moe": 4, "mixtral": 6, "granitemoe": 6, "deepseek_v3": 2}


@pytest.mark.parametrize("kind", KINDS)
def test_a_version_is_what_save_pretrained_writes(kind: str, tmp_path: Path) -> None:
    """checkpoint.py 1 to 3"""
    served, published = causal(kind, 0), causal(kind, 1)
    for name, buffer in served.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer += torch.randn(buffer.shape)
            published.get_buffer(name).copy_(buffer)
    served.save_pretrained(tmp_path / "served")
    published.save_pretrained(tmp_path / "published")
    version = weights_of(published)
    wanted = load_file(tmp_path / "published" / "model.safetensors")
    for network in (served, model.load(tmp_path / "served", "float32", weights_follow=False)):
        found: dict[str, Any] = Checkpoint(network).tensors(version)
        assert len(version.keys() - found.keys()) <= KINDS[kind]
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            assert torch.equal(as_torch(tensor), wanted[name]), name
            assert name not in version or tensor is version[name] or kind == "granitemoe"
