"""quartet_inference.vllm.tracing, with reloads of our own: what is followed, and what makes no plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("vllm", reason="vLLM is not installed in this interpreter (make install-vllm)")

from quartet_inference.vllm.copy_plan import CopyPlan, NoPlan
from quartet_inference.vllm.tracing import MAX_PIECES, Trace, slots_of

Tensors = dict[str, Tensor]
Reload = Callable[[nn.Module, Tensors], None]
WIDE, DEEP = 6, 4


class Layer(nn.Module):
    """What is loaded: a matrix, a vector, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDE, DEEP), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(WIDE), requires_grad=False)
        self.register_buffer("scale", torch.ones(1))
        self.kept: Any = None


def version(seed: int) -> Tensors:
    torch.manual_seed(seed)
    return {
        "top": torch.randn(2, DEEP), "rest": torch.randn(WIDE - 2, DEEP), "turned": torch.randn(DEEP, WIDE),
        "bias": torch.randn(WIDE), "half": torch.randn(WIDE).bfloat16(), "one": torch.randn(1),
        "large": torch.randn(WIDE, 2 * DEEP),
    }  # fmt: skip


def traced(reload: Reload, layer: nn.Module) -> CopyPlan:
    given, slots = version(0), slots_of(layer)
    trace = Trace(given, slots)
    with trace:
        reload(layer, given)
    return CopyPlan(trace, given, slots)


def fused(layer: Any, given: Tensors) -> None:
    layer.weight.data[:2].copy_(given["top"])
    layer.weight.data[2:].copy_(given["rest"])


def turned(layer: Any, given: Tensors) -> None:
    layer.weight.data.copy_(given["turned"].t())


def narrowed(layer: Any, given: Tensors) -> None:
    layer.weight.data.copy_(given["large"].narrow(1, DEEP, DEEP))


def widened(layer: Any, given: Tensors) -> None:
    layer.bias.data.copy_(given["half"])


def repeated(layer: Any, given: Tensors) -> None:
    layer.bias.data.copy_(given["one"])


def in_columns(layer: Any, given: Tensors) -> None:
    layer.weight.data[:, :2].copy_(given["turned"].t()[:, 2:])
    layer.weight.data[:, 2:].copy_(given["large"][:, :2])


def padded(layer: Any, given: Tensors) -> None:
    layer.weight[:2].data.copy_(given["top"])
    layer.weight[2:].data.fill_(3.0)
    layer.scale.copy_(torch.ones(1))


def written_twice(layer: Any, given: Tensors) -> None:
    layer.bias.data.copy_(given["half"])
    layer.bias.data.copy_(given["bias"])


def by_fresh_ones(layer: Any, given: Tensors) -> None:
    """As vLLM does; what is freed is where the next one is made."""
    for _ in range(50):
        fresh = torch.empty(WIDE, DEEP)
        fresh[:2].copy_(given["top"])
        fresh[2:].copy_(given["rest"])
        layer.weight.data.copy_(fresh)
        fresh.copy_(fresh)
        del fresh
        bias = torch.empty(WIDE)
        bias.copy_(given["bias"])
        layer.bias.data.copy_(bias)
        del bias


def to_nowhere(layer: Any, given: Tensors) -> None:
    """vLLM counts what its loaders copy."""
    torch.empty(2, DEEP, device="meta").copy_(given["top"].to("meta"))
    fused(layer, given)


FOLLOWED = [
    fused, turned, narrowed, widened, repeated, in_columns, padded, written_twice, by_fresh_ones, to_nowhere,
]  # fmt: skip


@pytest.mark.parametrize("reload", FOLLOWED)
def test_copies_are_followed(reload: Reload) -> None:
    """tracing.py 1, 3: the plan makes of any version what the reload makes of it."""
    layer = Layer()
    plan = traced(reload, layer)
    for seed in range(1, 4):
        given, expected = version(seed), Layer()
        reload(expected, given)
        plan.bind(given).copy()
        for name, one in expected.state_dict().items():
            assert torch.equal(one, layer.state_dict()[name])


def test_a_trace_changes_nothing_of_a_reload() -> None:
    """tracing.py 4."""
    for reload in (*FOLLOWED, *(reload for reload, _ in LOST)):
        watched, alone = Layer(), Layer()
        with Trace(version(1), slots_of(watched)):
            reload(watched, version(1))
        reload(alone, version(1))
        for name, one in alone.state_dict().items():
            assert torch.equal(one, watched.state_dict()[name])


