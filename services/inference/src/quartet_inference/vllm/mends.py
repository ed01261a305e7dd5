"""What Quartet mends in vLLM 0.32: adapters beside rows that have none, prompts that are scored, experts.

1. On a CPU vLLM takes the last adapter's matrices for rows without an adapter, whose index is -1.
2. For the logits of a prompt it takes the head's adapters of the rows that are sampled, which are of other
   requests and of another number (vllm-project/vllm#16668, #51594): the log-probabilities are wrong, or the
   core ends.
3. It takes the logits of all of a prompt's tokens in a step at once: 8192 of them, with 152,000 tokens in the
   vocabulary, are 7.5 GB that it has not kept free. Here it gets them in pieces, which are to it what chunks
   of a prefill are.
4. On a CPU it packs the experts of a mixture at the start, and reads those of an update, which it does not
   pack, as if they were packed.
5. On a CPU the memory that several workers share keeps its name where they are killed, as vLLM itself does at
   the end: each engine would leave some MiB in /dev/shm.
"""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

SHARED_MEMORY = Path("/dev/shm")
#: Rows of logits at once, about as many as are sampled in a step: what vLLM has kept free.
SCORED_ROWS = 256


def mend() -> None:
    """Once for a process."""
    if getattr(GPUModelRunner, "quartet_mended", False):
        return
    GPUModelRunner.quartet_mended = True
    _mend_prompts_that_are_scored()
    if current_platform.is_cpu():
        _mend_rows_without_adapter()
        _mend_experts_of_an_update()
        _mend_names_of_shared_memory()


def _mend_rows_without_adapter() -> None:
    original = lora_ops.bgmv_shrink

    def bgmv_shrink(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        rows: torch.Tensor,
        scaling: float = 1.0,
    ) -> None:
        original(inputs, weights, out, rows, scaling)
        out[: len(rows)].masked_fill_((rows < 0)[:, None], 0)

    # Resolved as a global of both modules.
    lora_ops.bgmv_shrink = bgmv_shrink
    punica_cpu.bgmv_shrink = bgmv_shrink


def _mend_experts_of_an_update() -> None:
    original = UnquantizedFusedMoEMethod._setup_kernel

    def and_pack(self: Any, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        update = self.moe_kernel is not None
        original(self, layer, w13, w2)
        if update:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = and_pack


def _mend_names_of_shared_memory() -> None:
    original = _CPUSHMDistributed._init_cpu_shm

    def without_names(self: Any) -> int:
        handle: int = original(self)  # behind a barrier: all have opened it
        for path in SHARED_MEMORY.glob(f"{glob.escape(self.group_name)}_*"):
            path.unlink(missing_ok=True)
        return handle

    _CPUSHMDistributed._init_cpu_shm = without_names


def _mend_prompts_that_are_scored() -> None:
    original = GPUModelRunner._get_prompt_logprobs_dict

    def in_pieces(self: Any, hidden: torch.Tensor, scheduled: dict[str, int]) -> dict[str, Any]:
        asked = self.num_prompt_logprobs
        known: dict[str, Any] = {}
        for request, count in list(asked.items()):
            if request not in scheduled:
                continue
            self.num_prompt_logprobs = {request: count}
            state = self.requests[request]
            start = state.num_computed_tokens
            try:
                for at in range(0, scheduled[request], SCORED_ROWS):
                    state.num_computed_tokens = start + at
                    tokens = min(SCORED_ROWS, scheduled[request] - at)
                    if self.lora_config is not None:
                        _use_adapter(self, request, tokens, scheduled)
                    known |= original(self, hidden[at:], {request: tokens})
                    if not self.num_prompt_logprobs:
                        del asked[request]
                        break
            finally:
                state.num_computed_tokens = start
                self.num_prompt_logprobs = asked
        return known

    GPUModelRunner._get_prompt_logprobs_dict = in_pieces


def _use_adapter(runner: Any, request: str, tokens: int, scheduled: dict[str, int]) -> None:
    """Let the head take the adapter of the one request whose logits come next."""
    batch, state = runner.input_batch, runner.requests[request]
    of_step = np.array([scheduled[one] for one in batch.req_ids], dtype=np.int32)
    rows = np.zeros_like(of_step)
    after = len(state.prompt_token_ids) - state.num_computed_tokens - 1
    rows[batch.req_id_to_index[request]] = max(min(tokens, after), 0)
    runner.set_active_loras(batch, of_step, rows)  # the step's own rows have been sampled
