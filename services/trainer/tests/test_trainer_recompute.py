"""Gradient checkpointing: the same bits, less kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from quartet.errors import QuartetError
from quartet.v1 import trainer_service_pb2 as pb
from quartet.weights.store import WeightStore
from quartet_trainer.bases import Bases
from quartet_trainer.logprobs import PolicyForward
from quartet_trainer.machine import Machine
from quartet_trainer.packing import pack
from quartet_trainer.recompute import ATTENTION_KERNELS, NOTHING, Recomputed, recomputable, recomputing
from quartet_trainer.run import Run
from quartet_trainer.sample import make_sample
from quartet_trainer.spec import LossSpec, OptimizerSpec, RunSpec
from torch.utils._python_dispatch import TorchDispatchMode

Make = Callable[..., Any]
LORA = pb.LoraSpec(rank=4, alpha=8.0, dropout=0.3)


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole model", "adapter with dropout"])
async def test_promise_1_training_is_the_same_bit_for_bit(
    serve_trainer: Make, make_samples: Make, folder: Path, lora: pb.LoraSpec | None
) -> None:
    """Asked for by the run, or by the trainer's configuration."""
    found = []
    for config, asked in (({}, False), ({}, True), ({"gradient_checkpointing": True}, False)):
        async with serve_trainer(**config) as trainer:
            run_id = f"r{len(found)}"
            await trainer.create(run_id, base_model=str(folder), lora=lora, gradient_checkpointing=asked)
            norms = []
            for step in range(3):
                await trainer.forward_backward(2 * step + 1, make_samples(seed=step), run_id=run_id)
                stepped = pb.OptimStepRequest(run_id=run_id, seq_id=2 * step + 2)
                norms.append((await trainer.stub.OptimStep(stepped)).grad_norm)
            publish = pb.PublishWeightsRequest(run_id=run_id, seq_id=7)
            found.append((norms, (await trainer.stub.PublishWeights(publish)).digest))
    assert found[0] == found[1] == found[2]


def kept_bytes(
    model: Any, recomputed: Recomputed, autocast: torch.dtype | None = None
) -> tuple[int, list[torch.Tensor]]:
    """What the graph of a pass over 4 rows of 100 tokens holds besides parameters, and the gradients."""
    policy = PolicyForward(model, torch.device("cpu"), autocast, recomputed)
    samples = [
        make_sample(i, [(i + 3 * t) % 96 for t in range(101)], [(50, 51, 0)], [], []) for i in range(4)
    ]
    (batch,) = pack(samples, range(4), 1000, 1)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    held: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logp, _ = policy(batch, 1.0)
    total = sum(held.values())
    torch.autograd.backward(logp.sum())
    return total, [parameter.grad.clone() for parameter in model.parameters()]


def test_promise_2_less_is_kept_and_nothing_stays_on_the_model(write_qwen3: Make, tmp_path: Path) -> None:
    shape = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 2}
    write_qwen3(tmp_path, seed=5, num_hidden_layers=8, head_dim=16, **shape)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    layers = recomputable(model, "m")
    assert len(layers) == 8
    plain, expected = kept_bytes(model, NOTHING)
    less, gradients = kept_bytes(model, Recomputed(layers))
    assert less < plain / 4, (less, plain)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, expected, strict=True))
    assert not any("forward" in vars(layer) for layer in layers), "another run on this model keeps them"
    assert kept_bytes(model, NOTHING)[0] == plain


class Counting(TorchDispatchMode):
    """Counts the kernels of attention that compute inside."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in ATTENTION_KERNELS
        return func(*args, **(kwargs or {}))


def test_promise_5_attention_is_kept_where_it_is_asked_for(write_qwen3: Make, tmp_path: Path) -> None:
    """In bfloat16, where it is a kernel's also on a CPU."""
    shape = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 2}
    write_qwen3(tmp_path, seed=5, num_hidden_layers=4, head_dim=16, **shape)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    layers = recomputable(model, "m")

    found = []
    for recomputed in (NOTHING, Recomputed(layers), Recomputed(layers, keeps_attention=True)):
        with Counting() as counting:
            held, gradients = kept_bytes(model, recomputed, torch.bfloat16)
        found.append((counting.count, held, gradients))
    (once, most, plain), (twice, least, _), (kept_once, _, gradients) = found
    assert (once, twice, kept_once) == (4, 8, 4)
    assert least < most / 2
    assert all(map(torch.equal, gradients, plain))


