"""A version into the model of a worker: by vLLM's layerwise reload, and after that by copies alone.

1. The reload fuses (qkv, gate and up), shards and re-packs as at the start. After it no layer keeps old or
   half-loaded weights, or it has failed.
2. What the first reload did is traced. Where copies alone do the same (`copy_plan`), every later version of
   the same layout is loaded by them; where not, every version is reloaded.
3. Nothing is touched before the load that `prepared` returns is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

from quartet_inference.vllm.asked import COPY_PLAN
from quartet_inference.vllm.copy_plan import CopyPlan, Layout, NoPlan, check_kinds, layout_of
from quartet_inference.vllm.tracing import Trace, slots_of


class Loading:
    """Of one model, which nobody else changes."""

    def __init__(self, model: Any, config: Any) -> None:
        """A loaded model and vLLM's configuration."""
        self._model = model
        self._config = config
        self._plan: CopyPlan | None = None
        self._reloaded: Layout | None = None  # the layout that no plan was found for
        self.why = ""  # versions are reloaded
        if not config.additional_config.get(COPY_PLAN, True):
            self.why = f"{COPY_PLAN} = false"

    def prepared(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """What loads a version, tensors of a checkpoint."""
        if self._plan is not None:
            try:
                return self._plan.bind(tensors).copy
            except NoPlan:
                self._plan = None  # and perhaps another one
        if self.why and self._reloaded in (None, layout_of(tensors)):
            return lambda: self._reload(tensors)
        return lambda: self._traced(tensors)

    def _traced(self, tensors: Mapping[str, Tensor]) -> None:
        """Reload, and see whether copies would have done."""
        self.why = ""
        try:
            check_kinds(self._model, self._config)
        except NoPlan as error:
            self._reload(tensors)
            self.why = str(error)
            return
        slots = slots_of(self._model)
        trace = Trace(tensors, slots)
        with trace:
            self._reload(tensors)
        try:
            self._plan = CopyPlan(trace, tensors, slots)
        except NoPlan as error:
            self.why, self._reloaded = str(error), layout_of(tensors)

    def _reload(self, tensors: Mapping[str, Tensor]) -> None:
        with set_current_vllm_config(self._config):
            initialize_layerwise_reload(self._model)
            self._model.load_weights(iter(tensors.items()))
            _check_complete(self._model)
            finalize_layerwise_reload(self._model, self._config.model_config)
            _repack_tied_heads(self._model)


def _check_complete(model: nn.Module) -> None:
    """ValueError where a layer got none of its weights, or a fused one some of its parts only."""
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if isinstance(layer, VocabParallelEmbedding) or not info.can_load():
            continue  # embeddings are padded; the others are done
        if not info.load_numel and not _has_weights(layer):
            continue
        if info.load_numel < (info.load_numel_total or 0):
            raise ValueError(f"{name} got {info.load_numel} of {info.load_numel_total} values")


def _has_weights(layer: nn.Module) -> bool:
    """Whether a checkpoint has something of this layer itself: buffers and the scales of keys are vLLM's."""
    if isinstance(layer, AttentionLayerBase):
        return False
    own = layer.named_parameters(recurse=False)
    return any(one.numel() and name not in SKIP_LOAD_TENSORS for name, one in own)


def _repack_tied_heads(model: nn.Module) -> None:
    """On a CPU a head packs its weights at the start, and a tied one is not packed again by the reload."""
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding) and hasattr(layer, "cpu_linear"):
            layer.quant_method.process_weights_after_loading(layer)
