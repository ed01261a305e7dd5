"""Models of other families, spread over a group of one: they compute and are exported as in one process."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from quartet_trainer.logprobs import PolicyForward
from quartet_trainer.machine import Machine
from quartet_trainer.model import load_model
from quartet_trainer.placement import placed
from quartet_trainer.probe import probe_logprobs
from quartet_trainer.recompute import NOTHING
from quartet_trainer.trained import WholeModel
from safetensors.torch import load_file, save_file

CPU, VOCAB = torch.device("cpu"), 96
TINY: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
CONFIGS = {
    # A block and a part of it are both named as what must not be cut.
    "nested": t.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4),
    # The router's correction is no parameter, and belongs to the checkpoint.
    "buffers": t.Glm4MoeConfig(**TINY, **EXPERTS, topk_group=1, first_k_dense_replace=1),
    # Its checkpoint has another name for the head than transformers now has.
    "renamed": t.GPTNeoXConfig(**{**TINY, "tie_word_embeddings": False}),
    # Tied, says its configuration; the checkpoint has two matrices.
    "untied": t.Qwen3Config(**TINY, tie_word_embeddings=True),
}


def written(kind: str, folder: Path) -> Path:
    """A checkpoint of random weights, its router's corrections among them."""
    torch.manual_seed(3)
    model = t.AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.float32)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.normal_()
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if kind == "renamed":
        tensors["embed_out.weight"] = tensors.pop("lm_head.weight", tensors.get("embed_out.weight"))
    if kind == "untied":
        tensors["lm_head.weight"] = torch.randn(VOCAB, 32)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def exported(model: Any, source: Path, target: Path) -> tuple[dict[str, Any], Any]:
    WholeModel(model).export(source, target, "float32")
    return load_file(target / "model.safetensors"), json.loads((target / "config.json").read_text())


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_a_spread_model_is_that_of_one_process(group_of_one: Any, tmp_path: Path, kind: str) -> None:
    folder = written(kind, tmp_path / "base")
    alone = load_model(folder, "m", device=CPU)
    spread = placed(Machine(CPU, 8192, None, False, ranks=group_of_one), folder, "m", None)
    with torch.no_grad():
        ours = probe_logprobs(group_of_one.policy(spread, CPU, None, NOTHING), VOCAB, 1)
        assert torch.equal(ours, probe_logprobs(PolicyForward(alone, CPU, None), VOCAB, 1))
    tensors, config = exported(alone, folder, tmp_path / "alone")
    tensors2, config2 = exported(spread, folder, tmp_path / "spread")
    assert config == config2 and tensors.keys() == tensors2.keys()
    assert all(torch.equal(tensor, tensors2[name]) for name, tensor in tensors.items())
    wanted = {"buffers": "e_score_correction_bias", "renamed": "embed_out", "untied": "lm_head"}.get(kind, "")
    assert any(wanted in name for name in tensors)


def test_the_whole_model_is_given_back_once_it_is_spread(group_of_one: Any, folder: Path) -> None:
    """Models refer to themselves: without the collector they stay."""
    loaded: list[weakref.ref[Any]] = []

    def load(device: torch.device) -> Any:
        model = load_model(folder, "m", device=device)
        loaded.append(weakref.ref(model))
        return model

    gc.disable()
    try:
        group_of_one.place(load, folder, CPU, "m")
        assert loaded[0]() is None
        # So does one that was loaded for a run that was refused, until the next is.
        refused = load_model(folder, "m", device=CPU)
        left, refused.itself = weakref.ref(refused), refused
        del refused
        assert left() is not None
        placed(Machine(CPU, 8192, None, False), folder, "m", None)
        assert left() is None
    finally:
        gc.enable()
