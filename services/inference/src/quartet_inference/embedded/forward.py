"""The forward pass of the embedded engine: a transformers model over the rows of the KV cache.

1. `forward(rows, ids_BT, positions_BT, context)` writes keys and values of the given tokens at the given
   positions of a range of neighbouring rows, attends causally over positions below `context`, and returns the
   logits at one chosen token of each row.
2. `LeanForward` and `HubForward` agree to rounding. Lean runs the decoder family named in LEAN_MODELS with
   fused projections and grouped attention, in half of the operations; HubForward (hub.py) any other causal
   decoder through its own transformers code.
3. In a narrow dtype Lean rounds to it what products of matrices, SiLU and attention take and give, and what
   the KV cache takes; what layers add up, norms and rotations are float32, as under a trainer's autocast.
4. Fused projections are the storage of the module's own parameters, which become views: copying new weights
   into the parameters is all that a weight update has to do.
5. Every row of the cache gets the low-rank products of the adapter that the bank says it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quartet_inference.embedded import attention, products
from quartet_inference.embedded.attention import attend, mask_of
from quartet_inference.embedded.hub import HubForward, causal_mask
from quartet_inference.embedded.kv_cache import KvCache
from quartet_inference.embedded.lora import Bank, Plan
from quartet_inference.embedded.packs import Packs
from quartet_inference.embedded.products import linear

# Pre-norm decoders with a gated SiLU MLP and rotary positions: what LeanForward computes.
LEAN_MODELS = frozenset({"llama", "qwen2", "qwen3"})


class Forward(Protocol):
    """How the engine runs the model."""

    def __call__(
        self, first_row: int, ids_BT: Tensor, positions_BT: Tensor, context: int, last_B: Tensor | None
    ) -> Tensor:
        """Logits [B, V] in float32 at token index last_B of each row (None: at the last)."""


def check_supported(config: Any, max_model_len: int) -> None:
    """Refuse, naming the reason, a model that no row of keys and values serves. Errors: ValueError."""
    text = config.get_text_config()
    # GPT-Neo has its own words for windows, which the probe would not see.
    kinds = getattr(text, "layer_types", None) or getattr(text, "attention_layers", None) or ()
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(
            f"layers of type {', '.join(unknown)} have no plain KV cache; use engine vllm for this model"
        )
    short = short_rope(text)
    if short is not None and max_model_len > short:
        raise ValueError(
            "rope_type 'longrope' turns all rows otherwise once one of them is longer than "
            f"{short}: set max_model_len to at most {short}, or use engine vllm"
        )


def short_rope(text: Any) -> int | None:
    """Tokens up to which rows do not change each other's rotation; None: any number of them."""
    given = getattr(text, "rope_parameters", None) or {}
    # One for all layers, or one for each kind of layer.
    ropes = [given, *(one for one in given.values() if isinstance(one, dict))]
    lengths = [
        int(one["original_max_position_embeddings"]) for one in ropes if one.get("rope_type") == "longrope"
    ]
    return min(lengths, default=None)


def choose(model: nn.Module, cache: KvCache, bank: Bank, packs: Packs | None = None) -> Forward:
    """The lean forward where it applies, else the model's own, whose modules compute by `products` then."""
    config: Any = model.config
    if config.model_type in LEAN_MODELS and config.hidden_act == "silu":
        products.use(model)  # scores go by the modules: of those no second copies beside the fused ones
        return LeanForward(model, cache, bank, packs)
    products.use(model, packs)
    return HubForward(model, cache, bank)


@dataclass(frozen=True)
class _Pass:
    """What all layers of a pass have in common."""

    shape: tuple[int, int]  # rows and tokens
    rows: slice  # of the cache
    context: int
    places: Tensor  # in the cache, of the keys and values that are computed
    cos: Tensor
    sin: Tensor
    mask: Tensor
    plan: Plan


