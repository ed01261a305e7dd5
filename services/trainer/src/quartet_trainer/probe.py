"""Whether a model computes here what it computes by itself.

1. A model that passes is one that packing and logprobs.py compute rightly: both are compared with the model's
   own forward pass, through a narrow window where there is one, and with logits so large that a cap shows.
2. The model is left as it was, to the last bit.
"""

from __future__ import annotations

from typing import Any

import torch

from quartet_trainer import masks
from quartet_trainer.logprobs import PolicyForward
from quartet_trainer.model import refused
from quartet_trainer.packing import pack
from quartet_trainer.sample import Sample, make_sample

#: Of what another token in the prompt changes, or of 1 where that is more. Float32 sums in another order
#: differ by much less, whether weights are random (1e-6 of 1e-2) or trained (1e-4 of 10) ...
PROBE_TOLERANCE = 1e-2
#: ... and may differ by so much where a model hardly looks back at all.
PROBE_NOISE = 1e-5
#: Of the output layer, for a moment: a power of two, which leaves no trace.
PROBE_GAIN = 1024.0
#: What transformers' models raise that differ in which positions and masks they take.
UNPACKED = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
ANOTHER_ARCHITECTURE = "use an architecture with causal attention and an output layer that ends it"
#: Less than a sample of the probe, so that a window shows.
PROBE_WINDOW = 6


def probe(policy: PolicyForward, vocab_size: int, base_model: str, row_tokens: int | None) -> None:
    """Refuse a model for which packed log-probabilities are not the model's own. Errors: INVALID_CONFIG."""
    model = policy.model
    with torch.no_grad(), masks.narrowed(model.config, PROBE_WINDOW):
        alone = _alone(model, vocab_size)
        if not alone.isfinite().all():
            why = "log-probabilities by its weights are no finite numbers"
            raise refused(
                base_model,
                why,
                "name a checkpoint from before they went wrong; from_scratch, a smaller initializer_range",
            )
        allowed = tolerated(float((_alone(model, vocab_size, shift=1) - alone).abs().max()))

        def off(tokens: int | None) -> str:
            """What is wrong with rows of so many tokens; empty: nothing."""
            try:
                difference = float((probe_logprobs(policy, vocab_size, tokens) - alone).abs().max())
            except UNPACKED as error:
                what = (str(error).strip().splitlines() or [type(error).__name__])[0]
                return f"{type(model).__name__} does not take packed rows: {what}"
            if difference <= allowed:
                return ""
            return f"packed and plain log-probabilities of {type(model).__name__} differ by {difference:.3g}"

        why = off(row_tokens)
        if why:
            # Distances that are counted along the row (ALiBi), and states that no mask resets.
            alone_fits = policy.shared_tokens(row_tokens) != 1 and not off(1)
            remedy = "set the trainer's row_tokens = 1" if alone_fits else ANOTHER_ARCHITECTURE
            raise refused(base_model, why, remedy)
        if _bends_logits(policy, vocab_size, row_tokens):
            why = (
                f"{type(model).__name__} bends large logits otherwise than its configuration says (logits.py)"
            )
            raise refused(base_model, why, ANOTHER_ARCHITECTURE)


def _bends_logits(policy: PolicyForward, vocab_size: int, row_tokens: int | None) -> bool:
    """Whether a cap is left out, or there is none. Random weights have no logits as large as that."""
    weight = policy.model.get_output_embeddings().weight
    weight.mul_(PROBE_GAIN)
    try:
        alone = _alone(policy.model, vocab_size)
        packed = probe_logprobs(policy, vocab_size, row_tokens)
    finally:
        weight.div_(PROBE_GAIN)
    return float((packed - alone).abs().max()) > PROBE_TOLERANCE * float(packed.abs().max())


def tolerated(seen: float) -> float:
    """How far apart log-probabilities may be that another token in the prompt changes by so much."""
    return max(PROBE_NOISE, PROBE_TOLERANCE * min(1.0, seen))


def probe_logprobs(
    policy: PolicyForward, vocab_size: int, row_tokens: int | None, shift: int = 0
) -> torch.Tensor:
    """Of two short samples, packed; with a shift another token stands in their prompt."""
    row_tokens = policy.shared_tokens(row_tokens)
    (batch,) = pack(_probes(vocab_size, shift), [0, 1], budget_tokens=64, row_tokens=row_tokens)
    with torch.no_grad(), masks.narrowed(policy.model.config, PROBE_WINDOW):
        packed: torch.Tensor = policy(batch, 1.0, full_precision=True)[0]
    return packed


def _probes(vocab_size: int, shift: int = 0) -> list[Sample]:
    """`shift` makes another token of one that covered tokens see through layers alone."""
    prompt = [(7 * i + 3) % vocab_size for i in range(10)]
    prompt[6] = (prompt[6] + shift) % vocab_size
    tails = ([(5 * i + 1) % vocab_size for i in range(3)], [(11 * i + 2) % vocab_size for i in range(4)])
    return [make_sample(i, prompt + tail, [(10, len(tail), 0)], [], []) for i, tail in enumerate(tails)]


def _alone(model: Any, vocab_size: int, shift: int = 0) -> torch.Tensor:
    """Of the same samples by the model's own forward pass, one at a time."""
    return torch.cat([_plain_logprobs(model, sample) for sample in _probes(vocab_size, shift)])


def _plain_logprobs(model: Any, sample: Sample) -> torch.Tensor:
    tokens = torch.from_numpy(sample.tokens_T).to(model.device)
    logits = model(input_ids=tokens[None]).logits[0].float()
    covered = torch.from_numpy(sample.covered_K).to(model.device)
    logp = torch.log_softmax(logits, -1)
    return logp[covered - 1, tokens[covered]]
