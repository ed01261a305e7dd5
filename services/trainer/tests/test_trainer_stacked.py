"""Low-rank matrices of stacked experts: what learns, what is merged, and how it stands beside other runs."""

from __future__ import annotations

import json
import shutil
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
from quartet.weights.fetch import fetch_version
from quartet_trainer.lora import Base
from quartet_trainer.model import ADAPTER_FOLDER
from quartet_trainer.spec import LoraSpec
from safetensors.torch import load_file

Make = Callable[..., Any]
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
    "num_key_value_heads": 2, "intermediate_size": 48, "initializer_range": 0.2, "pad_token_id": 0,
    "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]}
#: Of one expert peft computes otherwise than of several.
ONE = {"num_local_experts": 1, "num_experts_per_tok": 1}
#: A dense layer beside a mixture; stacks whose matrices are [inputs, outputs]; shared experts and groups.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": QWEN,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
CROSS_ENTROPY = pb.LossSpec(kind=pb.LOSS_KIND_CROSS_ENTROPY)


def lora(**changes: Any) -> pb.LoraSpec:
    given: dict[str, Any] = {
        "rank": 3,
        "alpha": 8.0,
        "publish_merged": True,
        "target_parameters": ["experts"],
    }
    return pb.LoraSpec(**given | changes)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a random model of a family."""
    root = tmp_path_factory.mktemp("families")

    def make(family: str) -> Path:
        folder = root / family
        if not folder.exists():
            torch.manual_seed(5)
            config = transformers.AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
            transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        return folder

    return make


async def learn(trainer: Any, samples: Any, steps: int, run_id: str = "r", first: int = 1) -> int:
    """The next seq_id."""
    for seq_id in range(first, first + 2 * steps, 2):
        await trainer.forward_backward(seq_id, samples, run_id=run_id, loss=CROSS_ENTROPY)
        await trainer.stub.OptimStep(pb.OptimStepRequest(run_id=run_id, seq_id=seq_id + 1))
    return first + 2 * steps


async def published(trainer: Any, seq_id: int, run_id: str = "r") -> bytes:
    request = pb.PublishWeightsRequest(run_id=run_id, seq_id=seq_id)
    return bytes((await trainer.stub.PublishWeights(request)).digest)


def assert_close(ours: Any, theirs: Any, tolerance: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", FAMILIES)
async def test_experts_learn_and_are_merged_whole(
    serve_trainer: Make, make_samples: Make, plain_logprobs: Make, made: Callable[[str], Path], family: str
) -> None:
    """What the run computes, its version, its export, and peft upon its adapter."""
    base, samples = made(family), make_samples()
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(base), lora=lora(), retain_versions=3)
        untrained = await trainer.forward(samples)
        next_seq = await learn(trainer, samples, 3)
        await published(trainer, next_seq)
        tuned = await trainer.forward(samples)
        version = await trainer.forward(samples, policy_version=3)
        fetched = await fetch_version(trainer.channel, "r", 3)
        target = Path((await trainer.save(next_seq + 1, "s", export=True)).model_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    assert_close(untrained, plain_logprobs(plain, samples), 1e-5)
    assert max(np.abs(np.subtract(a, b)).max() for a, b in zip(untrained, tuned, strict=True)) > 0.05
    assert_close(version, tuned, 1e-5)
    merged = transformers.AutoModelForCausalLM.from_pretrained(target)
    assert_close(tuned, plain_logprobs(merged, samples), 2e-5)
    before, after = (dict(one.named_parameters()) for one in (plain, merged))
    assert fetched.manifest.adapter_config == "" and fetched.tensors.keys() == after.keys()
    changed = {name.rpartition("experts.")[2] for name in after if not torch.equal(before[name], after[name])}
    assert {"gate_up_proj", "down_proj"} <= changed and not {name for name in changed if "norm" in name}
    beside = peft.PeftModel.from_pretrained(plain, target / ADAPTER_FOLDER)
    assert_close(tuned, plain_logprobs(beside, samples), 2e-5)


@pytest.mark.parametrize(
    ("named", "stacks"),
    [
        (["experts"], ["experts.down_proj", "experts.gate_up_proj"]),
        (["down_proj"], ["down_proj"]),
        (["model.layers.1.mlp.experts.gate_up_proj"], ["model.layers.1.mlp.experts.gate_up_proj"]),
    ],
)
async def test_stacks_are_named_by_themselves_or_by_their_module(
    serve_trainer: Make, make_samples: Make, made: Callable[[str], Path], named: list[str], stacks: list[str]
) -> None:
    """And linear modules beside them, where some are named; a dense layer's down_proj is none of these."""
    base = made("qwen3_moe")
    shape = lora(target_parameters=named, target_modules=["q_proj"])
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(base), lora=shape)
        next_seq = await learn(trainer, make_samples(), 2)
        target = Path((await trainer.save(next_seq, "s", export=True)).model_path)
    config = json.loads((target / ADAPTER_FOLDER / "adapter_config.json").read_text())
    assert (config["target_modules"], sorted(config["target_parameters"])) == (["q_proj"], stacks)
    before, after = (
        dict(transformers.AutoModelForCausalLM.from_pretrained(one).named_parameters())
        for one in (base, target)
    )
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    ends = {stack.rpartition(".")[2] for stack in stacks}
    queries = {f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)}
    assert changed == queries | {f"model.layers.1.mlp.experts.{end}" for end in ends}