class LeanForward:
    """Llama, Qwen2 and Qwen3 with few, large operations."""

    def __init__(self, model: nn.Module, cache: KvCache, bank: Bank, packs: Packs | None = None) -> None:
        base: Any = model.get_submodule("model")
        config: Any = model.config
        self._cache = cache
        self._bank, self._packs = bank, packs
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._head_dim = cache.shape.head_dim
        self._eps = config.rms_norm_eps
        self._embed: Tensor = base.embed_tokens.weight
        self._final_norm: Tensor = base.norm.weight
        self._head: Any = model.get_submodule("lm_head")
        self._layers = [
            _LeanLayer(f"model.layers.{number}", layer) for number, layer in enumerate(base.layers)
        ]
        self._device, self._dtype = cache.shape.device, cache.shape.dtype
        if attention.is_exact(self._device, self._dtype):
            cache.hold_wide()
        positions = torch.arange(cache.max_length, device=self._device)[None]
        cos, sin = base.rotary_emb(torch.zeros(1, device=self._device), positions)
        half = self._head_dim // 2
        self._cos = cos[0]
        self._sin = torch.cat(
            [-sin[0, :, :half], sin[0, :, half:]], -1
        )  # the sign of rotate_half lives in the table

    def __call__(
        self, first_row: int, ids_BT: Tensor, positions_BT: Tensor, context: int, last_B: Tensor | None
    ) -> Tensor:
        rows, tokens = ids_BT.shape
        # Those of prompts come from the CPU. Before the pass: a copy waits for all that the device was given.
        ids_BT, positions_BT = ids_BT.to(self._device), positions_BT.to(self._device)
        last_B = None if last_B is None else last_B.to(self._device)
        flat_positions = positions_BT.reshape(-1)
        x = F.embedding(ids_BT.reshape(-1), self._embed).float()
        cos, sin = self._cos[flat_positions][:, None], self._sin[flat_positions][:, None]
        mask = mask_of(causal_mask(positions_BT, context), self._dtype, self._heads // self._kv_heads)
        places = self._cache.places(first_row, positions_BT)
        plan = self._bank.plan(first_row, rows)
        held = slice(first_row, first_row + rows)
        common = _Pass((rows, tokens), held, context, places, cos, sin, mask, plan)
        for number, layer in enumerate(self._layers):
            x = self._layer(number, layer, x, common)
        if last_B is None:
            x = x.view(rows, tokens, -1)[:, -1]
        else:
            x = x[torch.arange(rows, device=self._device) * tokens + last_B]
        normed = self._normed(x, self._final_norm)
        logits = products.logits(self._head, normed, self._packs)
        plan.add(logits, normed, "lm_head")
        return logits

    def _layer(self, number: int, layer: _LeanLayer, x: Tensor, common: _Pass) -> Tensor:
        heads, kv_heads, dim = self._heads, self._kv_heads, self._head_dim
        plan, (rows, tokens) = common.plan, common.shape
        normed = self._normed(x, layer.norm_1)
        fused = layer.project("qkv", plan, normed, self._packs)
        qk = fused[:, : (heads + kv_heads) * dim].view(-1, heads + kv_heads, dim)
        turned = qk.float()
        if layer.qk_norms is not None:
            turned = F.rms_norm(turned, (dim,), None, self._eps)
            for part, weight in zip((turned[:, :heads], turned[:, heads:]), layer.qk_norms, strict=True):
                part.mul_(weight)
        # Two roundings as in transformers: a fused product would differ in bits.
        torch.add(turned * common.cos, turned.roll(dim // 2, -1).mul_(common.sin), out=qk)
        held = self._cache.write(number, common.places, fused[:, heads * dim :])
        q = qk[:, :heads].view(rows, tokens, kv_heads, heads // kv_heads, dim)
        out = attend(q, held[common.rows, ..., : common.context, :], common.mask)
        x = x + layer.project("out", plan, out, self._packs)
        normed = self._normed(x, layer.norm_2)
        gate, up = layer.project("gate_up", plan, normed, self._packs).chunk(2, -1)
        return x + layer.project("down", plan, F.silu(gate).mul_(up), self._packs)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """What products take, in the dtype of the model."""
        if weight.dtype == x.dtype:
            return F.rms_norm(x, x.shape[-1:], weight, self._eps)
        normed = F.rms_norm(x, x.shape[-1:], None, self._eps)
        return torch.mul(normed, weight, out=torch.empty_like(normed, dtype=weight.dtype))


class _LeanLayer:
    """One layer's weights, projections fused."""

    def __init__(self, path: str, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.norm_1: Tensor = layer.input_layernorm.weight
        self.norm_2: Tensor = layer.post_attention_layernorm.weight
        self._projections = {
            "qkv": _Projection(f"{path}.self_attn", attention, ("q_proj", "k_proj", "v_proj")),
            "out": _Projection(f"{path}.self_attn", attention, ("o_proj",)),
            "gate_up": _Projection(f"{path}.mlp", mlp, ("gate_proj", "up_proj")),
            "down": _Projection(f"{path}.mlp", mlp, ("down_proj",)),
        }
        names = dict(attention.named_children())
        self.qk_norms = (names["q_norm"].weight, names["k_norm"].weight) if "q_norm" in names else None

    def project(self, name: str, plan: Plan, x: Tensor, packs: Packs | None) -> Tensor:
        """The outputs of the fused modules side by side."""
        projection = self._projections[name]
        out = linear(x, projection.weight, projection.bias, packs)
        for module, start in projection.parts:
            plan.add(out, x, module, start)
        return out


class _Projection:
    """Linear modules with one input."""

    def __init__(self, path: str, parent: Any, names: tuple[str, ...]) -> None:
        modules = [parent.get_submodule(name) for name in names]
        self.weight, self.bias = _fuse(modules)
        starts = accumulate((module.out_features for module in modules[:-1]), initial=0)
        self.parts = [(f"{path}.{name}", start) for name, start in zip(names, starts, strict=True)]


def _fuse(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One matrix out of several; the modules' own parameters become views of its rows."""
    if len(linears) == 1:
        return linears[0].weight, linears[0].bias
    weight = torch.cat([module.weight.data for module in linears])
    bias = None if linears[0].bias is None else torch.cat([module.bias.data for module in linears])
    start = 0
    for module in linears:
        end = start + module.out_features
        module.weight.data = weight[start:end]
        if bias is not None:
            module.bias.data = bias[start:end]
        start = end
    return weight, bias
