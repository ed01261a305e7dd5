"""quartet_trainer.norms: the bits of transformers' norms, and autograd's gradients."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import pytest
import torch
from quartet_trainer import norms
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm


def seeded(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def norm(kind: Any, size: int = 24) -> Any:
    module = kind(size)
    with torch.no_grad():
        module.weight.copy_(seeded(size))
    return module


def results(module: Any, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    module.weight.grad = None
    out = module(x)
    # Not in one piece, and the same number many times over, as a sum's is.
    (out.transpose(0, 1) * seeded(*out.shape[1::-1], *out.shape[2:])).sum().backward()
    return [out.detach(), x.grad, module.weight.grad]


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
@pytest.mark.parametrize("shape", [(5, 7, 24), (3, 5, 2, 24)])
def test_values_keep_their_bits_and_gradients_are_autograd_s(kind: Any, shape: tuple[int, ...]) -> None:
    """norms.py 1, 2."""
    module = norm(kind)
    expected = results(module, seeded(*shape))
    norms.use(module)
    assert isinstance(vars(module)["forward"], MethodType)
    out, *gradients = results(module, seeded(*shape))
    assert torch.equal(out, expected[0])
    for one, other in zip(gradients, expected[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    # A copy, such as peft's of what it trains whole, computes with its own weight.
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.weight.zero_()
    assert not other(seeded(2, 24)).any() and module(seeded(2, 24)).any()


def test_what_computes_otherwise_stays_as_it_is() -> None:
    """norms.py 1."""

    class HalfRMSNorm(LlamaRMSNorm):
        """With code of its own."""

        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states) / 2

    model = nn.ModuleList([norm(Gemma3RMSNorm), norm(HalfRMSNorm), nn.RMSNorm(24), nn.Linear(24, 24)])
    norms.use(model)
    assert not any("forward" in vars(module) for module in model)


def test_what_is_no_float32_on_a_cpu_is_the_module_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """norms.py 3."""
    module = norm(Qwen3RMSNorm)
    x = seeded(3, 24)
    expected = module(x.double()), module(x)
    norms.use(module)
    monkeypatch.setattr(norms, "_RmsNorm", None)
    assert torch.equal(module(x.double()), expected[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module(x), expected[1])
