"""In each worker: which experts take the tokens, kept as long as their keys are, and longer on request.

1. What the routers choose is kept beside the KV cache, for the same slots: whoever finds a token's keys, in
   the prefix cache too, finds its experts. No step waits for that, and none is run for it.
2. What the slots of a request that asks hold is set aside before they can be filled anew: when it leaves the
   batch, because it ended, was preempted or waits.
3. Positions that lose their keys and are computed anew keep what was set aside: the log-probabilities that
   were told came from it. Of the last token, and before anything is drawn of all, they are noted anew: what
   was drawn behind it may have been dropped.
4. What was set aside stays until `forget`, which comes for every request that asks.
5. vLLM's own capturer is bound to the routers, before CUDA graphs are recorded; its connector for what was
   captured is for the second model runner alone.

Shapes: T tokens, N routers of the model in its order, k experts that take a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    RoutedExpertsCaptureSource,
    bind_routed_experts_capturer,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, UniformTypeKVCacheSpecs
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from quartet_inference.vllm.asked import KEY, WANTED

#: Told at once, at most, unless one token has more: a fraction of the buffers between vLLM's processes, so
#: that neither these nor the steps wait for long.
PART_BYTES = 4 << 20


@dataclass(eq=False)
class _Noted:
    """What was set aside of one request."""

    request: str  # vLLM's name of it
    start: int
    rows_TNk: Tensor

    @property
    def end(self) -> int:
        return self.start + len(self.rows_TNk)

    def add(self, rows_TNk: Tensor) -> None:
        self.rows_TNk = torch.cat((self.rows_TNk, rows_TNk))

    def cut(self, end: int) -> None:
        self.rows_TNk = self.rows_TNk[: max(0, end - self.start)]


class Noting:
    """Of one worker's runner, whose cache is there."""

    def __init__(self, runner: Any) -> None:
        """Errors: ValueError, where the routers of the model do not tell what they choose."""
        model, config = runner.get_model(), runner.vllm_config
        self._runner = runner
        self._capturer = RoutedExpertsCapturer(config.scheduler_config.max_num_batched_tokens, config)
        bind_routed_experts_capturer(model, self._capturer)
        kinds = (MoERunner, RoutedExpertsCaptureSource)
        routed = sorted({module.layer_id for module in model.modules() if isinstance(module, kinds)})
        self._layers = torch.tensor(routed, device=runner.device)
        self._group, self._block_size, self._layer = _whole_group(runner.kv_cache_config)
        slots = runner.kv_cache_config.num_blocks * self._block_size
        byte = self._capturer.output_dtype == torch.uint8
        # Of two bytes torch indexes signed ones only. The last slot, index -1, is that of padding.
        self._slots_SNk = torch.zeros(
            (slots + 1, len(routed), self._capturer.shape_per_token[1]),
            dtype=torch.uint8 if byte else torch.int16,
            device=runner.device,
        )
        self._noted: dict[str, _Noted] = {}  # by the engine's names
        self._running: dict[str, _Noted] = {}  # by vLLM's: those that have not ended
        self._scheduled: dict[str, int] = {}  # tokens in the last step of what is in the batch
        self._aside = _Aside(runner.device)

    def after_forward(self) -> None:
        """Keep what the routers chose, for the slots that the step has filled."""
        slots_T = get_forward_context().slot_mapping[self._layer]
        chosen_TNk = self._capturer.device_buffer[: len(slots_T)].index_select(1, self._layers)
        self._slots_SNk[slots_T] = chosen_TNk.to(self._slots_SNk.dtype)

    def before_step(self, step: Any) -> None:
        """Follow the requests as they come, leave and come back. The runner's states are of the last step."""
        cached = step.scheduled_cached_reqs
        if self._running:
            staying = step.num_scheduled_tokens.keys() - cached.resumed_req_ids
            leaving = (self._running.keys() & self._scheduled.keys()) - staying
            for request in leaving:
                noted = self._running[request]
                noted.add(self._in_slots(request, noted.end))
            if leaving:
                self._aside.filled()
            for request in cached.resumed_req_ids & self._running.keys():
                known = cached.num_output_tokens[cached.req_ids.index(request)]
                prompt = self._runner.requests[request].num_prompt_tokens
                self._running[request].cut(prompt + known - 1 if known else 0)
            for request in step.finished_req_ids:
                self._running.pop(request, None)
        for new in step.scheduled_new_reqs:
            asked = (new.sampling_params.extra_args or {}).get(KEY)
            if asked is not None:
                name, start = asked
                self._running[new.req_id] = self._noted[name] = _Noted(new.req_id, start, self._slots_SNk[:0])
        self._scheduled = step.num_scheduled_tokens

    def after_step_began(self, step: Any) -> None:
        """Blocks that were copied have the experts of what they were copied from."""
        for one in step.kv_cache_block_copies or ():
            blocks = self._slots_SNk[:-1].view(-1, self._block_size, *self._slots_SNk.shape[1:])
            blocks[one.dst_block_id] = blocks[one.src_block_id]

    def _in_slots(self, request: str, start: int, end: int | None = None) -> Tensor:
        """Of a request in the batch, of what was computed."""
        state = self._runner.requests[request]
        computed = state.num_computed_tokens + self._scheduled[request]
        positions = np.arange(start, max(start, computed if end is None else min(end, computed)))
        blocks = np.asarray(state.block_ids[self._group], dtype=np.int64)[positions // self._block_size]
        slots = blocks * self._block_size + positions % self._block_size
        return self._slots_SNk[torch.from_numpy(slots).to(self._slots_SNk.device)]

    def told(self, name: str, start: int, end: int) -> dict[str, Any]:
        """A part, which begins there, of a request that asks; nothing where the request is not known."""
        noted = self._noted.get(name)
        if noted is None:
            return {}
        of_token = self._slots_SNk[0].numel() * self._slots_SNk.element_size()
        end = min(end, start + max(1, PART_BYTES // of_token))

        def pick() -> Tensor:
            aside = noted.rows_TNk[start - noted.start : end - noted.start]
            if noted.end >= end or noted.request not in self._running.keys() & self._scheduled.keys():
                return aside
            return torch.cat((aside, self._in_slots(noted.request, max(start, noted.end), end)))

        rows_TNk = self._aside.on_host(pick).numpy()
        return {
            "experts": rows_TNk.tobytes(),
            "shape": list(rows_TNk.shape),
            "dtype": "uint8" if rows_TNk.itemsize == 1 else "uint16",
        }

    def forget(self, names: list[str]) -> None:
        """Whoever asked has what it wanted, or has left."""
        for name in names:
            noted = self._noted.pop(name, None)
            if noted is not None:
                self._running.pop(noted.request, None)

    def count(self) -> int:
        """Requests of which something is kept."""
        return len(self._noted) + len(self._running)


class _Aside:
    """Brings to the host what was set aside, beside the step under way and not behind it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device) if device.type != "cpu" else None
        self._event = torch.Event(device) if device.type != "cpu" else None

    def filled(self) -> None:
        """Something more was set aside, by the stream of the steps."""
        if self._event is not None:
            self._event.record()

    def on_host(self, pick: Callable[[], Tensor]) -> Tensor:
        """What is picked was computed by steps whose tokens are told, or set aside."""
        if self._stream is None or self._event is None:
            return pick()
        self._stream.wait_event(self._event)
        with self._stream:
            return pick().cpu()


def _whole_group(cache: Any) -> tuple[int, int, str]:
    """Of the layers that keep the keys of all tokens: number of the group, tokens of a block, one of them."""
    for number, group in enumerate(cache.kv_cache_groups):
        if _keeps_all(group.kv_cache_spec):
            return number, group.kv_cache_spec.block_size, group.layer_names[0]
    raise ValueError("routed_experts = true: no layer of the model attends to all tokens")


def _keeps_all(spec: KVCacheSpec) -> bool:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return all(map(_keeps_all, spec.kv_cache_specs.values()))
    return isinstance(spec, FullAttentionSpec)


def install() -> None:
    """Once for a process: runners note where that is wanted, and are left as they are where not."""
    original = GPUModelRunner.initialize_kv_cache

    def and_note(self: Any, kv_cache_config: Any, is_profiling: bool = False, **options: Any) -> None:
        original(self, kv_cache_config, is_profiling, **options)
        if not is_profiling and self.vllm_config.additional_config.get(WANTED):
            _attach(self)

    GPUModelRunner.initialize_kv_cache = and_note


def _attach(runner: Any) -> None:
    # All of a tensor-parallel group capture, as some of their layouts are gathered; one keeps.
    noting = runner.quartet_noting = Noting(runner)
    if not get_tp_group().is_first_rank:
        return
    begin, forward = runner._update_states, runner._model_forward

    def update_states(step: Any) -> Any:
        noting.before_step(step)
        deferred = begin(step)
        noting.after_step_began(step)
        return deferred

    def model_forward(*inputs: Any, **named: Any) -> Any:
        output = forward(*inputs, **named)
        noting.after_forward()
        return output

    runner._update_states, runner._model_forward = update_states, model_forward
