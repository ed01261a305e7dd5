"""The lean forward pass in bfloat16, beside transformers' own code and against float32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from quartet_inference.embedded import attention, forward, hub, probe, products
from quartet_inference.embedded.kv_cache import KvCache
from quartet_inference.embedded.lora import Bank
from quartet_inference.embedded.prefill import prefill
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 128,
    "initializer_range": 0.1, "tie_word_embeddings": False,
}  # fmt: skip
ROWS, LONGEST = 6, 40
#: Operations that compute nothing.
VIEWS = frozenset(
    {"view", "expand", "transpose", "permute", "slice", "select", "unsqueeze", "squeeze", "t", "detach"}
    | {"alias", "split", "chunk", "_unsafe_view", "reshape", "flatten", "unbind"}
)


def rounded(kind: str, **changes: Any) -> Any:
    """A random model in float32 whose weights bfloat16 has, too."""
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | changes))
    return model.eval().requires_grad_(False).bfloat16().float()


def narrow(model: Any) -> Any:
    made = copy.deepcopy(model).bfloat16()
    attention.use(made)
    products.widen_logits(made)
    return made


def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 300, (LONGEST - 3 * row,), generator=generator).tolist() for row in range(ROWS)]


def decoded(model: Any, kind: type) -> Tensor:
    """[2 * ROWS, V]: after the prompts but for their last tokens, and after these."""
    cache = KvCache(hub.kv_shape(model), ROWS, 64, 1 << 24)
    cache.reserve(ROWS, LONGEST + 1)
    run = kind(model, cache, Bank(0, 0))
    first = prefill(run, 0, [one[:-1] for one in sequences()], [0] * ROWS)
    ids = torch.tensor([one[-1:] for one in sequences()])
    positions = torch.tensor([[len(one) - 1] for one in sequences()])
    return torch.cat([first, run(0, ids, positions, LONGEST, None)]).log_softmax(-1)


@pytest.mark.parametrize("kind", sorted(forward.LEAN_MODELS))
def test_it_is_nearer_to_float32_than_transformers_own_code(kind: str) -> None:
    """forward.py 2 and 3."""
    model = rounded(kind)
    with torch.inference_mode():
        logits = [model(torch.tensor([one])).logits[0].log_softmax(-1) for one in sequences()]
        exact = torch.stack([one[-2] for one in logits] + [one[-1] for one in logits])
        lean, plain = (decoded(narrow(model), one) for one in (forward.LeanForward, hub.HubForward))
    assert lean.dtype == torch.float32
    off, plainly_off = (float((found - exact).abs().mean()) for found in (lean, plain))
    assert 0 < off < 0.97 * plainly_off < 0.1


def test_a_decode_step_takes_half_the_operations() -> None:
    """On a GPU it is these that a step of few rows waits for."""

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func._schema.name.partition("::")[2] not in VIEWS
            return func(*args, **(kwargs or {}))

    found = []
    for kind in (forward.LeanForward, hub.HubForward):
        model = narrow(rounded("qwen3"))
        cache = KvCache(hub.kv_shape(model), ROWS, 64, 1 << 24)
        cache.reserve(ROWS, LONGEST)
        run: forward.Forward = kind(model, cache, Bank(0, 0))
        ids = torch.zeros(ROWS, 1, dtype=torch.long)
        with torch.inference_mode(), Counting() as counting:
            run(0, ids, ids + 7, LONGEST, None)
        found.append(counting.count)
    lean, plain = found
    assert 12 * 20 < lean < plain / 2


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_model_that_makes_much_of_roundings_is_served_and_one_that_is_wrong_is_not(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """probe.py 1: both passes round, each in its own way."""
    model = narrow(rounded(kind, initializer_range=0.6))
    cache = KvCache(hub.kv_shape(model), ROWS, 64, 1 << 24)
    run = forward.choose(model, cache, Bank(0, 0))
    monkeypatch.setattr(probe, "ROUNDINGS", 0)
    with pytest.raises(ValueError, match="decodes log-probabilities that are"):
        probe.check(model, run, cache)
    monkeypatch.undo()
    probe.check(model, run, cache)
    monkeypatch.setattr(forward, "causal_mask", lambda at, context: hub.causal_mask(at + 1, context))
    with pytest.raises(ValueError, match="decodes log-probabilities that are"):
        probe.check(model, run, cache)


def test_where_an_engine_is_pytorch_does_without_cudnn_s_attention() -> None:
    """attention.py 4."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    narrow(rounded("llama", num_hidden_layers=1))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
