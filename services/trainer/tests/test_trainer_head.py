"""The output layer in chunks against log_softmax in one piece: values bit for bit, gradients to float32."""

from __future__ import annotations

import pytest
import torch
from quartet_trainer.head import chunked_logprobs
from quartet_trainer.logprobs import token_logprobs

K, H, V = 61, 24, 301


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.nn.Linear, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(K, H, generator=generator, dtype=torch.float64).to(dtype)
    head = torch.nn.Linear(H, V, bias=False, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(V, H, generator=generator))
    return hidden.requires_grad_(), head, torch.randint(0, V, (K,), generator=generator)


def gradients(
    hidden: torch.Tensor, weight: torch.Tensor, logp: torch.Tensor, entropy: torch.Tensor, of_entropy: bool
) -> list[torch.Tensor]:
    direction = torch.linspace(-1, 1, K)
    total = (direction * logp).sum()
    if of_entropy:
        total = total + (direction.flip(0) * entropy).sum()
    return list(torch.autograd.grad(total, [hidden, weight]))


@pytest.mark.parametrize("chunk", [K, 30, 7])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("of_entropy", [False, True])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_equals_one_piece(chunk: int, temperature: float, of_entropy: bool, cap: float | None) -> None:
    hidden, head, targets = inputs()
    whole = token_logprobs(head, hidden, targets, temperature, of_entropy, cap)
    ours = chunked_logprobs(hidden, head.weight, targets, temperature, chunk, cap)
    for one, other in zip(ours, whole, strict=True):
        assert torch.equal(one, other)
    expected = gradients(hidden, head.weight, *whole, of_entropy)
    for one, other in zip(gradients(hidden, head.weight, *ours, of_entropy), expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [K, 30, 7])
def test_the_most_likely_tokens_are_told_in_the_place_of_the_entropy(chunk: int) -> None:
    hidden, head, targets = inputs()
    with torch.no_grad():
        products = hidden @ head.weight.t()
        targets[::3] = products.argmax(-1)[::3]
        whole = token_logprobs(head, hidden, targets, 1.0, measure="best")
        ours = chunked_logprobs(hidden, head.weight, targets, 1.0, chunk, measure="best")
        plain, _ = token_logprobs(head, hidden, targets, 1.0)
        tied = head.weight[:1].expand(V, H).contiguous()
        _, first = chunked_logprobs(hidden, tied, torch.arange(K), 1.0, chunk, measure="best")
    for one, other in zip(ours, whole, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(ours[0], plain), "the log-probabilities are as ever"
    expected = products.argmax(-1) == targets
    assert torch.equal(ours[1] != 0, expected) and 20 < int(expected.sum()) < K
    assert first.tolist() == [1.0] + [0.0] * (K - 1), "of several the first"


def test_the_gradient_of_the_entropy_alone_and_of_one_input_alone() -> None:
    hidden, head, targets = inputs()
    _, entropy = token_logprobs(head, hidden, targets, 1.0, entropy_learns=True)
    _, ours = chunked_logprobs(hidden, head.weight, targets, 1.0, 7)
    (expected,) = torch.autograd.grad(entropy.sum(), [hidden])
    head.weight.requires_grad_(False)
    _, alone = chunked_logprobs(hidden, head.weight, targets, 1.0, 7)
    for result in (ours, alone):
        (found,) = torch.autograd.grad(result.sum(), [hidden])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_under_autocast_factors_are_bfloat16_and_sums_are_not() -> None:
    """head.py 2: those of each logit, and of the gradients over chunks."""
    hidden, head, targets = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        whole = token_logprobs(head, hidden, targets, 1.0)
        ours = chunked_logprobs(hidden, head.weight, targets, 1.0, 8)
    products = hidden.bfloat16().double() @ head.weight.bfloat16().double().t()
    exact = products.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert ours[0].dtype == torch.float32
    torch.testing.assert_close(ours[0], exact.float(), atol=1e-5, rtol=0)
    assert (whole[0] - exact).abs().max() > 1e-3  # as far as rounded logits are from it
    expected = gradients(hidden, head.weight, *whole, False)
    for one, other in zip(gradients(hidden, head.weight, *ours, False), expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, atol=0.02 * float(other.abs().max()), rtol=0.05)


def test_nothing_of_tokens_times_vocabulary_is_kept() -> None:
    hidden, head, targets = inputs()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        chunked_logprobs(hidden, head.weight, targets, 1.0, 8)
    assert max(kept) <= max(K * H, V * H)