@pytest.mark.parametrize("settings", [{"microbatch_tokens": 30}, {"gradient_checkpointing": True}])
@pytest.mark.parametrize("kind", [pb.OPTIMIZER_KIND_ADAMW, pb.OPTIMIZER_KIND_MUON])
async def test_a_restored_run_continues_bit_equal(
    serve_trainer: Make, make_samples: Make, made: Callable[[str], Path], kind: int, settings: Any
) -> None:
    spec = {"base_model": str(made("qwen3_moe")), "lora": lora(), "kind": kind, **settings}
    samples = make_samples()
    async with serve_trainer() as trainer:
        await trainer.create(**spec)
        await learn(trainer, samples, 2)
        await trainer.save(5, "s")
        await learn(trainer, samples, 2, first=6)
        straight = await published(trainer, 10)
    async with serve_trainer() as trainer:
        assert (await trainer.create(**spec)).applied_seq_id == 5
        await learn(trainer, samples, 2, first=6)
        assert await published(trainer, 10) == straight


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_versions_that_are_adapters_leave_the_base_whole(
    serve_trainer: Make, make_samples: Make, made: Callable[[str], Path], dtype: str
) -> None:
    """Of another type than the base is held in, the base is placed anew to score them."""
    spec = {"base_model": str(made("qwen3_moe")), "served_dtype": dtype}
    samples = make_samples()
    async with serve_trainer() as trainer:
        await trainer.create(lora=lora(publish_merged=False), **spec)
        await published(trainer, 1)
        await learn(trainer, samples, 1, first=2)
        await published(trainer, 4)
        await trainer.forward(samples, policy_version=1)
        await trainer.save(5, "s")
        await trainer.create("beside", lora=lora(), **spec)
        await published(trainer, 1, "beside")
        fetched = await fetch_version(trainer.channel, "beside", 0)
    assert any(".experts." in name for name in fetched.tensors)
    async with serve_trainer() as trainer:
        assert (await trainer.create(lora=lora(publish_merged=False), **spec)).applied_seq_id == 5