@pytest.mark.parametrize(
    ("asked", "configured", "kept", "times"),
    [(False, {}, False, 1), (True, {}, False, 2), (False, {"gradient_checkpointing": True}, False, 2),
     (True, {}, True, 1), (False, {}, True, 1)],
)  # fmt: skip
def test_layers_are_computed_anew_where_it_is_asked_for(
    folder: Path, asked: bool, configured: dict[str, bool], kept: bool, times: int
) -> None:
    """By the run or the trainer's configuration: attention counts, which a layer computed anew has again."""
    machine = Machine(torch.device("cpu"), 1000, 256, False, keep_attention=kept, **configured)
    spec = RunSpec(
        base_model=str(folder),
        optimizer=OptimizerSpec(learning_rate=1e-2),
        compute_dtype="bfloat16",
        gradient_checkpointing=asked,
    )
    run = Run("r", spec, machine, WeightStore(1), lambda: None, Bases())
    sample = make_sample(0, list(range(20)), [(4, 16, 0)], [], [])
    with Counting() as counting:
        run.forward_backward([sample], LossSpec(kind="cross_entropy", ratio="none"), 16.0, False)
    assert counting.count == 2 * times


def test_promise_2_a_pass_that_fails_leaves_the_layers_as_they_were(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    layers = recomputable(model, "m")
    with pytest.raises(MemoryError), recomputing(Recomputed(layers)):
        assert all("forward" in vars(layer) for layer in layers)
        raise MemoryError
    assert not any("forward" in vars(layer) for layer in layers)


async def test_promise_5_the_configuration_asks_for_it(
    serve_trainer: Make, make_samples: Make, folder: Path
) -> None:
    digests = []
    for kept in (False, True):
        async with serve_trainer(gradient_checkpointing=True, keep_attention=kept) as trainer:
            await trainer.create("r", base_model=str(folder), compute_dtype="bfloat16")
            await trainer.forward_backward(1, make_samples(seed=1), run_id="r")
            await trainer.stub.OptimStep(pb.OptimStepRequest(run_id="r", seq_id=2))
            publish = pb.PublishWeightsRequest(run_id="r", seq_id=3)
            digests.append((await trainer.stub.PublishWeights(publish)).digest)
    assert digests[0] == digests[1]


def test_promise_4_a_model_without_layers_to_recompute_is_refused() -> None:
    with pytest.raises(QuartetError, match="no layers") as raised:
        recomputable(torch.nn.Linear(2, 2), "odd")
    assert raised.value.metadata["key"] == "gradient_checkpointing"
    assert "set gradient_checkpointing = false" in raised.value.message, "who left it out may have it, too"


def test_promise_3_layers_within_layers_are_computed_anew_once() -> None:
    """A layer of Zamba 2 that has attention, too, has one that is recomputable inside it."""
    config = transformers.Zamba2Config(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        layers_block_type=["mamba", "hybrid"], mamba_d_state=8, mamba_ngroups=1, n_mamba_heads=4,
        mamba_headdim=16, chunk_size=16, num_mem_blocks=1, adapter_rank=8, attention_head_dim=32,
    )  # fmt: skip
    torch.manual_seed(2)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    layers = recomputable(model, "m")
    assert [type(layer).__name__ for layer in layers] == ["Zamba2MambaDecoderLayer", "Zamba2HybridLayer"]
    gradients = []
    for recomputed in (NOTHING, Recomputed(layers)):
        model.zero_grad()
        policy = PolicyForward(model, torch.device("cpu"), None, recomputed)
        (batch,) = pack([make_sample(0, list(range(1, 20)), [(5, 14, 0)], [], [])], [0], 1000, 1)
        torch.autograd.backward(policy(batch, 1.0)[0].sum())
        gradients.append([one.grad.clone() for one in model.parameters() if one.grad is not None])
    assert all(map(torch.equal, *gradients))
