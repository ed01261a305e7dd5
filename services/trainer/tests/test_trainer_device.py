"""What a run does on a device that is not the CPU, and that it is the same there."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from simulated_device import NAME

from .other_device import CASES, VOCAB

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

#: Sixteen small runs, half of them on a device of Python, on a machine that is shared.
CHILD_SECONDS = 300

Found = dict[str, dict[str, list[float]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """By case and device."""
    folders = [tmp_path_factory.mktemp(name) for name in ("model", "experts")]
    torch.manual_seed(1)
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)).save_pretrained(folders[0])
    mixture = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **mixture)).save_pretrained(
        folders[1]
    )
    command = [sys.executable, "-m", "tests.other_device", *map(str, folders)]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parent.parent,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3] / "tests/devices")},
        capture_output=True,
        text=True,
        timeout=CHILD_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: Found = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("case", CASES)
def test_a_run_on_another_device_gives_what_it_gives_on_the_cpu(case: str, found: Found) -> None:
    here, there = found[case]["cpu"], found[case][NAME]
    # The CPU's autocast narrows some operations more.
    tolerance = 0.05 if case == "bfloat16" else 1e-3
    assert len(here) == len(there) > 50
    assert all(map(math.isfinite, there))
    assert there == pytest.approx(here, rel=tolerance, abs=tolerance)
