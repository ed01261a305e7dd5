"""quartet_inference.embedded.products: a row's bits, also in modules of transformers' own code."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from quartet_inference.embedded.model import load
from quartet_inference.embedded.packs import Packs
from quartet_inference.embedded.products import (
    SIZES_PER_DOUBLING,
    SMALL_MATRIX,
    linear,
    size_of,
    use,
    widen_logits,
)
from torch import Tensor, nn


def seeded(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("inputs", "outputs"), [(128, 384), (384, 128), (1024, 640)])
def test_a_row_has_the_same_bits_among_few_and_many(inputs: int, outputs: int) -> None:
    x, weight, bias = seeded(500, inputs), seeded(outputs, inputs), seeded(outputs)
    whole = linear(x, weight, bias)
    torch.testing.assert_close(whole, F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)
    counts = [2, 3, 4, 5, 17, 64] + ([1] if weight.numel() <= SMALL_MATRIX else [])
    for count in counts:
        assert torch.equal(linear(x[:count], weight, bias), whole[:count]), count


def test_rows_are_filled_up_to_few_sizes() -> None:
    """products.py 3"""
    sizes = [size_of(rows, SIZES_PER_DOUBLING) for rows in range(1, 3000)]
    assert all(rows <= size <= rows * 9 / 8 for rows, size in enumerate(sizes, start=1))
    assert len({size for size in sizes if 128 <= size < 256}) == SIZES_PER_DOUBLING
    assert len({size for size in sizes if size <= 128}) <= 40


def test_modules_of_a_model_compute_so_and_stay_what_they_are() -> None:
    module, narrow = nn.Linear(48, 16), nn.Linear(48, 16).bfloat16()
    for one in (module, narrow):
        use(one)
    x = seeded(2, 3, 48)
    whole = linear(x.reshape(-1, 48), module.weight, module.bias).view(2, 3, 16)
    assert torch.equal(module(x), whole) and torch.equal(module(x[:1, :2]), whole[:1, :2])
    assert type(module) is nn.Linear and list(module.state_dict()) == ["weight", "bias"]
    assert torch.equal(narrow(x.bfloat16()), F.linear(x.bfloat16(), narrow.weight, narrow.bias))
    assert module(x[:0]).shape == (0, 3, 16)


@pytest.mark.parametrize("bias", [False, True])
def test_narrow_logits_are_summed_in_float32(bias: bool) -> None:
    """products.py 4: the factors are the narrow ones, and the sums are not rounded to them."""
    head = nn.Linear(48, 300, bias=bias).bfloat16()
    owner = nn.Sequential(head)
    owner.get_output_embeddings = lambda: head  # type: ignore[assignment]
    x = seeded(2, 3, 48).bfloat16()
    rounded = head(x)
    widen_logits(owner)
    exact = F.linear(x.double(), head.weight.double(), head.bias.double() if bias else None)
    found = head(x)
    assert found.shape == (2, 3, 300) and found.dtype == torch.float32
    torch.testing.assert_close(found, exact.float(), rtol=0, atol=1e-5)
    assert (rounded - exact).abs().max() > 1e-3


def test_a_model_that_is_only_read_is_given_back_at_once(model_folder: Path) -> None:
    """Until the next full collection it would stand beside the served one."""
    network = load(model_folder, "float32", weights_follow=False)
    layer = next(module for module in network.modules() if type(module) is nn.Linear)
    weight = weakref.ref(layer.weight)
    gc.disable()
    try:
        del network, layer
        assert weight() is None
    finally:
        gc.enable()


def test_other_dtypes_are_pytorch_s_own_and_a_bias_may_have_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = seeded(8, 48), seeded(16, 48), seeded(32)[::2]
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", None)
    narrow = x.bfloat16(), weight.bfloat16()
    assert torch.equal(linear(*narrow), F.linear(*narrow))


@pytest.mark.parametrize(("inputs", "outputs"), [(16, 128), (128, 384), (384, 128), (1000, 641)])
def test_a_product_from_a_copy_in_order_has_the_same_bits(inputs: int, outputs: int) -> None:
    """packs.py 1"""
    x, weight, bias = seeded(500, inputs), seeded(outputs, inputs), seeded(outputs)
    packs = Packs(weight.nbytes)
    for count in (1, 2, 5, 17, 64, 100, 500):
        assert torch.equal(linear(x[:count], weight, bias, packs), linear(x[:count], weight, bias)), count
    assert packs.of(weight) is packs.of(weight) is not weight


def test_copies_have_an_end_and_are_made_anew_for_what_changed() -> None:
    """packs.py 2 and 3"""
    x, first, second = seeded(8, 48), seeded(32, 48), seeded(16, 48)
    packs = Packs(first.nbytes + second.nbytes - 1)
    assert packs.of(first) is not first and packs.of(second) is second
    before = linear(x, first, packs=packs)
    first.neg_()
    assert torch.equal(linear(x, first, packs=packs), before), "what a forgotten call of `forget` would do"
    packs.forget()
    assert torch.equal(linear(x, first, packs=packs), -before)
    packs.forget()
    assert packs.of(second) is not second and packs.of(first) is first
