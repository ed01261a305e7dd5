"""quartet_trainer.products: what oneDNN computes is what PyTorch computes, and a row's bits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quartet_trainer import products
from quartet_trainer.products import add_weight_gradient, linear, use
from torch import Tensor, nn

SHAPES = [((50,), 24, 40), ((3, 7), 128, 320), ((5,), 384, 16)]


def seeded(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("is_mkls", [True, False])
def test_values_and_gradients_are_pytorch_s(
    rows: tuple[int, ...],
    inputs: int,
    outputs: int,
    with_bias: bool,
    is_mkls: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "_is_mkls", lambda: is_mkls)
    found, expected = [], []
    for product, results in ((linear, found), (F.linear, expected)):
        x, weight = seeded(*rows, inputs).requires_grad_(), seeded(outputs, inputs).requires_grad_()
        bias = seeded(outputs).requires_grad_() if with_bias else None
        out = product(x, weight, bias)
        (out * seeded(*rows, outputs)).sum().backward()
        results += [out.detach(), x.grad, weight.grad] + ([bias.grad] if bias is not None else [])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def test_what_is_frozen_keeps_no_inputs() -> None:
    hidden, weight = seeded(6, 5).requires_grad_(), seeded(4, 5)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = linear(hidden, weight)
    assert [one.shape for one in kept] == [weight.shape]
    out.sum().backward()
    torch.testing.assert_close(hidden.grad, weight.sum(0).expand(6, 5))


def test_a_bias_with_strides_and_a_row_without_others() -> None:
    x, weight, bias = seeded(5), seeded(4, 5).requires_grad_(), seeded(8)[::2]
    out = linear(x, weight, bias)
    torch.testing.assert_close(out, F.linear(x, weight, bias))
    out.sum().backward()
    torch.testing.assert_close(weight.grad, x.expand(4, 5))


def test_what_it_gives_may_be_changed_in_place() -> None:
    """As Gemma 3n does."""
    x, weight = seeded(2, 3, 5), seeded(4, 5).requires_grad_()
    out = linear(x, weight)
    out[0] += 1.0
    out.mul_(2.0).sum().backward()
    torch.testing.assert_close(weight.grad, 2 * x.sum((0, 1)).expand(4, 5))


def test_a_gradient_that_is_one_number_everywhere() -> None:
    x, weight = seeded(6, 5), seeded(4, 5).requires_grad_()
    linear(x, weight).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(4, 5))


@pytest.mark.parametrize(("inputs", "outputs"), [(128, 384), (384, 128), (1024, 640)])
def test_a_row_has_the_same_bits_whatever_stands_beside_it(inputs: int, outputs: int) -> None:
    x, weight = seeded(700, inputs), seeded(outputs, inputs)
    whole = linear(x, weight)
    for count in (2, 3, 4, 5, 17, 64, 333):
        assert torch.equal(linear(x[:count], weight), whole[:count]), count
    for columns in (7, outputs // 2):
        assert torch.equal(linear(x, weight[:columns]), whole[:, :columns]), columns


def test_what_is_no_float32_on_a_cpu_is_pytorch_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_product", None)
    x, weight = seeded(4, 8), seeded(3, 8)
    for kind in (torch.float64, torch.bfloat16):
        assert torch.equal(linear(x.to(kind), weight.to(kind)), F.linear(x.to(kind), weight.to(kind)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16
    assert linear(x[:0], weight).shape == (0, 3)


def test_modules_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Linear):
        """With code of its own."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    model = nn.ModuleDict({"plain": nn.Linear(8, 3), "own": Own(8, 3)})
    names, x = list(model.state_dict()), seeded(4, 8)
    expected = {name: module(x) for name, module in model.items()}
    use(model)
    asked = []
    monkeypatch.setattr(products, "_product", lambda x, *others: asked.append(others) or F.linear(x, *others))
    for name, module in model.items():
        torch.testing.assert_close(module(x), expected[name])
    assert len(asked) == 1 and list(model.state_dict()) == names and type(model["plain"]) is nn.Linear
    # peft copies what it trains whole: the copy computes with its own weights.
    other = copy.deepcopy(model["plain"])
    with torch.no_grad():
        other.weight.zero_()
        other.bias.zero_()
    assert not other(x).any() and model["plain"](x).any()


@pytest.mark.parametrize(
    ("processor", "asked"),
    [("GenuineIntel avx2 avx512f", 1), ("AuthenticAMD avx2 avx512f", 3), ("AuthenticAMD avx2", 1)],
)
def test_gradients_are_mkls_where_that_has_all_kernels(
    processor: str, asked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """products.py 5: forward passes are oneDNN's everywhere."""
    vendor, _, flags = processor.partition(" ")
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: fpu {flags}\n")
    monkeypatch.setattr(products, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    products._is_mkls.cache_clear()
    monkeypatch.setattr(products, "_product", lambda *given: calls.append(given) or F.linear(*given))
    calls: list[Any] = []
    try:
        linear(seeded(4, 8).requires_grad_(), seeded(3, 8).requires_grad_()).sum().backward()
    finally:
        products._is_mkls.cache_clear()
    assert len(calls) == asked


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_mkls", [True, False])
def test_a_weight_gradient_is_added_in_parts(
    kind: torch.dtype, is_mkls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_is_mkls", lambda: is_mkls)
    monkeypatch.setattr(products, "PART_ELEMENTS", 60)
    d_logits, hidden = seeded(20, 31).to(kind), seeded(20, 12).to(kind)
    total = torch.ones(31, 12)
    add_weight_gradient(total, d_logits, hidden)
    expected = 1 + d_logits.float().t() @ hidden.float()
    torch.testing.assert_close(total, expected, rtol=1e-5 if kind == torch.float32 else 2e-2, atol=0.1)
