"""Which experts take tokens in a plain forward pass of transformers, to compare what engines tell with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Sets = list[list[frozenset[int]]]


def routes(model: Any, tokens: Sequence[int]) -> Sets:
    """For each token, for each router in the model's order: the experts that take it."""
    chosen: list[Any] = []
    kind = model.base_model._can_record_outputs["router_logits"].target_class
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, output: chosen.append(output[2]))
        for module in model.modules()
        if isinstance(module, kind)
    ]
    with torch.no_grad():
        model(torch.tensor([list(tokens)]))
    for hook in hooks:
        hook.remove()
    return as_sets(torch.stack(chosen, 1).numpy())


def as_sets(experts_TNk: np.ndarray[Any, Any]) -> Sets:
    return [[frozenset(layer.tolist()) for layer in token] for token in experts_TNk]


def told_as_computed(told: Any, model: Any, start: int = 0) -> bool:
    """Whether a completion tells, from a position on, what a plain pass over its tokens does."""
    assert told.routed.start == start
    return as_sets(told.routed.experts) == routes(model, [*told.prompt, *told.tokens[:-1]])[start:]
