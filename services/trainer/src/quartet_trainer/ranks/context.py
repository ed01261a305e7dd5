"""Context parallelism: neighbouring ranks share each sequence, so that none holds the activations of all of a
long one (DeepSpeed-Ulysses, arXiv 2309.14509).

1. Of every micro-batch a rank computes the same columns of all rows, neighbours the following ones. Only in
   attention does it see all columns, and there a share of the heads: exchanges before, and one after.
2. Every rank of a context gets the log-probabilities and entropies of all covered tokens, to the same bits.
   The gradients of its parameters are those of its own tokens; the sum over the ranks is the batch's.
3. All ranks of a context pass through the same micro-batches in the same order.
4. A model that cannot be computed so is refused when it is opened, by what it says and by a comparison.

Shapes: R rows, W columns of a row, C ranks of a context, L = W / C columns of a rank; T = R * L. H heads, D
head size. K covered tokens of the micro-batch, k those whose predictors this rank has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from quartet.local.context_parallel import check_context
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from quartet_trainer import attention
from quartet_trainer.masks import FULL, SLIDING, attention_masks, kinds_of_layers, one_sample_masks
from quartet_trainer.model import refused
from quartet_trainer.packing import MicroBatch
from quartet_trainer.ranks.alone import WITHOUT_CONTEXT
from quartet_trainer.ranks.columns import columns_of
from quartet_trainer.ranks.sharding import ShardedForward
from quartet_trainer.sample import Ints

#: What models are told to attend by; attention.NAME begins it, because it computes the same.
NAME = f"{attention.NAME}_of_a_context"
#: Stands for causal attention without a mask. Models pass on what has four dimensions; without any mask they
#: would make one of this rank's columns.
_CAUSAL = torch.zeros(1, 1, 1, 1, dtype=torch.long)


@dataclass(frozen=True, slots=True)
class Context:
    """The ranks that share sequences with this one, itself included."""

    size: int
    place: int
    group: Any

    @classmethod
    def of(cls, rank: int, ranks: int, size: int, wait: timedelta) -> Context:
        """Meet the neighbours, and let models attend by NAME over them; all ranks do it at once.

        Errors: ConfigError.
        """
        check_context(size, ranks)
        # Neighbours by number are on one machine, where exchanges are fast, if `size` divides its ranks.
        firsts = range(0, ranks, size)
        groups = [dist.new_group(list(range(first, first + size)), timeout=wait) for first in firsts]
        context = cls(size, rank % size, groups[rank // size])
        AttentionInterface.register(NAME, context.attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        return context

    def part_of(self, batch: MicroBatch) -> MicroBatch:
        """The columns of this rank."""
        return columns_of(batch, self.place, self.size)

    # -- attention

    def attention(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """An attention function of transformers: [R, H, L, D] in, [R, L, H, D] out.

        The mask is of all columns, in one of the forms of quartet_trainer.attention, or _CAUSAL.
        """
        assert attention_mask is not None, "ContextForward gives every layer one"
        groups = query.shape[1] // key.shape[1]
        if times := self._copies(key.shape[1], groups):
            key, value = (one.repeat_interleave(times, dim=1) for one in (key, value))
            groups //= times
        if torch.is_autocast_enabled(query.device.type):
            # What attention would do by itself, after twice the bytes were exchanged.
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = (one.to(dtype) for one in (query, key, value))
        query, key, value = (self._heads_apart(one) for one in (query, key, value))
        mask = None if attention_mask.shape == _CAUSAL.shape else attention_mask
        if mask is not None and mask.shape[-1] != query.shape[2]:
            raise ValueError(f"{type(module).__name__} cuts masks to the length of its input")
        told = _Heads(groups, getattr(module, "is_causal", True))
        out, _ = attention.attention(told, query, key, value, mask, **options)
        return self._columns_apart(out), None

    def _copies(self, key_heads: int, groups: int) -> int:
        """How often each head of the keys has to be there, so that ranks get as many; 0: as they are."""
        if key_heads % self.size == 0:
            return 0
        times = self.size // math.gcd(key_heads, self.size)
        return times if groups % times == 0 else groups

    def _heads_apart(self, x_RHLD: Tensor) -> Tensor:
        """[R, H, L, D] -> [R, H / C, W, D]."""
        rows, heads, own, dim = x_RHLD.shape
        if heads % self.size:
            raise ValueError(f"{self.size} ranks cannot share {heads} heads")
        apart = x_RHLD.view(rows, self.size, heads // self.size, own, dim)
        found = _exchanged(apart.permute(1, 0, 2, 3, 4), self.group)
        return found.permute(1, 2, 0, 3, 4).reshape(rows, heads // self.size, self.size * own, dim)

    def _columns_apart(self, x_RWhD: Tensor) -> Tensor:
        """[R, W, H / C, D] -> [R, L, H, D]."""
        rows, width, heads, dim = x_RWhD.shape
        apart = x_RWhD.view(rows, self.size, width // self.size, heads, dim)
        found = _exchanged(apart.permute(1, 0, 2, 3, 4), self.group)
        return found.permute(1, 2, 0, 3, 4).reshape(rows, width // self.size, self.size * heads, dim)

    # -- models

    def enter(self, model: Any, name: str) -> None:
        """Let a model attend over the context. Errors: INVALID_CONFIG."""
        kind, text = type(model).__name__, model.config.get_text_config()
        heads = int(getattr(text, "num_attention_heads", 0))
        why = ""
        if not kinds_of_layers(model.config) <= {FULL, SLIDING}:
            why = f"{kind} has layers that go through a sequence token by token, or in chunks"
        elif model.config._attn_implementation != attention.NAME or not model._supports_attention_backend:
            why = f"{kind} computes attention in code of its own"
        elif heads % self.size:
            why = f"the {heads} heads of {kind} cannot be shared by {self.size} ranks"
        if why:
            raise refused(name, f"{why}, as context_parallel = {self.size} wants it", WITHOUT_CONTEXT)
        model.set_attn_implementation(NAME)


@dataclass(frozen=True, slots=True)
class _Heads:
    """What attention asks of a module: how many heads of the queries share one of the keys."""

    num_key_value_groups: int
    is_causal: bool


class ContextForward(ShardedForward):
    """What a sharded model computes of sequences that several ranks share."""

    def __init__(self, context: Context, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._context = context

    def forward(self, batch: MicroBatch, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """As PolicyForward, of all covered tokens, from this rank's part of a micro-batch or all of it."""
        # Passes have parts, because they look at their tokens; the probe does not.
        part = batch if batch.whole is not None else self._context.part_of(batch)
        whole = part.whole
        assert whole is not None
        found = super().forward(part, *arguments, **options)
        logp_K, measured_K = (
            _gathered(one, whole.own_k, whole.covered, self._context.group) for one in found
        )
        return logp_K, measured_K

    def _masks(self, batch: MicroBatch) -> Any:
        whole = batch.whole
        assert whole is not None
        config = self.model.config
        if not batch.needs_mask:
            rows, width = whole.segments_RW.shape
            return one_sample_masks(config, rows, width, _CAUSAL, self._device)
        segments_RW = self._tensor(whole.segments_RW)
        if self.attends_by_segments:
            return segments_RW[:, None, None]
        return attention_masks(config, segments_RW, self._tensor(whole.position_ids_RW))


