"""How a mixture-of-experts model spreads the tokens of a batch over its experts.

1. Counted are the tokens of the batch, in each layer, as the router chose: each goes to its top k experts,
   and none is dropped. Padding is not counted.
2. Watching changes nothing that is computed; a layer that is computed anew in a backward pass is not counted
   again.
3. Routers that answer with something else than (logits, weights, choices), as few of transformers' do, are
   not counted, and the model trains all the same.

Of the loads of a layer's experts (tokens of each over their mean): the largest of any layer, by how much the
largest exceeds the mean, averaged over layers (MaxVio of arXiv 2408.15664), and the share of experts that
got nothing. And the entropy of the router's probabilities in nats: log(experts) where it does not prefer any.

Shapes: N routers, E experts, T tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import OutputRecorder


class Routing:
    """The routers of a model, and what they did since `begin`."""

    def __init__(self, model: Any) -> None:
        self._routers = _routers(model)
        # A row for each router: choices of each expert, then the sum of entropies, then tokens.
        self._seen: list[Tensor | None] = [None] * len(self._routers)

    def begin(self) -> None:
        """Forget what was seen."""
        self._seen = [None] * len(self._routers)

    @contextmanager
    def watched(self, present_T: npt.NDArray[np.bool_]) -> Iterator[None]:
        """Count in a forward pass; `present_T` says which tokens are no padding."""
        hooks = [
            router.register_forward_hook(partial(self._count, number, present_T))
            for number, router in enumerate(self._routers)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _count(
        self,
        number: int,
        present_T: npt.NDArray[np.bool_],
        _router: nn.Module,
        _inputs: object,
        output: object,
    ) -> None:
        if not _is_routing(output, len(present_T)):
            return
        logits_TE, _, chosen_Tk, *_ = output
        with torch.no_grad():
            logp_TE = torch.log_softmax(logits_TE[present_T].float(), -1)
            entropy = -(logp_TE.exp() * logp_TE).sum().double()
            loads_E = torch.bincount(chosen_Tk[present_T].flatten(), minlength=logits_TE.shape[-1])
            tokens = entropy.new_tensor(len(logp_TE))
            row = torch.cat([loads_E.double(), entropy[None], tokens[None]]).cpu()
        seen = self._seen[number]
        self._seen[number] = row if seen is None else seen + row

    def table(self) -> Tensor | None:
        """[N, E + 2] of what was seen, to be added up over ranks; None where nothing was."""
        rows = [row for row in self._seen if row is not None]
        return torch.stack(rows) if rows else None


def routing_values(table: Tensor) -> dict[str, float]:
    """The figures of a table."""
    counts_NE, entropy_N, tokens_N = table[:, :-2], table[:, -2], table[:, -1]
    loads_NE = counts_NE / counts_NE.mean(1, keepdim=True)
    largest_N = loads_NE.max(1).values
    return {
        "router_load_max": float(largest_N.max()),
        "router_load_violation": float((largest_N - 1).mean()),
        "router_unused_experts": float((counts_NE == 0).double().mean()),
        "router_entropy": float((entropy_N / tokens_N).mean()),
    }


def _routers(model: Any) -> list[nn.Module]:
    # Transformers' own declaration of where a model's router logits come from.
    recorder = (model.base_model._can_record_outputs or {}).get("router_logits")
    if not isinstance(recorder, OutputRecorder):  # JetMoe has a list: attention chooses experts, too
        return []
    return [module for module in model.modules() if isinstance(module, recorder.target_class)]


def _is_routing(output: object, tokens: int) -> TypeGuard[tuple[Tensor, Tensor, Tensor]]:
    if not isinstance(output, tuple) or len(output) < 3:
        return False
    logits, chosen = output[0], output[2]
    per_token = logits.ndim == chosen.ndim == 2 and len(logits) == len(chosen) == tokens
    return per_token and not chosen.is_floating_point()
