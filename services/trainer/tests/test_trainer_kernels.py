"""Liger's kernels: when they are chosen, what is refused, and what they leave alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import structlog
import torch
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet_trainer import kernels
from quartet_trainer.assembly import machine_of
from quartet_trainer.config import TrainerConfig
from quartet_trainer.logprobs import PolicyForward
from quartet_trainer.model import load_model
from quartet_trainer.probe import probe_logprobs
from transformers.models.qwen3 import modeling_qwen3

VOCAB = 96
CUDA = torch.cuda.is_available() and find_spec("liger_kernel") is not None


def loaded(folder: Path, device: str = "cpu") -> Any:
    return load_model(folder, "m", device=torch.device(device))


def logprobs_of(model: Any) -> Callable[[int], torch.Tensor]:
    policy = PolicyForward(model, model.device, None)
    return lambda shift: probe_logprobs(policy, VOCAB, 64, shift)


@pytest.mark.parametrize(
    ("setting", "device", "installed", "uses"),
    [
        ("auto", "cuda", True, True),
        ("auto", "cuda", False, False),
        ("auto", "cpu", True, False),
        ("off", "cuda", True, False),
        ("on", "cuda", True, True),
    ],
)
def test_kernels_are_used_where_they_are_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, setting: str, device: str, installed: bool, uses: bool
) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda _: object() if installed else None)
    with structlog.testing.capture_logs() as said:
        assert kernels.chosen(setting, device) is uses
    assert [(one["event"], one["liger"]) for one in said] == [("layer_kernels", uses)]


def test_what_cannot_be_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r'on a CPU.*set liger = "auto"'):
        machine_of(TrainerConfig(liger="on", device="cpu"))
    monkeypatch.setattr(kernels, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install \./sdk '\./services/trainer\[liger\]'"):
        kernels.check("on", "auto")


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """In Liger's place: what it does to transformers' module and to a model; its kernel is a plain MLP."""
    seen: dict[str, Any] = {"factor": 1.0}

    def kernel(mlp: Any, x: torch.Tensor) -> torch.Tensor:
        gated = torch.nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
        return mlp.down_proj(gated) * seen["factor"]

    def on_cuda(*_: Any) -> Any:
        raise AssertionError("a kernel for CUDA ran on a CPU")

    def apply(
        rope: bool = True,
        cross_entropy: bool = False,
        fused_linear_cross_entropy: bool = True,
        swiglu: bool = True,
        model: Any = None,
    ) -> None:
        seen["switches"] = (rope, cross_entropy, fused_linear_cross_entropy, swiglu)
        modeling_qwen3.apply_rotary_pos_emb = on_cuda
        modeling_qwen3.Qwen3MLP = None
        for layer in model.model.layers:
            layer.mlp.forward = kernel.__get__(layer.mlp)

    module = ModuleType("liger_kernel.transformers.monkey_patch")
    module.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": apply}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", ModuleType("liger_kernel.transformers"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("apply_rotary_pos_emb", "Qwen3MLP"):
        monkeypatch.setattr(modeling_qwen3, name, getattr(modeling_qwen3, name))
    return seen


def test_promise_1_layers_are_fused_and_the_output_layer_is_not(folder: Path, liger: dict[str, Any]) -> None:
    model = loaded(folder)
    kernels.fuse(model, logprobs_of(model), "m")
    assert liger["switches"] == (True, False, False, True)


@pytest.mark.parametrize("deviation", [None, 0.02], ids=["as it is", "random weights"])
def test_promise_2_a_model_that_computes_something_else_with_them_is_refused(
    folder: Path, liger: dict[str, Any], deviation: float | None
) -> None:
    """A gated MLP with another activation, which Liger does not ask for when it changes a model."""
    liger["factor"] = 0.5
    model = loaded(folder)
    if deviation is not None:
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=deviation)
    with pytest.raises(QuartetError, match='liger = "off"') as raised:
        kernels.fuse(model, logprobs_of(model), "m")
    assert raised.value.reason == "INVALID_CONFIG" and raised.value.metadata["key"] == "liger"


def test_promise_3_other_models_of_the_class_compute_as_ever(folder: Path, liger: dict[str, Any]) -> None:
    plain, plain_mlp = logprobs_of(loaded(folder))(0), modeling_qwen3.Qwen3MLP
    for _ in range(2):
        model = loaded(folder)
        kernels.fuse(model, logprobs_of(model), "m")
    assert modeling_qwen3.Qwen3MLP is plain_mlp
    assert torch.equal(logprobs_of(loaded(folder))(0), plain)


def test_promise_4_an_unknown_type_is_said_once_and_left_as_it_is(
    folder: Path, liger: dict[str, Any]
) -> None:
    model = loaded(folder)
    model.config.model_type = "unheard_of"
    with structlog.testing.capture_logs() as said:
        for _ in range(2):
            kernels.fuse(model, logprobs_of(model), "m")
    assert [one["event"] for one in said] == ["liger_does_not_know"] and "switches" not in liger


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device and liger-kernel")
def test_fused_layers_compute_the_same_values_and_gradients(folder: Path) -> None:
    found = []
    for fused in (False, True):
        model = loaded(folder, "cuda")
        if fused:
            kernels.fuse(model, logprobs_of(model), "m")
            assert "Liger" in model.model.norm._get_name()
        with torch.enable_grad():
            ids = torch.arange(40, device="cuda").view(2, 20) % VOCAB
            logp = torch.log_softmax(model(ids).logits, -1)
            logp.square().mean().backward()
        found.append((logp, {name: one.grad for name, one in model.named_parameters()}))
    (plain, plain_gradients), (fused_logp, gradients) = found
    torch.testing.assert_close(fused_logp, plain, atol=1e-4, rtol=1e-4)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain_gradients[name], atol=1e-4, rtol=1e-3)
