"""Frozen weights that are held in bfloat16: half the memory, and no bit of difference in what comes out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from quartet.v1 import trainer_service_pb2 as pb
from quartet_trainer import lora, placement
from quartet_trainer.frozen import as_float32, cast_weights, narrow
from quartet_trainer.lora import Base
from quartet_trainer.model import load_model
from quartet_trainer.spec import LoraSpec

Make = Callable[..., Any]


@pytest.fixture
def halved(folder: Path, tmp_path: Path) -> Path:
    """A model whose weights bfloat16 holds exactly, as most checkpoints are; but one matrix of it."""
    model = transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "layers.1.mlp.down_proj" not in name:
                one.copy_(one.bfloat16().float())
    model.save_pretrained(tmp_path / "halved")
    return tmp_path / "halved"


def model_of(folder: Path) -> Any:
    model = transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model.requires_grad_(False)


def test_promise_1_what_loses_nothing_is_narrowed_and_nothing_else(halved: Path) -> None:
    model = model_of(halved)
    before = {name: one.clone() for name, one in model.named_parameters()}
    narrow(model, dict(model.named_parameters()), torch.bfloat16)
    narrowed = {name for name, one in model.named_parameters() if one.dtype == torch.bfloat16}
    assert cast_weights(model) - narrowed == {"model.layers.1.mlp.down_proj.weight"}
    assert narrowed <= cast_weights(model)
    assert not any("embed" in name or "norm" in name for name in narrowed)
    for name, one in model.named_parameters():
        assert torch.equal(one.float(), before[name])


def test_what_learns_and_what_is_not_autocast_stays(halved: Path) -> None:
    model = model_of(halved)
    narrow(model, dict(model.named_parameters()), None)
    narrow(model, {}, torch.bfloat16)
    assert {one.dtype for one in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "saved", ["down_proj", "mlp.gate_proj", "layers.0.mlp.gate_proj", "model.layers.0.mlp.gate_proj", "mlp"]
)
def test_an_adapter_begins_as_it_would_beside_float32(halved: Path, saved: str) -> None:
    """Lora promises 2 and 3: also the second one, which joins weights that are narrow already."""
    spec = LoraSpec(
        rank=2, alpha=2.0, target_modules=("q_proj",), modules_to_save=(saved,), publish_merged=True
    )
    wide, narrowed = Base(model_of(halved)), Base(model_of(halved), torch.bfloat16)
    for seed in (0, 1):
        ours, theirs = (shared.join(spec, str(halved), seed).parameters for shared in (narrowed, wide))
        assert ours.keys() == theirs.keys()
        for name, one in ours.items():
            assert one.dtype == torch.float32 and torch.equal(one, theirs[name]), name
    assert narrowed.digest() == wide.digest()
    frozen_types = [one.dtype for one in narrowed.frozen().values()]
    assert frozen_types.count(torch.bfloat16) > frozen_types.count(torch.float32)


def test_a_join_that_fails_leaves_the_weights_as_they_are(halved: Path) -> None:
    model = model_of(halved)
    narrow(model, dict(model.named_parameters()), torch.bfloat16)
    before = {name: one.clone() for name, one in model.named_parameters()}
    with pytest.raises(ZeroDivisionError), as_float32(model, ()):
        assert {one.dtype for one in model.parameters()} == {torch.float32}
        raise ZeroDivisionError
    for name, one in model.named_parameters():
        assert one.dtype == before[name].dtype and torch.equal(one, before[name])


def test_a_reference_that_follows_an_adapter_takes_no_second_base(halved: Path) -> None:
    """docs/algorithms.md: it is a copy of the adapter."""
    adapter = Base(model_of(halved), torch.bfloat16).join(LoraSpec(rank=2, alpha=2.0), str(halved), 0)
    copy = {name: one.detach().clone() for name, one in adapter.parameters.items()}
    with adapter.standing(copy) as placed:
        assert len(placed) == len(copy)


@pytest.mark.parametrize("sync_steps", [0, 1])
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("served", ["float32", "bfloat16"])
async def test_promise_1_a_run_gives_the_same_bits(
    halved: Path,
    serve_trainer: Make,
    make_samples: Make,
    monkeypatch: pytest.MonkeyPatch,
    merged: bool,
    served: str,
    sync_steps: int,
) -> None:
    """Losses, norms, verification, versions, the reference and the exported model, in two runs at once."""
    spec = {
        "base_model": str(halved),
        "compute_dtype": "bfloat16",
        "served_dtype": served,
        "retain_versions": 2,
        "reference": pb.ReferenceSpec(sync_steps=sync_steps),
        "lora": pb.LoraSpec(rank=4, alpha=8.0, dropout=0.3, publish_merged=merged),
    }
    loss = pb.LossSpec(kind=pb.LOSS_KIND_POLICY_GRADIENT, kl_coef=0.1)
    found: dict[bool, list[Any]] = {}
    for narrows in (True, False):
        if not narrows:
            monkeypatch.setattr(lora, "narrow", lambda *_: None)
            monkeypatch.setattr(placement, "narrow", lambda *_: None)
        seen: list[Any] = []
        async with serve_trainer() as trainer:
            for name in ("a", "b"):
                name = f"{name}-{narrows}"
                await trainer.create(name, **spec)
                seq_id = 0
                for _ in range(2):
                    seq_id += 1
                    publish = pb.PublishWeightsRequest(run_id=name, seq_id=seq_id)
                    seen.append((await trainer.stub.PublishWeights(publish)).digest)
                    seq_id += 1
                    done = await trainer.forward_backward(
                        seq_id, make_samples(), run_id=name, loss=loss, verify_logprobs=True
                    )
                    seen += [done.loss, dict(done.diagnostics), done.verification.max_difference]
                    seq_id += 1
                    step = pb.OptimStepRequest(run_id=name, seq_id=seq_id)
                    seen.append((await trainer.stub.OptimStep(step)).grad_norm)
                save = pb.SaveStateRequest(run_id=name, seq_id=seq_id + 1, name="end", export_model=True)
                folder = Path((await trainer.stub.SaveState(save)).state.model_path)
                seen.append((folder / "model.safetensors").read_bytes())
        found[narrows] = seen
    assert found[True] == found[False]


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """A mixture whose weights bfloat16 holds exactly."""
    torch.manual_seed(6)
    config = transformers.Qwen3MoeConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, initializer_range=0.2,
        max_position_embeddings=128,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(tmp_path / "mixture")
    return tmp_path / "mixture"


@pytest.mark.parametrize(("own", "held"), [((), torch.bfloat16), (("down_proj",), torch.float32)])
def test_experts_are_narrowed_but_for_those_that_have_matrices_of_their_own(
    mixture: Path, own: tuple[str, ...], held: torch.dtype
) -> None:
    """What is cast of these is the sum."""
    shared = Base(load_model(mixture, "m", device=torch.device("cpu")), torch.bfloat16)
    shared.join(LoraSpec(rank=2, alpha=4.0, publish_merged=True, target_parameters=own), "m", 0)
    found = {name: one.dtype for name, one in shared.frozen().items() if ".experts." in name}
    assert len(found) == 4 and set(found.values()) == {held}


@pytest.mark.parametrize("own", [(), ("down_proj",)])
async def test_promise_1_a_mixture_gives_the_same_bits(
    mixture: Path,
    serve_trainer: Make,
    make_samples: Make,
    monkeypatch: pytest.MonkeyPatch,
    own: tuple[str, ...],
) -> None:
    shape = pb.LoraSpec(rank=2, alpha=4.0, publish_merged=True, target_parameters=own)
    found: list[Any] = []
    for name in ("narrow", "wide"):
        if name == "wide":
            monkeypatch.setattr(lora, "narrow", lambda *_: None)
        seen: list[Any] = []
        async with serve_trainer() as trainer:
            await trainer.create(name, base_model=str(mixture), compute_dtype="bfloat16", lora=shape)
            for first in (1, 4):
                done = await trainer.forward_backward(first, make_samples(), run_id=name)
                step = pb.OptimStepRequest(run_id=name, seq_id=first + 1)
                norm = (await trainer.stub.OptimStep(step)).grad_norm
                publish = pb.PublishWeightsRequest(run_id=name, seq_id=first + 2)
                digest = (await trainer.stub.PublishWeights(publish)).digest
                seen += [done.loss, dict(done.diagnostics), norm, digest]
        found.append(seen)
    assert found[0] == found[1]
