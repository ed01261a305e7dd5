"""Which modules of an architecture get low-rank matrices, and that what is merged is what was trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from quartet.errors import QuartetError
from quartet.v1 import trainer_service_pb2 as pb
from quartet_trainer.lora import Base
from quartet_trainer.model import ADAPTER_FOLDER
from quartet_trainer.spec import LoraSpec
from quartet_trainer.targets import Targets

Make = Callable[..., Any]
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64, "initializer_range": 0.2,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
#: A layer that is no mixture, whose modules have the names that the experts' parts had, and one that is.
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]}
#: Two layers whose attention and MLP are the same matrices.
SHARING = {
    "layers_block_type": ["hybrid", "hybrid"], "num_mem_blocks": 1, "mamba_d_state": 8, "n_mamba_heads": 8,
    "mamba_headdim": 8, "mamba_ngroups": 1, "adapter_rank": 4,
}  # fmt: skip
QUERIES = ["k_proj", "o_proj", "q_proj", "v_proj"]


def made(kind: str, **changes: Any) -> Any:
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **changes})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def spec(*targets: str) -> LoraSpec:
    return LoraSpec(rank=2, alpha=4.0, target_modules=targets)


@pytest.mark.parametrize(
    ("kind", "changes", "targets"),
    [("qwen3_moe", MIXTURE, QUERIES), ("zamba2", SHARING, ["in_proj", "linear", "out_proj"])],
)
async def test_promise_1_an_adapter_leaves_what_cannot_be_merged_and_is_merged_whole(
    kind: str,
    changes: dict[str, Any],
    targets: list[str],
    serve_trainer: Make,
    make_samples: Make,
    tmp_path: Path,
    plain_logprobs: Make,
) -> None:
    """peft would take gate_proj, up_proj and down_proj for the stacked experts of every layer, and have an
    adapter in each layer for a matrix that these have together."""
    base, samples = tmp_path / "base", make_samples()
    made(kind, **changes).save_pretrained(base)
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(base), lora=pb.LoraSpec(rank=4, alpha=8.0))
        loss = pb.LossSpec(kind=pb.LOSS_KIND_CROSS_ENTROPY)
        for step in range(3):
            await trainer.forward_backward(2 * step + 1, samples, loss=loss)
            await trainer.stub.OptimStep(pb.OptimStepRequest(run_id="r", seq_id=2 * step + 2))
        tuned = await trainer.forward(samples)
        target = Path((await trainer.save(7, "s", export=True)).model_path)
    config = json.loads((target / ADAPTER_FOLDER / "adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == targets and not config["target_parameters"]
    merged = transformers.AutoModelForCausalLM.from_pretrained(target).eval()
    plain = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    beside = peft.PeftModel.from_pretrained(plain, target / ADAPTER_FOLDER).eval()
    for model in (merged, beside):
        for ours, theirs in zip(tuned, plain_logprobs(model, samples), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5)


def test_without_names_they_are_those_of_pefts_all_linear() -> None:
    found, _ = Targets(made("qwen3"), is_spread=False).of(spec())
    ours, theirs = (
        peft.get_peft_model(made("qwen3"), peft.LoraConfig(r=2, target_modules=targets))
        for targets in (found, "all-linear")
    )
    adapted = [[name for name, _ in one.named_parameters() if "lora_" in name] for one in (ours, theirs)]
    assert adapted[0] == adapted[1] != []


def test_subclasses_that_compute_something_else_get_none() -> None:
    """A router of Phi-MoE answers with two tensors; Falcon's linear modules have only code of their own."""
    routed = made("phimoe", num_local_experts=4, sliding_window=None)
    assert Targets(routed, is_spread=False).of(spec()) == (QUERIES, [])
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    falcon = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes))
    found, _ = Targets(falcon, is_spread=False).of(spec())
    assert found == ["dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value"]


def test_whole_names_where_others_end_so_too() -> None:
    """CTRL's linear modules "0" and "2" stand in sequences; its layers are called so as well."""
    model = made("ctrl", n_embd=32, n_layer=2, n_head=2, dff=64)
    found, _ = Targets(model, is_spread=False).of(spec())
    assert "transformer.h.0.ffn.0" in found and "Wq" in found and "0" not in found
    Base(model).join(spec(), "m", 0)


@pytest.mark.parametrize(
    ("kind", "changes", "targets", "why"),
    [
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2}, (), r"no linear modules .* leave \[lora\] out"),
        ("qwen3_moe", MIXTURE, ("q_proj", "up_proj"), "'up_proj' is refused: peft takes it for the stacked"),
        ("zamba2", SHARING, ("q_proj",), "shared_transformer.self_attn.q_proj and others are one matrix"),
        (
            "mamba",
            {"num_heads": 2},
            (),
            "peft says: .*'out_proj' is incompatible.*linear modules are dt_",
        ),
    ],
)
def test_promise_2_what_cannot_be_a_target_is_refused(
    kind: str, changes: dict[str, Any], targets: tuple[str, ...], why: str
) -> None:
    with pytest.raises(QuartetError, match=why) as raised:
        Base(made(kind, **changes)).join(spec(*targets), "m", 0)
    assert raised.value.metadata["key"] == "lora.target_modules"
