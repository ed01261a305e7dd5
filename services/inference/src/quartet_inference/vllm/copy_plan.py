"""A version into a model as copies alone, learned from the reload that came before.

1. A plan is made of a trace only where every parameter and buffer that the reload reached is made of parts of
   the version, or constants, whole and without overlap, and stands where it stood before. Anything else, and
   any layer of a kind that is not known to be plain, is a `NoPlan` that says why.
2. It is compared, bit by bit, with what the reload of the same version has made.
3. It fits a version of the same names, shapes and types, as long as the model's tensors stay in their memory:
   CUDA graphs know the addresses.
4. Until `Bound.copy` nothing is touched, and that does nothing but copy. When it returns, all is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from quartet_inference.vllm.tracing import Part, Run, Slot, Trace, contiguous

#: What they do to weights after loading is visible to a trace, or nothing.
PLAIN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
#: Whose kernels read a mixture's experts as they are loaded.
PLAIN_BACKENDS = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)
#: To compare and to copy bits: as numbers, NaNs come out of a grouped copy on a GPU as another NaN.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Layout = dict[str, tuple[torch.dtype, torch.Size]]


class NoPlan(Exception):
    """Why the copies alone would not do."""


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """What a plan goes by."""
    return {name: (one.dtype, one.shape) for name, one in tensors.items()}


def keeps_weights() -> bool:
    """Whether plain kinds keep weights as they are loaded; elsewhere kernels that no trace sees pack them."""
    return bool(current_platform.is_cuda())


def check_kinds(model: nn.Module, config: Any) -> None:
    """NoPlan where something of a model is not known to be plain."""
    if not keeps_weights():
        raise NoPlan(f"on a {current_platform.device_type} layers pack or turn their weights")
    if config.model_config.quantization is not None:
        raise NoPlan(f"weights are quantized ({config.model_config.quantization})")
    if config.parallel_config.enable_eplb:
        raise NoPlan("experts move between workers (enable_eplb)")
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and type(method) not in PLAIN_METHODS:
            raise NoPlan(f"{name} has a {type(method).__name__}")
        if isinstance(method, UnquantizedFusedMoEMethod) and method.unquantized_backend not in PLAIN_BACKENDS:
            raise NoPlan(f"{name} has its experts as {method.unquantized_backend.value} wants them")
        if is_deferred_attention_layer(layer) and (type(layer) is not Attention or layer.has_sink):
            raise NoPlan(f"{name} is a {type(layer).__name__}")


@dataclass(frozen=True)
class _Copy:
    target: Tensor  # in the shape of its part, or flat where that lies together
    part: Part
    flat: bool


@dataclass(frozen=True)
class Bound:
    """The copies of one version."""

    together: list[tuple[list[Tensor], list[Tensor]]]
    others: list[tuple[Tensor, Tensor]]
    device: torch.device

    @torch.no_grad()
    def copy(self) -> None:
        """Make them."""
        for targets, sources in self.together:
            torch._foreach_copy_(targets, sources)
        for target, source in self.others:
            target.copy_(source)
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


class CopyPlan:
    """The copies of any version of one layout."""

    def __init__(self, trace: Trace, tensors: Mapping[str, Tensor], slots: Mapping[str, Slot]) -> None:
        """Of a reload of these tensors that has just ended. Errors: NoPlan."""
        why = trace.why or trace.astray()
        if why:
            raise NoPlan(why)
        self._layout = layout_of(tensors)
        self._slots = slots
        self._check_places()
        self._copies = [
            _copy(slots[name].tensor, run)
            for name, runs in trace.reached.items()
            if runs  # others were looked at
            for run in _whole(name, slots[name].tensor, list(runs.values()))
            if run.part is not None
        ]
        self._device = next(iter(slots.values())).tensor.device
        for one in self._copies:
            made = _source(tensors, one).to(one.target.dtype).to(one.target.device)
            if not torch.equal(_bits(one.target), _bits(made)):
                raise NoPlan(f"{one.part.name} is not as it was copied")

    def _check_places(self) -> None:
        moved = [name for name, slot in self._slots.items() if not slot.stayed]
        if moved:
            raise NoPlan(f"{moved[0]} is somewhere else after a reload")

    def __len__(self) -> int:
        return len(self._copies)

    def bind(self, tensors: Mapping[str, Tensor]) -> Bound:
        """Errors: NoPlan, where it does not fit."""
        if layout_of(tensors) != self._layout:
            raise NoPlan("names, shapes or types are others")
        self._check_places()
        together: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        others = []
        for one in self._copies:
            source = _source(tensors, one)
            target = one.target
            if one.flat and (source.dtype, source.device) == (target.dtype, target.device):
                targets, sources = together.setdefault(BITS[target.itemsize], ([], []))
                targets.append(_bits(target))
                sources.append(_bits(source))
            else:
                others.append((target, source))
        return Bound(list(together.values()), others, self._device)


def _whole(name: str, tensor: Tensor, runs: list[Run]) -> Iterator[Run]:
    """Its runs, which are all of it and none of it twice."""
    end = 0
    for run in sorted(runs, key=lambda one: one.start):
        if run.start != end:
            raise NoPlan(f"{name} is not made of what was copied there")
        end += run.count
        yield run
    if end != tensor.numel() or not tensor.is_contiguous():
        raise NoPlan(f"{name} is not made of what was copied there")


def _copy(tensor: Tensor, run: Run) -> _Copy:
    assert run.part is not None, "it is a constant"
    target = tensor.data.view(-1)[run.start : run.start + run.count]
    flat = contiguous(run.part.size, run.part.stride)
    return _Copy(target if flat else target.view(run.part.size), run.part, flat)


def _source(tensors: Mapping[str, Tensor], one: _Copy) -> Tensor:
    tensor, part = tensors[one.part.name], one.part
    offset = tensor.storage_offset() + part.offset
    if one.flat:
        return tensor.as_strided((one.target.numel(),), (1,), offset)
    return tensor.as_strided(part.size, part.stride, offset)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(BITS[tensor.itemsize])
