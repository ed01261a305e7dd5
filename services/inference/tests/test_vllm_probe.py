"""probe.py: what vLLM gets wrong is refused at the start. What it gets right with our mends: see
test_vllm_routed_experts.py."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet_inference.config import InferenceConfig

from .random_models import causal
from .scripted_engine import Scores
from .vllm_driver import started

pytest.importorskip("vllm", reason="vLLM is not installed in this interpreter (make install-vllm)")


async def test_a_model_whose_updates_vllm_drops_is_refused_at_the_start(tmp_path: Path) -> None:
    """loading.py 1, probe.py 1: of gpt-oss it copies experts and sinks past what loads them again."""
    with pytest.raises(ConfigError, match=r'takes no other weights .*got 0 of .*engine = "embedded"'):
        await started(tmp_path, causal("gpt_oss", 0))


#: Of latent attention with such heads. Where a CPU has AMX vLLM has other kernels, which fail earlier.
OF_MLA = (
    r"vLLM cannot serve .*expect weight to be bfloat16"
    if "amx_tile" in Path("/proc/cpuinfo").read_text()
    else r"vLLM cannot run .*Head dimension 64 is not supported by MLA"
)


async def test_what_ends_vllm_at_its_first_step_ends_the_start_with_the_reason(tmp_path: Path) -> None:
    """probe.py 3, faults.py: the first line of vLLM's log is that its core failed."""
    with pytest.raises(ConfigError, match=OF_MLA):
        await started(tmp_path, causal("deepseek_v3", 0))


RIGHT, WRONG = [-1.0, -2.0, -3.0], [-1.0, -2.0, -2.9]


@pytest.mark.parametrize(
    ("said", "pushed", "why"),
    [
        ([RIGHT], False, ""),
        ([WRONG], False, "vLLM computes log-probabilities of .* that are 0.034 off"),
        ([[-1.0, -2.0, math.nan]], False, "nan off"),
        ([QuartetError("NOT_READY", "too small")], False, "cannot run .*too small"),
        ([RIGHT, RIGHT], True, ""),
        ([RIGHT, WRONG], True, "once weights were replaced by themselves, .*0.033 off"),
        ([RIGHT, []], True, "nan off"),
    ],
)
async def test_what_is_off_is_refused(said: list[Any], pushed: bool, why: str, model_folder: Path) -> None:
    """probe.py 1 and 3"""
    from quartet_inference.vllm import probe

    config = InferenceConfig(model=model_folder, engine="vllm", accept_push=pushed)
    engine: Any = Scores(*said)
    known = probe.Known((3, 10, 17, 24, 31), (-1.001, -2.0, -3.0, -4.0))
    if why:
        with pytest.raises(ConfigError, match=why):
            await probe.check(engine, config, known)
    else:
        await probe.check(engine, config, known)
    assert not engine.said and engine.reloads == (len(said) > 1)


async def test_what_leaves_nothing_to_compare_is_served(model_folder: Path) -> None:
    """probe.py 4"""
    from quartet_inference.vllm import probe
    from quartet_inference.vllm.flight import NonFiniteLogits

    config = InferenceConfig(model=model_folder, engine="vllm", accept_push=True)
    for said, wanted in (([NonFiniteLogits()], (-1.0,) * 4), ([WRONG, WRONG], ())):
        engine: Any = Scores(*said)
        await probe.check(engine, config, probe.Known((3, 10, 17, 24, 31), wanted))
        assert not engine.said
    broken = causal("llama", 0)
    broken.lm_head.weight[5] = torch.nan
    assert probe.known_of(broken, True).logprobs == probe.known_of(causal("llama", 0), False).logprobs == ()
    assert len(probe.known_of(causal("llama", 0), True).logprobs) == probe.TOKENS - 1
