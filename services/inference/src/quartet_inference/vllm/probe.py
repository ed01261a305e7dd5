"""Whether vLLM computes what the folder's model computes, asked before it answers anybody.

1. vLLM scores a short sequence as transformers' plain forward pass does, or the start is refused. Where the
   weights will be replaced it does so again after these very weights were loaded as an update: what vLLM
   makes of weights when it starts (fused, packed, sharded), an update must make of them, too.
2. Where experts are noted, vLLM notes those that transformers' routers choose for the same tokens.
3. What ends vLLM at its first step ends the start, with the reason.
4. A folder without weights, weights that are no numbers and a quantisation of vLLM's own leave nothing to be
   compared with transformers; the rest is asked all the same.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from quartet.config import ConfigError
from quartet.errors import QuartetError
from quartet.weights import tensor
from torch import Tensor, nn

from quartet_inference.config import InferenceConfig
from quartet_inference.embedded import model
from quartet_inference.embedded.experts import routers_of
from quartet_inference.engine import Experts, NonFiniteLogits, ScoreRequest
from quartet_inference.vllm.engine import VllmEngine

#: Scored are all but the first.
TOKENS = 32
#: Mean difference of a log-probability: in float32 that of a canary, in bfloat16, where both sides round,
#: more (quartet_inference.canary). Weights in a wrong place make 0.5. A larger canary_tolerance holds here.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.25}
#: So many of the experts that are noted are those that the model's routers choose: in bfloat16 not all, as
#: choices between experts that are nearly as good fall otherwise. Those of another layer agree by chance.
ROUTED_ALIKE = 0.75
INSTEAD = (
    "change max_model_len or the keys of vllm (dtype, kv_cache_bytes, max_lora_rank, args), or choose "
    'engine = "embedded"'
)


@dataclass(frozen=True)
class Known:
    """Tokens, and the log-probabilities of all but the first by a plain forward pass; empty: not known."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    experts: Experts | None = None  # [tokens, routers, slots], where the routers tell what they choose


def known_of(network: nn.Module, same: bool, experts: bool = False) -> Known:
    """What a transformers model says of a sequence, where vLLM should say the same (`same`)."""
    config: Any = network.config
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or TOKENS
    tokens = tuple((7 * place + 3) % int(text.vocab_size) for place in range(max(2, min(TOKENS, positions))))
    if not same:
        return Known(tokens, ())
    with torch.inference_mode(), _choices(routers_of(network) if experts else []) as chosen:
        rows = network(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1].float()
    logprobs = rows.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
    if not logprobs.isfinite().all():
        return Known(tokens, ())
    return Known(tokens, tuple(logprobs.tolist()), torch.stack(chosen, 1).numpy() if chosen else None)


@contextmanager
def _choices(routers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """What each of them chooses meanwhile."""
    chosen: list[Tensor] = []

    def note(router: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, tuple) and len(output) >= 3 and not output[2].is_floating_point():
            chosen.append(output[2])

    hooks = [router.register_forward_hook(note) for router in routers]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


async def check(engine: VllmEngine, config: InferenceConfig, sequence: Known) -> None:
    """Refuse what vLLM gets wrong. Nobody is answered yet. Errors: ConfigError."""
    tokens = sequence.tokens[: engine.info().max_model_len]
    wanted = sequence.logprobs[: len(tokens) - 1]
    first = await _scored(engine, config, tokens)
    if wanted and first:
        _compare(engine, config, first, wanted, "computes")
    if first and config.routed_experts:
        await _check_experts(engine, config, tokens[:-1], sequence.experts)
    if not first or not (config.weights_address or config.accept_push) or not model.has_weights(config.model):
        return
    try:
        await engine.load_again(await asyncio.to_thread(_folder, engine, config))
    except QuartetError as error:
        raise ConfigError(
            f"vLLM takes no other weights for model = {str(config.model)!r} ({error.message}), which "
            f"weights_address and accept_push ask for: {INSTEAD}"
        ) from error
    again = await _scored(engine, config, tokens)
    _compare(engine, config, again, first, "computes, once weights were replaced by themselves,")


async def _check_experts(
    engine: VllmEngine, config: InferenceConfig, tokens: tuple[int, ...], known: Experts | None
) -> None:
    try:
        found = await engine.experts_unnamed(tokens)
    except QuartetError as error:
        raise ConfigError(f"vLLM cannot note experts: {engine.info().ended or error.message}") from error
    if found is None or found.shape[1] != engine.info().routers:
        why = "none" if found is None else f"those of {found.shape[1]} layers, not of {engine.info().routers}"
    elif known is not None and (alike := _alike(found, known[: len(tokens)])) < ROUTED_ALIKE:
        why = f"others: {alike:.0%} of them are the ones that its routers choose"
    else:
        return
    raise ConfigError(
        f"routed_experts = true: of model = {str(config.model)!r} vLLM notes {why}; leave it out, or "
        'choose engine = "embedded"'
    )


def _alike(found: Experts, wanted: Experts) -> float:
    if found.shape != wanted.shape:
        return 0.0
    return float((found[..., None] == wanted[..., None, :]).any(-1).mean())


def _folder(engine: VllmEngine, config: InferenceConfig) -> dict[str, tensor.Tensor]:
    # Nothing computes in this process yet: transformers may make the dtype its default meanwhile.
    return model.ModelWeights(model.load(config.model, engine.info().dtype, weights_follow=False)).tensors()


async def _scored(engine: VllmEngine, config: InferenceConfig, tokens: tuple[int, ...]) -> list[float]:
    try:
        return await engine.score_unnamed(ScoreRequest(tokens, ((1, len(tokens) - 1),)))
    except NonFiniteLogits:
        return []
    except QuartetError as error:
        why = engine.info().ended or error.message
        raise ConfigError(f"vLLM cannot run model = {str(config.model)!r} so: {why}; {INSTEAD}") from error


def _compare(
    engine: VllmEngine,
    config: InferenceConfig,
    found: Sequence[float],
    wanted: Sequence[float],
    what: str,
) -> None:
    difference = float(np.abs(np.subtract(found, wanted)).mean()) if found else math.nan
    if not difference <= max(TOLERANCES[engine.info().dtype], config.canary_tolerance or 0):
        raise ConfigError(
            f"vLLM {what} log-probabilities of model = {str(config.model)!r} that are {difference:.2g} off, "
            f"in the mean: {INSTEAD}"
        )