def _exchanged(parts_C: Tensor, group: Any) -> Tensor:
    """The part of each rank for this one, in the place of this rank's part for it."""
    return _Exchange.apply(parts_C, group)  # type: ignore[no-any-return,no-untyped-call]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts_C: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _all_to_all(parts_C, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradients[0], ctx.group), None


def _all_to_all(parts_C: Tensor, group: Any) -> Tensor:
    given = parts_C.contiguous()
    found = torch.empty_like(given)
    dist.all_to_all_single(found, given, group=group)
    return found


def _gathered(values_k: Tensor, own_k: Ints, covered: int, group: Any) -> Tensor:
    """The values of all covered tokens; each is computed by one rank, the others add zero to it."""
    return _Gathering.apply(values_k, torch.from_numpy(own_k).to(values_k.device), covered, group)  # type: ignore[no-any-return,no-untyped-call]


class _Gathering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_k: Tensor, own_k: Tensor, covered: int, group: Any) -> Tensor:
        ctx.save_for_backward(own_k)
        all_K = values_k.new_zeros(covered)
        all_K[own_k] = values_k
        dist.all_reduce(all_K, group=group)
        return all_K

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        # Every rank computes the loss of all tokens: what reaches its own is whole already.
        (own_k,) = ctx.saved_tensors
        return gradients[0][own_k], None, None, None
