"""Log-probabilities of covered tokens: one forward pass of a micro-batch.

1. Only covered positions go through the output layer, in chunks whose logits are bounded; a pass of more than
   one chunk computes the logits anew in its backward pass instead of keeping them (head.py).
2. Logits are float32 before the softmax; those of a plain output layer, without a bias, are also summed in
   float32 (head.py).
3. Log-probabilities are taken at the temperature that the samples were drawn at, of logits that are scaled
   and capped as the model's configuration says (logits.py).

Shapes: R rows, L columns, K covered positions, P the same with padding, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from quartet_trainer import attention
from quartet_trainer.frozen import cast_weights
from quartet_trainer.head import Measure, capped, chunked_logprobs, is_best
from quartet_trainer.logits import logit_rule
from quartet_trainer.masks import FULL, attention_masks, kinds_of_layers, shared_tokens
from quartet_trainer.packing import MicroBatch, padded
from quartet_trainer.recompute import NOTHING, Recomputed, recomputing
from quartet_trainer.sample import Ints

#: Logits of a chunk, float32: 64 MiB. Larger ones are no faster on a CPU; a few of them exist at a time.
LOGIT_CHUNK_ELEMENTS = 2**24
#: On an accelerator, 512 MiB: every chunk reads the whole matrix, and adds to all of its gradient.
ACCELERATOR_LOGIT_CHUNK_ELEMENTS = 2**27


class Scoring(Protocol):
    """What PolicyForward computes."""

    def __call__(
        self, batch: MicroBatch, temperature: float, *, full_precision: bool, measure: Measure
    ) -> tuple[Tensor, Tensor]:
        """(log-probability of each covered token, what is measured there)."""
        ...


class PolicyForward(nn.Module):
    """A causal language model as a function from a micro-batch to log-probabilities and entropies."""

    def __init__(
        self,
        model: Any,
        device: torch.device,
        autocast_dtype: torch.dtype | None,
        recomputed: Recomputed = NOTHING,
    ) -> None:
        """`recomputed` is what is computed anew in the backward pass."""
        super().__init__()
        self.model = model
        self._device = device
        self._autocast_dtype = autocast_dtype
        self._recomputed = recomputed
        self._rule = logit_rule(model.config)

    @property
    def width(self) -> int:
        """Of the hidden states."""
        return int(self.model.get_input_embeddings().embedding_dim)

    @property
    def attends_by_segments(self) -> bool:
        """Whether the attention takes the segments of rows instead of a mask (attention.py)."""
        config = self.model.config
        return (
            # Or the one of several ranks, which computes the same (ranks/context.py).
            config._attn_implementation.startswith(attention.NAME)
            # Others compute with what they are given in code of their own.
            and bool(self.model._supports_attention_backend)
            and self._device.type == "cpu"
            and self._autocast_dtype is None
            and kinds_of_layers(config) == {FULL}
        )

    def shared_tokens(self, row_tokens: int | None) -> int:
        """How long rows may be that several samples share; None: as suits the model."""
        return shared_tokens(self.model.config, row_tokens, self.attends_by_segments)

    def forward(
        self,
        batch: MicroBatch,
        temperature: float,
        *,
        full_precision: bool = False,
        entropy_learns: bool = False,
        measure: Measure = "entropy",
    ) -> tuple[Tensor, Tensor]:
        """(log-probability of each covered token, what is measured there, with gradient if it learns)."""
        enabled = self._autocast_dtype is not None and not full_precision
        # No cache: a weight is used once in a pass, and its copy would be held to the end of it, in a rank
        # that holds a part of the model the whole of it.
        autocast = torch.autocast(
            self._device.type, dtype=self._autocast_dtype, enabled=enabled, cache_enabled=False
        )
        with autocast:
            count = len(batch.targets_K)
            with recomputing(self._recomputed):
                hidden_PH = self._hidden(batch)
            divisor = temperature * self._rule.divisor
            logp_P, measured_P = self._read_out(
                hidden_PH, self._padded(batch.targets_K), divisor, entropy_learns, measure
            )
            return logp_P[:count], measured_P[:count]

    @contextmanager
    def standing_as(self, placed: Mapping[str, Tensor], full_precision: bool = True) -> Iterator[Scoring]:
        """The same function with other parameters of the model; the live ones are left alone.

        They are to be computed with as `full_precision` says.
        """
        # Widening what autocast narrows wherever it is used takes memory for nothing.
        narrows = self._autocast_dtype is not None and not full_precision
        as_they_are = cast_weights(self.model) if narrows else frozenset()
        held = {} if narrows else self._held_narrow(placed)
        # Moved as they are and widened there: in one call the CPU would widen them first. One by one, so that
        # none is there in two types for longer than that takes. As parameters: what peft has around experts
        # would put anything else back as a buffer (ParamWrapper).
        named: dict[str, Tensor] = {
            f"model.{name}": nn.Parameter(
                moved if name in as_they_are else moved.float(), requires_grad=False
            )
            for name, tensor in (held | dict(placed)).items()
            for moved in (tensor.to(self._device),)
        }
        yield lambda *arguments, **options: functional_call(self, named, arguments, options)

    def _held_narrow(self, placed: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Frozen weights that float32 has to be computed with, too (frozen.py)."""
        named = self.model.named_parameters()
        return {
            name: one.detach() for name, one in named if one.dtype != torch.float32 and name not in placed
        }

    def _hidden(self, batch: MicroBatch) -> Tensor:
        output = self.model.base_model(
            input_ids=self._tensor(batch.token_ids_RL),
            position_ids=self._tensor(batch.position_ids_RL),
            attention_mask=self._masks(batch),
            use_cache=False,
        )
        hidden_RLH = cast(Tensor, output.last_hidden_state)
        return hidden_RLH.flatten(0, 1).index_select(0, self._padded(batch.predictors_K))

    def _masks(self, batch: MicroBatch) -> Any:
        """As the model takes them; None where every row is one sample."""
        if not batch.needs_mask:
            return None
        segments_RL = self._tensor(batch.segments_RL)
        if self.attends_by_segments:
            return segments_RL[:, None, None]
        return attention_masks(self.model.config, segments_RL, self._tensor(batch.position_ids_RL))

    def _read_out(
        self,
        hidden_KH: Tensor,
        targets_K: Tensor,
        temperature: float,
        entropy_learns: bool,
        measure: Measure,
    ) -> tuple[Tensor, Tensor]:
        head, cap = self.model.get_output_embeddings(), self._rule.cap
        chunk = chunk_of(head.out_features, self._device)
        narrows = torch.is_autocast_enabled(self._device.type)
        if len(hidden_KH) <= chunk and not (narrows and is_plain(head)):
            return token_logprobs(head, hidden_KH, targets_K, temperature, entropy_learns, cap, measure)
        if is_plain(head):
            logp, measured = chunked_logprobs(
                hidden_KH, head.weight, targets_K, temperature, chunk, cap, measure
            )
            # As of few: a loss of one's own may use it without learning from it.
            return logp, measured if entropy_learns else measured.detach()
        parts = [
            checkpoint(
                token_logprobs,
                *(head, hidden, targets, temperature, entropy_learns, cap, measure),
                use_reentrant=False,
            )
            for hidden, targets in zip(
                torch.split(hidden_KH, chunk), torch.split(targets_K, chunk), strict=True
            )
        ]
        return torch.cat([logp for logp, _ in parts]), torch.cat([measured for _, measured in parts])

    def _padded(self, indices_K: Ints) -> Tensor:
        return self._tensor(np.pad(indices_K, (0, padded(len(indices_K)) - len(indices_K))))

    def _tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def chunk_of(vocabulary: int, device: torch.device) -> int:
    """Positions whose logits exist at a time."""
    elements = LOGIT_CHUNK_ELEMENTS if device.type == "cpu" else ACCELERATOR_LOGIT_CHUNK_ELEMENTS
    return max(1, elements // vocabulary)


def is_plain(head: nn.Module) -> bool:
    """Whether an output layer is a product with a matrix and nothing else."""
    return type(head) is nn.Linear and head.bias is None


def token_logprobs(
    head: nn.Module,
    hidden_KH: Tensor,
    targets_K: Tensor,
    temperature: float,
    entropy_learns: bool = False,
    cap: float | None = None,
    measure: Measure = "entropy",
) -> tuple[Tensor, Tensor]:
    """(log p of each target, what is measured), at the temperature."""
    logits_KV = capped(head(hidden_KH).float(), cap)
    if temperature != 1.0:
        logits_KV = logits_KV / temperature
    logp_KV = torch.log_softmax(logits_KV, dim=-1)
    if measure == "best":
        measured_K = is_best(logp_KV.detach(), targets_K)
    elif entropy_learns:
        measured_K = -(logp_KV.exp() * logp_KV).sum(-1)
    else:
        with torch.no_grad():
            measured_K = -logp_KV.exp().mul_(logp_KV).sum(-1)
    return logp_KV.gather(1, targets_K[:, None]).squeeze(1), measured_K
