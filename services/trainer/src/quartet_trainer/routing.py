"""How a mixture-of-experts model spreads the tokens of a batch over its experts.

1. Counted are the tokens of the batch, in each layer, as the router chose: each goes to its top k experts,
   and none is dropped. Padding is not counted.
2. Watching changes nothing that is computed; a layer that is computed anew in a backward pass is not counted
   again.
3. Routers that answer with something else than (logits or probabilities, weights, choices), as few of
   transformers' do, are not counted, and the model trains all the same.
4. What is counted stays on the model's device until `table`: no layer waits for the device.

Of the loads of a layer's experts (tokens of each over their mean): the largest of any layer, by how much the
largest exceeds the mean, averaged over layers (MaxVio of arXiv 2408.15664), and the share of experts that
got nothing. And the entropy of the router's probabilities, the softmax of its logits, in nats: log(experts)
where it does not prefer any.

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
from quartet.errors import QuartetError
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
from transformers.utils.output_capturing import OutputRecorder

#: The routers of transformers whose first answer has been through the softmax.
ANSWER_PROBABILITIES = frozenset({"Gemma4TextRouter"})


class Routing:
    """The routers of a model, and what they did since `begin`."""

    def __init__(self, model: Any) -> None:
        self._routers, self._device = routers_of(model), model.device
        # A row for each router: choices of each expert, then the sum of entropies, then tokens.
        self._seen: list[Tensor | None] = [None] * len(self._routers)

    def begin(self) -> None:
        """Forget what was seen."""
        self._seen = [None] * len(self._routers)

    @contextmanager
    def watched(self, present_T: npt.NDArray[np.bool_]) -> Iterator[None]:
        """Count in a forward pass; `present_T` says which tokens are no padding."""
        if not self._routers:
            yield
            return
        present = torch.from_numpy(present_T).to(self._device)
        hooks = [
            router.register_forward_hook(partial(self._count, number, present))
            for number, router in enumerate(self._routers)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def _count(
        self, number: int, present_T: Tensor, router: nn.Module, _inputs: object, output: object
    ) -> None:
        if not _is_routing(output, len(present_T)):
            return
        scores_TE, _, chosen_Tk, *_ = output
        scores_TE = scores_TE.float()
        p_TE = scores_TE if type(router).__name__ in ANSWER_PROBABILITIES else scores_TE.softmax(-1)
        counted_T = present_T.double()
        entropy = torch.special.entr(p_TE).sum(-1).double() @ counted_T
        # Not bincount, which asks the device for the largest choice before it counts.
        loads_E = counted_T.new_zeros(scores_TE.shape[-1])
        loads_E.scatter_add_(0, chosen_Tk.flatten().long(), counted_T.repeat_interleave(chosen_Tk.shape[1]))
        row = torch.cat([loads_E, entropy[None], counted_T.sum()[None]])
        seen = self._seen[number]
        self._seen[number] = row if seen is None else seen + row

    def table(self) -> Tensor | None:
        """[N, E + 2] of what was seen, on the CPU, to be added up over ranks; None where nothing was."""
        rows = [row for row in self._seen if row is not None]
        return torch.stack(rows).cpu() if rows else None


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


def routers_of(model: Any) -> list[nn.Module]:
    """The routers of a model, in its order."""
    # Transformers' own declaration of where a model's router logits come from.
    recorder = (model.base_model._can_record_outputs or {}).get("router_logits")
    if not isinstance(recorder, OutputRecorder):  # JetMoe has a list: attention chooses experts, too
        return []
    return [module for module in model.modules() if isinstance(module, recorder.target_class)]


def may_have_routers(config: Any) -> bool:
    """Whether models of this configuration's kind declare some; one of a kind that does may have none."""
    kinds = {type(config), type(config.get_text_config())}
    found = [one.get(kind, None) for one in (MODEL_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING) for kind in kinds]
    return any("router_logits" in (getattr(one, "_can_record_outputs", None) or {}) for one in found)


def freeze_routers(model: Any, base_model: str) -> None:
    """Let the routers of a model stay as they are. Errors: INVALID_CONFIG."""
    routers = routers_of(model)
    if not routers:
        raise QuartetError(
            "INVALID_CONFIG",
            f"freeze_routers: {base_model} has no routers; leave it out",
            key="freeze_routers",
            value=True,
            remedy="leave it out",
        )
    for router in routers:
        router.requires_grad_(False)


def _is_routing(output: object, tokens: int) -> TypeGuard[tuple[Tensor, Tensor, Tensor]]:
    if not isinstance(output, tuple) or len(output) < 3:
        return False
    scores, chosen = output[0], output[2]
    per_token = scores.ndim == chosen.ndim == 2 and len(scores) == len(chosen) == tokens
    return per_token and not chosen.is_floating_point()