def multiplied(layer: Any, given: Tensors) -> None:
    layer.bias.data.copy_(given["bias"] * 2)


def multiplied_there(layer: Any, given: Tensors) -> None:
    layer.bias.data.copy_(given["bias"]).mul_(2)


def packed(layer: Any, given: Tensors) -> None:
    fused(layer, given)
    layer.kept = torch.cat([layer.weight.data, layer.weight.data])


def copied_elsewhere(layer: Any, given: Tensors) -> None:
    layer.kept = torch.empty(WIDE)
    layer.kept.copy_(given["bias"])


def kept_too(layer: Any, given: Tensors) -> None:
    layer.kept = torch.empty(WIDE)
    layer.kept.copy_(given["bias"])
    layer.bias.data.copy_(layer.kept)


def unseen(layer: Any, given: Tensors) -> None:
    """By a kernel that no dispatcher knows."""
    fresh = torch.empty(WIDE)
    fresh.copy_(given["bias"])
    layer.kept = fresh.numpy().copy()


def moved_in_part(layer: Any, given: Tensors) -> None:
    fresh = torch.empty(WIDE)
    fresh.copy_(given["bias"])
    layer.bias.data[:2].copy_(fresh[:2])


def looked_at(layer: Any, given: Tensors) -> None:
    if given["one"].item() < 100:
        layer.bias.data.copy_(given["bias"])


def read_as_another(layer: Any, given: Tensors) -> None:
    layer.bias.data.copy_(given["bias"].view(torch.int32))


def written_as_another(layer: Any, given: Tensors) -> None:
    layer.bias.data.view(torch.int32).copy_(given["bias"])


def written_in_part(layer: Any, given: Tensors) -> None:
    layer.weight.data[:2].copy_(given["top"])


def written_across(layer: Any, given: Tensors) -> None:
    fused(layer, given)
    layer.weight.data[1:3].copy_(given["top"])


def put_elsewhere(layer: Any, given: Tensors) -> None:
    fused(layer, given)
    layer.weight = nn.Parameter(layer.weight.data.clone(), requires_grad=False)


def in_other_memory(layer: Any, given: Tensors) -> None:
    layer.bias.data.copy_(given["bias"])
    layer.bias.data = torch.zeros(WIDE)


def moved_turned(layer: Any, given: Tensors) -> None:
    fresh = torch.empty(DEEP, WIDE)
    fresh.copy_(given["turned"])
    layer.weight.data.copy_(fresh.t())


LOST: list[tuple[Reload, str]] = [
    (multiplied, "mul"), (multiplied_there, "mul_"), (packed, "cat"), (looked_at, "_local_scalar_dense"),
    (copied_elsewhere, "bias is not used"), (kept_too, "elsewhere"), (unseen, "bias is not used"),
    (read_as_another, "read as torch.int32"), (written_as_another, "written to as torch.int32"),
    (written_in_part, "weight is not made of"), (written_across, "weight is not made of"),
    (put_elsewhere, "clone"), (in_other_memory, "somewhere else"), (moved_turned, "not moved as it is"),
    (moved_in_part, "moved in part"),
]  # fmt: skip


@pytest.mark.parametrize(("reload", "why"), LOST)
def test_what_is_no_copy_makes_no_plan(reload: Reload, why: str) -> None:
    """tracing.py 1, 2; copy_plan.py 1."""
    with pytest.raises(NoPlan, match=why):
        traced(reload, Layer())


def test_a_plan_that_makes_something_else_is_none() -> None:
    """copy_plan.py 2: compared bit by bit; here something that no trace sees has written."""
    layer, given = Layer(), version(0)
    slots = slots_of(layer)
    with Trace(given, slots) as trace:
        fused(layer, given)
    layer.weight.numpy()[3, 2] *= -1
    with pytest.raises(NoPlan, match="rest is not as it was copied"):
        CopyPlan(trace, given, slots)


def test_a_target_in_too_many_pieces_is_none() -> None:
    """Each would be a copy in every pause."""

    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(MAX_PIECES + 1, 2), requires_grad=False)

    layer, given = Large(), {"column": torch.zeros(MAX_PIECES + 1, 1)}
    with Trace(given, slots_of(layer)) as trace:
        layer.weight.data[:, :1].copy_(given["column"])
    assert "pieces" in trace.why
