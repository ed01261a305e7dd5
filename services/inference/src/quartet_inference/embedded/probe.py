"""Whether an engine computes what its model computes, asked before it answers anybody.

1. Prompts that are computed in pieces and tokens that are decoded, of two rows of different lengths, have the
   log-probabilities of a plain forward pass of each sequence alone, up to rounding. Another model is refused.
2. So is one that looks through a window which is narrower than `max_model_len`: a row of the cache is seen
   whole.
3. Weights that are no numbers show nothing, and pass. Nothing that was computed here stays in the cache.

Shapes: T tokens, P compared positions, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quartet_inference.embedded.forward import Forward
from quartet_inference.embedded.hub import UNSERVED, not_decoded
from quartet_inference.embedded.kv_cache import KvCache
from quartet_inference.embedded.prefill import prefill

#: Of the longer sequence: enough for two pieces of a prompt and a decoded token.
TOKENS = 12
#: How much shorter the other one is, so that its row is padded.
SHORTER = 3
#: Two of a prompt, and a decoded token: fewer tokens have fewer.
PIECES = 3
#: Less than TOKENS, so that a window shows.
WINDOW = 4
#: Mean over the vocabulary, as a share of what another token in the prompt changes, or of 1 where that is
#: more; and what rounding makes of it where a model hardly looks back. In float32 sums in another order give
#: 1e-6 of either; in bfloat16 0.02 (docs/numerics.md).
TOLERANCES = {torch.float32: (1e-2, 1e-5)}
NARROW_TOLERANCE = (0.25, 0.1)
#: Layers that make much of a rounding make it of one of the embeddings, too. What forward.py rounds otherwise
#: than transformers came to 1.8 times that at most, what is wrong to 2.9 times at least. And no more than a
#: share of what another token changes is rounding.
ROUNDINGS, MOST_OF_SEEN = 2.5, 0.5


def check(network: nn.Module, run: Forward, cache: KvCache) -> None:
    """Refuse what the engine would get wrong. Nobody decodes yet. Errors: ValueError."""
    model: Any = network
    kind = type(network).__name__
    length = min(TOKENS, cache.max_length - 1)
    # Both are computed in as many pieces: what has no room for a shorter one of two has equal ones.
    shorter = length - SHORTER if length >= SHORTER + PIECES else length
    sequences = [_sequence(model, 0, length), _sequence(model, 1, shorter)]
    with torch.inference_mode():
        plain = _plain_logprobs(model, sequences)
        if not plain.isfinite().all():
            return  # their requests fail until other weights come
        _check_window(model, cache.max_length)
        try:
            found = _engine_logprobs(run, cache, sequences)
        except UNSERVED as error:
            raise ValueError(not_decoded(kind, error)) from error
        for row in range(len(sequences)):
            cache.clean_row(row)
        others = _plain_logprobs(model, [[*_sequence(model, 2, 1), *one[1:]] for one in sequences])
    seen = float((others - plain).abs().mean(-1).max())
    difference = float((found - plain).abs().mean(-1).max())
    share, noise = TOLERANCES.get(next(network.parameters()).dtype, NARROW_TOLERANCE)
    if difference <= max(noise, share * min(1.0, seen)):
        return
    with torch.inference_mode():
        rounding = float((_rounded_logprobs(model, sequences) - plain).abs().mean(-1).max())
    if not difference <= min(ROUNDINGS * rounding, MOST_OF_SEEN * seen):
        raise ValueError(
            f"{kind} decodes log-probabilities that are {difference:.2g} off those of its forward pass, "
            "in the mean; use engine vllm if it knows the model, or another model"
        )


def _check_window(model: Any, max_model_len: int) -> None:
    text = model.config.get_text_config()
    wide: int | None = getattr(text, "sliding_window", None)
    if wide is None or wide >= max_model_len:
        return
    sequence = [_sequence(model, 0, TOKENS)]
    plain = _plain_logprobs(model, sequence)
    # Not every model that has the setting looks through it.
    text.sliding_window = WINDOW
    try:
        narrow = _plain_logprobs(model, sequence)
    finally:
        text.sliding_window = wide
    if not torch.equal(plain, narrow):
        raise ValueError(
            f"the model attends over a window of {wide}: set max_model_len to at most that, "
            "or use engine vllm"
        )


def _rounded_logprobs(model: Any, sequences: list[list[int]]) -> Tensor:
    """`_plain_logprobs` of embeddings that are a rounding off."""
    embeddings = model.get_input_embeddings()
    rounding = torch.finfo(embeddings.weight.dtype).eps / 2
    hook = embeddings.register_forward_hook(lambda _module, _inputs, out: out * (1 + rounding))
    try:
        return _plain_logprobs(model, sequences)
    finally:
        hook.remove()


def _sequence(model: Any, number: int, length: int) -> list[int]:
    size = int(model.get_input_embeddings().num_embeddings)
    return [(7 * place + 5 * number + 3) % size for place in range(length)]


def _positions(sequence: list[int]) -> list[int]:
    """Where pieces end: of the prompt, twice, and after a decoded token."""
    return [max(1, len(sequence) // 2) - 1, max(1, len(sequence) - 1) - 1, len(sequence) - 1]


def _engine_logprobs(run: Forward, cache: KvCache, sequences: list[list[int]]) -> Tensor:
    """[2 * P, V], as the engine goes about it."""
    rows, longest = len(sequences), max(map(len, sequences))
    cache.reserve(rows, min(longest + 1, cache.max_length))
    ends = [_positions(sequence) for sequence in sequences]
    first = prefill(run, 0, [one[: end[0] + 1] for one, end in zip(sequences, ends, strict=True)], [0] * rows)
    pieces = [first]
    if all(end[0] < end[1] for end in ends):
        prompts = [one[: end[1] + 1] for one, end in zip(sequences, ends, strict=True)]
        pieces.append(prefill(run, 0, prompts, [end[0] + 1 for end in ends]))
    else:
        pieces.append(first)
    ids = torch.tensor([[one[-1]] for one in sequences])
    positions = torch.tensor([[len(one) - 1] for one in sequences])
    run(0, ids, positions, longest, None)
    pieces.append(run(0, ids, positions, longest, None))  # the second time it may be a recording (graphs.py)
    return torch.stack(pieces, 1).flatten(0, 1).log_softmax(-1)


def _plain_logprobs(model: Any, sequences: list[list[int]]) -> Tensor:
    """The same by the model's own forward pass, one sequence at a time."""
    ids = [torch.tensor([one], device=model.device) for one in sequences]
    logits = [model(input_ids=one, use_cache=False).logits[0].float() for one in ids]
    at = [_positions(one) for one in sequences]
    return torch.cat([one[places] for one, places in zip(logits, at, strict=True)]).log_softmax(-1)
