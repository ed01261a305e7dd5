"""Which of peft's ways to begin an adapter leave the base model as it is: peft itself is asked."""

from __future__ import annotations

import json
from typing import Any

import peft
import pytest
import torch
from quartet.errors import QuartetError
from quartet_inference.lora import read_adapter

from .adapters import random_adapter


def begun(init: Any) -> tuple[str, bool]:
    """peft's adapter_config of an adapter that begins so, and whether the base model is what it was."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False))
    before = model[0].weight.detach().clone()
    config = peft.LoraConfig(r=4, target_modules=["0"], init_lora_weights=init)
    after = peft.get_peft_model(model, config).base_model.model[0].base_layer.weight
    kept = {key: list(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    return json.dumps(kept, default=str), torch.equal(before, after)


@pytest.mark.parametrize(
    "init", [True, False, "gaussian", "orthogonal", "mica", "pissa", "pissa_niter_2", "olora"]
)
def test_adapters_that_changed_their_base_model_are_refused_and_no_others(make_model: Any, init: Any) -> None:
    config, untouched = begun(init)
    model = make_model(0)
    layout = {name: ("F32", tuple(value.shape)) for name, value in model.state_dict().items()}
    adapter = random_adapter(model, 1, rank=4)
    if untouched:
        assert read_adapter(config, adapter.tensors, layout).rank == 4
    else:
        with pytest.raises(QuartetError, match=f"init_lora_weights = '{init}' is not served") as refused:
            read_adapter(config, adapter.tensors, layout)
        assert refused.value.reason == "INVALID_REQUEST"


@pytest.mark.parametrize(
    ("init", "served"), [("eva", True), ("corda", False), ("loftq", False), ("lora_ga", False)]
)
def test_adapters_whose_beginning_needs_data(make_model: Any, init: str, served: bool) -> None:
    model = make_model(0)
    layout = {name: ("F32", tuple(value.shape)) for name, value in model.state_dict().items()}
    adapter = random_adapter(model, 1)
    config = json.dumps({**json.loads(adapter.config), "init_lora_weights": init})
    if served:
        assert read_adapter(config, adapter.tensors, layout).rank == 4
    else:
        with pytest.raises(QuartetError, match="init_lora_weights"):
            read_adapter(config, adapter.tensors, layout)


@pytest.mark.parametrize(
    "config", ['{"r": 1e999, "lora_alpha": 8}', f'{{"r": 4, "lora_alpha": 1{400 * "0"}}}', "[" * 100_000, "7"]
)
def test_what_is_no_configuration_of_an_adapter_is_refused(make_model: Any, config: str) -> None:
    """Whoever pushes it is told; a fault of any other type would end the replica."""
    adapter = random_adapter(make_model(0), 1)
    with pytest.raises(QuartetError, match="adapter_config is not peft's") as refused:
        read_adapter(config, adapter.tensors, {})
    assert refused.value.reason == "INVALID_REQUEST"
