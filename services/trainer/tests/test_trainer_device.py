"""What a run does on a device that is not the CPU, and that it is the same there."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers
from simulated_device import DEVICES, NAME, Found, found_by

from .other_device import CASES, SPREAD, VOCAB

SERVICE = Path(__file__).parent.parent
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    # Moving a model breaks its ties where the device is simulated, as it does not where it is real.
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model and a mixture of experts."""
    folders = [tmp_path_factory.mktemp(name) for name in ("model", "experts")]
    torch.manual_seed(1)
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)).save_pretrained(folders[0])
    mixture = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **mixture)).save_pretrained(
        folders[1]
    )
    return folders


@pytest.fixture(scope="module")
def found(device: str, models: list[Path]) -> Found:
    """By case and device."""
    return found_by(SERVICE, device, *models, *CASES)


@pytest.mark.parametrize("case", CASES)
def test_a_run_on_another_device_gives_what_it_gives_on_the_cpu(case: str, device: str, found: Found) -> None:
    here, there = found[case]["cpu"], found[case][device]
    # The CPU's autocast narrows some operations more.
    tolerance = 0.05 if case == "bfloat16" else 1e-3
    assert len(here) == len(there) > 50
    assert all(map(math.isfinite, there))
    assert there == pytest.approx(here, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("there", ["cpu", *DEVICES[1:]])
def test_a_model_that_is_spread_gives_what_it_gives_whole_on_the_cpu(there: str, models: list[Path]) -> None:
    """By gloo, or by NCCL, over a group of one."""
    found = found_by(SERVICE, there, *models, "adamw", SPREAD)
    whole, spread = found["adamw"]["cpu"], found[SPREAD][there]
    assert len(spread) == len(whole) > 50
    assert spread == pytest.approx(whole, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("device", [NAME], indirect=True)
def test_what_is_published_is_cast_before_it_leaves_the_device(found: Found) -> None:
    """Half the way, and no work for the CPU."""
    assert found["bfloat16"]["cast by the host"] == [0]
