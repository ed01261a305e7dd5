"""What a run does on a device that is not the CPU, and that it is the same there."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers
from simulated_device import DEVICES, NAME, Found, found_by

from .other_device import CASES, SPREAD, VOCAB

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
def found(device: str, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """By case and device."""
    folders = [tmp_path_factory.mktemp(name) for name in ("model", "experts")]
    torch.manual_seed(1)
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)).save_pretrained(folders[0])
    mixture = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **mixture)).save_pretrained(
        folders[1]
    )
    return found_by(Path(__file__).parent.parent, device, *folders)


@pytest.mark.parametrize("case", CASES)
def test_a_run_on_another_device_gives_what_it_gives_on_the_cpu(case: str, device: str, found: Found) -> None:
    here, there = found[case]["cpu"], found[case][device]
    # The CPU's autocast narrows some operations more.
    tolerance = 0.05 if case == "bfloat16" else 1e-3
    assert len(here) == len(there) > 50
    assert all(map(math.isfinite, there))
    assert there == pytest.approx(here, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("device", DEVICES[1:], indirect=True)
def test_a_model_that_nccl_spreads_gives_what_it_gives_on_the_cpu(device: str, found: Found) -> None:
    here, there = found[SPREAD]["cpu"], found[SPREAD][device]
    assert len(here) == len(there) > 50
    assert there == pytest.approx(here, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("device", [NAME], indirect=True)
def test_what_is_published_is_cast_before_it_leaves_the_device(found: Found) -> None:
    """Half the way, and no work for the CPU."""
    assert found["bfloat16"]["cast by the host"] == [0]
