"""Random adapters for the tests: as the weight plane carries them, and merged into a model."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

import torch
from quartet.v1 import common_pb2, weights_pb2
from quartet.v1 import inference_service_pb2 as pb
from quartet.weights.store import WeightStore
from quartet.weights.tensor import Tensor

PREFIX = "base_model.model."
#: What `request` asks about.
PROMPT = list(range(20))
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class Adapter:
    """One version of an adapter."""

    config: str
    tensors: dict[str, Tensor]
    merged: Any  # the model that computes the same


def random_adapter(
    model: Any, seed: int, rank: int = 4, alpha: float = 8.0, targets: tuple[str, ...] = EVERY
) -> Adapter:
    """An adapter that changes what the model prefers."""
    generator = torch.Generator().manual_seed(seed)
    merged = copy.deepcopy(model)
    tensors: dict[str, Tensor] = {}
    for name, module in merged.named_modules():
        if not (isinstance(module, torch.nn.Linear) and name.endswith(targets)):
            continue
        low = 0.12 * torch.randn(rank, module.in_features, generator=generator)
        high = 0.12 * torch.randn(module.out_features, rank, generator=generator)
        module.weight.data = module.weight.data + (high @ low) * (alpha / rank)
        for side, matrix in (("lora_A", low), ("lora_B", high)):
            wire = Tensor("F32", tuple(matrix.shape), matrix.numpy().tobytes())
            tensors[f"{PREFIX}{name}.{side}.weight"] = wire
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets)}
    return Adapter(json.dumps(config), tensors, merged)


def canary_of(model: Any) -> weights_pb2.Canary:
    """What the model says of a fixed sequence of 32 tokens."""
    ids = [(7 * i) % 256 for i in range(32)]
    with torch.no_grad():
        logp = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].float(), -1)
    picked = logp.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return weights_pb2.Canary(token_ids=ids, logprobs=picked.tolist())


def put(
    store: WeightStore, run_id: str, version: int, adapter: Adapter, canary: Any = None
) -> weights_pb2.WeightManifest:
    return store.publish(run_id, version, adapter.tensors, adapter_config=adapter.config, canary=canary)


def request(run_id: str, max_tokens: int = 8, **fields: Any) -> pb.GenerateRequest:
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    prompt = pb.TokensPrompt(token_ids=PROMPT)
    return pb.GenerateRequest(run_id=run_id, tokens=prompt, sampling=sampling, **fields)


def served(model: Any) -> dict[str, int]:
    return {one.run_id: one.policy_version for one in model.adapters}
