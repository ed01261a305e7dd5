"""Gradient checkpointing: the activations of a layer are computed anew in the backward pass instead of kept.

1. Gradients are those without it, bit for bit on a CPU: a layer computed anew computes the same, dropout
   included.
2. It holds for the passes inside `recomputing` alone: several runs may share the model, and not the setting.
3. Of layers within layers the outermost is computed anew, once.
4. A model without layers that it could act on is refused.
5. Where attention is kept, what its kernels gave is; the rest of a layer is computed anew. In long sequences
   they take the most time. Attention in float64 (attention.py) is no kernel, and is computed anew.

Kept are the input of every layer and the activations of one layer at a time, for about a third more time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from quartet.errors import QuartetError
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

#: What `scaled_dot_product_attention` may choose.
ATTENTION_KERNELS = frozenset(
    {
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


@dataclass(frozen=True, slots=True)
class Recomputed:
    """The layers of a model that are computed anew."""

    layers: Sequence[nn.Module] = ()
    keeps_attention: bool = False


NOTHING = Recomputed()


def recomputable(model: nn.Module, base_model: str) -> Sequence[nn.Module]:
    """The layers of a model that can be computed anew. Errors: INVALID_CONFIG."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        # By the run, or by the trainer's configuration, as which a translation may have set it.
        remedy = "set gradient_checkpointing = false, in the trainer's configuration ([trainer]) too"
        raise QuartetError(
            "INVALID_CONFIG",
            f"gradient_checkpointing: {base_model} has no layers that transformers could compute anew; "
            f"{remedy}",
            key="gradient_checkpointing",
            value=True,
            remedy=remedy,
        )
    # Its backward pass would look for what the inner one did not keep.
    inner = {id(one) for layer in layers for one in layer.modules() if one is not layer}
    return [layer for layer in layers if id(layer) not in inner]


@contextmanager
def recomputing(recomputed: Recomputed) -> Iterator[None]:
    """Forward passes inside keep the inputs of these layers only."""
    # Transformers' own switch acts on models in training mode, in which layers may also drop something out.
    anew = partial(checkpoint, use_reentrant=False)
    if recomputed.keeps_attention:
        anew = partial(anew, context_fn=partial(create_selective_checkpoint_contexts, _policy))
    for layer in recomputed.layers:
        plain: Any = layer.forward
        layer.forward = partial(anew, plain)
    try:
        yield
    finally:
        for layer in recomputed.layers:
            del layer.forward


def _policy(_context: object, operation: object, *_: object, **__: object) -> CheckpointPolicy:
    kept = operation in ATTENTION_KERNELS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