async def test_muon_leaves_matrices_of_whole_stacks_to_adamw(
    serve_trainer: Make, make_samples: Make, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """optimizer.py 3: the rows of one expert have nothing to do with those of another."""
    saved = {}
    for kind in (pb.OPTIMIZER_KIND_ADAMW, pb.OPTIMIZER_KIND_MUON):
        async with serve_trainer() as trainer:
            await trainer.create(base_model=str(made("qwen3_moe")), lora=lora(), kind=kind)
            next_seq = await learn(trainer, make_samples(), 1)
            target = Path((await trainer.save(next_seq, "s", export=True)).model_path)
            saved[kind] = load_file(target / ADAPTER_FOLDER / "adapter_model.safetensors")
        shutil.rmtree(tmp_path / "states")
    adamw, muon = saved.values()
    equal = {
        name for name, one in muon.items() if name.endswith("lora_B.weight") and torch.equal(one, adamw[name])
    }
    assert equal == {name for name in muon if name.endswith("lora_B.weight") and ".experts." in name} != set()


async def test_a_run_beside_one_of_stacked_experts_gives_the_bits_it_gives_alone(
    serve_trainer: Make, make_samples: Make, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """bases.py 1; whichever comes first, two of a kind, and of other stacks."""
    runs = {
        "experts": lora(),
        "plain": lora(target_parameters=[]),
        "half": lora(target_parameters=["down_proj"]),
        "experts-too": lora(),
        "plain-too": lora(target_parameters=[]),
    }

    async def digests(*names: str) -> dict[str, bytes]:
        async with serve_trainer(max_runs=len(runs)) as trainer:
            for name in names:
                await trainer.create(name, base_model=str(made("qwen3_moe")), lora=runs[name])
            for first in (1, 3):
                for name in names:
                    await learn(trainer, make_samples(), 1, name, first)
            found = {name: await published(trainer, 5, name) for name in names}
        shutil.rmtree(tmp_path / "states")
        return found

    alone = await digests("experts") | await digests("plain") | await digests("half")
    assert len(set(alone.values())) == 3
    assert await digests(*runs) == {name: alone[name.partition("-")[0]] for name in runs}


async def test_a_run_begins_with_an_adapter_of_experts(
    serve_trainer: Make, make_samples: Make, plain_logprobs: Make, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """initial_adapter.py 1 and 2: as peft made it; of other stacks none is taken for these."""
    base, begins, samples = made("qwen3_moe"), tmp_path / "adapter", make_samples()
    settings = {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj", "gate_up_proj"]}
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(r=3, lora_alpha=8, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    beside = peft.get_peft_model(plain, config)
    beside.save_pretrained(begins)
    asked = lora(initial_adapter=str(begins), target_modules=["q_proj"])
    async with serve_trainer() as trainer:
        await trainer.create(base_model=str(base), lora=asked)
        assert_close(await trainer.forward(samples), plain_logprobs(beside, samples), 2e-5)
        for number, (stacks, why) in enumerate(
            (
                ([], "it has target_parameters = ['experts.down_proj', 'gate_up_proj']; set that"),
                (["down_proj"], "it has matrices of other stacks of experts"),
            )
        ):
            other = lora(initial_adapter=str(begins), target_modules=["q_proj"], target_parameters=stacks)
            creating = trainer.create(f"other-{number}", base_model=str(base), lora=other)
            told = await trainer.refused(creating, "INVALID_CONFIG")
            assert told.metadata["key"] == "lora.target_parameters" and why in told.message
        half = tmp_path / "half"
        settings["target_parameters"] = ["experts.down_proj"]
        config = peft.LoraConfig(r=3, lora_alpha=8, **settings)
        plain = transformers.AutoModelForCausalLM.from_pretrained(base)
        peft.get_peft_model(plain, config).save_pretrained(half)
        asked = lora(initial_adapter=str(half), target_modules=["q_proj"], target_parameters=["gate_up_proj"])
        told = await trainer.refused(trainer.create("x", base_model=str(base), lora=asked), "INVALID_CONFIG")
        assert told.metadata["key"] == "lora.target_parameters"


@pytest.mark.parametrize(
    ("family", "changes", "key", "why"),
    [
        (
            "qwen3_moe",
            {"target_parameters": ["w1"]},
            "target_parameters",
            "it has experts.down_proj, experts.",
        ),
        ("qwen3_moe", {"target_parameters": ["q_proj.weight"]}, "target_parameters", "no such stack"),
        ("qwen3_moe", {"target_parameters": ["norm"]}, "target_parameters", "no such stack"),
        ("qwen3_moe", {"dropout": 0.1}, "dropout", "set dropout = 0"),
        ("qwen3_moe", {"modules_to_save": ["mlp"]}, "target_parameters", "mlp is trained whole"),
        ("qwen3_moe", {"target_modules": ["gate_proj"]}, "target_modules", "name these in target_parameters"),
    ],
)
async def test_what_cannot_be_is_refused_by_its_key(
    serve_trainer: Make,
    made: Callable[[str], Path],
    family: str,
    changes: dict[str, Any],
    key: str,
    why: str,
) -> None:
    async with serve_trainer() as trainer:
        creating = trainer.create(base_model=str(made(family)), lora=lora(**changes))
        told = await trainer.refused(creating, "INVALID_CONFIG")
    assert told.metadata["key"] == f"lora.{key}" and why in told.message


def test_a_stack_of_one_is_none() -> None:
    config = transformers.AutoConfig.for_model("gpt_oss", **SIZES, **ONE)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with pytest.raises(QuartetError, match="the model has no stacked experts; leave target_parameters out"):
        Base(model).join(LoraSpec(rank=2, alpha=4.0, target_parameters=("experts",)), "m", 0)
