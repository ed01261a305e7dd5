"""The canary in a published manifest: the fixed sequence as the published cast computes it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from quartet_trainer.canary import CANARY_TOKENS, canary
from quartet_trainer.publish import Snapshot
from quartet_trainer.sample import Floats, Sample


def scores(value: float):  # type: ignore[no-untyped-def]
    seen: list[tuple[Sample, float]] = []

    def score(samples: list[Sample], weights: Snapshot, temperature: float) -> list[Floats]:
        seen.append((samples[0], temperature))
        return [np.full(len(samples[0].covered_K), value, np.float32)]

    return score, seen


def test_every_token_but_the_first_is_scored_once_at_temperature_one() -> None:
    score, seen = scores(-1.5)
    made = canary(score, {}, vocab_size=300, max_positions=4096)
    assert made is not None and len(made.token_ids) == CANARY_TOKENS
    assert list(made.logprobs) == [-1.5] * (CANARY_TOKENS - 1)
    (sample, temperature) = seen[0]
    assert temperature == 1.0 and list(sample.covered_K) == list(range(1, CANARY_TOKENS))
    assert list(sample.tokens_T) == list(made.token_ids)
    assert max(made.token_ids) < 300 and len(set(made.token_ids)) > CANARY_TOKENS // 2
    assert canary(score, {}, 300, 4096) == made


def test_a_short_model_has_a_short_canary_and_broken_weights_have_none() -> None:
    made = canary(scores(-2.0)[0], {}, vocab_size=8, max_positions=5)
    assert made is not None and len(made.token_ids) == 5
    assert canary(scores(-2.0)[0], {}, vocab_size=8, max_positions=1) is None
    for broken in (float("nan"), float("-inf")):
        assert canary(scores(broken)[0], {}, vocab_size=8, max_positions=64) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_canary_of_a_run_is_what_its_published_weights_compute(dtype: torch.dtype) -> None:
    from quartet_trainer.logprobs import PolicyForward
    from quartet_trainer.machine import Machine
    from quartet_trainer.passes import Passes
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=200, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=48, max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    machine = Machine(torch.device("cpu"), 4096, 4096, False)
    passes = Passes(PolicyForward(model, machine.device, None), machine, 4096, lambda: None)
    published = {name: value.detach().to(dtype) for name, value in model.named_parameters()}
    made = canary(passes.score, published, 200, 128)
    assert made is not None
    for name, parameter in model.named_parameters():
        parameter.data = published[name].float()
    tokens = torch.tensor(list(made.token_ids))
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0].double()
    expected = torch.log_softmax(logits, -1)[:-1].gather(1, tokens[1:, None])[:, 0]
    assert float((expected - torch.tensor(list(made.logprobs))).abs().max()) < 1e-4
