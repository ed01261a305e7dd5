"""What Quartet mends in vLLM 0.32: adapters beside rows that have none, and beside prompts that are scored.

1. On a CPU vLLM takes the last adapter's matrices for rows without an adapter, whose index is -1.
2. For the logits of a prompt it takes the head's adapters of the rows that are sampled, which are of other
   requests and of another number (vllm-project/vllm#16668, #51594): the log-probabilities are wrong, or the
   core ends.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def mend() -> None:
    """Once for a process."""
    if getattr(GPUModelRunner, "quartet_mended", False):
        return
    GPUModelRunner.quartet_mended = True
    _mend_prompts_that_are_scored()
    if current_platform.is_cpu():
        _mend_rows_without_adapter()


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


def _mend_prompts_that_are_scored() -> None:
    original = GPUModelRunner._get_prompt_logprobs_dict

    def one_by_one(self: Any, hidden: torch.Tensor, scheduled: dict[str, int]) -> dict[str, Any]:
        asked = self.num_prompt_logprobs
        if self.lora_config is None or not asked:
            return dict(original(self, hidden, scheduled))
        batch = self.input_batch
        tokens = np.array([scheduled[request] for request in batch.req_ids], dtype=np.int32)
        known: dict[str, Any] = {}
        for request, count in list(asked.items()):
            if request not in scheduled:
                continue
            state = self.requests[request]
            rows = np.zeros_like(tokens)
            after = len(state.prompt_token_ids) - state.num_computed_tokens - 1
            rows[batch.req_id_to_index[request]] = max(min(scheduled[request], after), 0)
            self.set_active_loras(batch, tokens, rows)  # the step's own rows have been sampled
            self.num_prompt_logprobs = {request: count}
            known |= original(self, hidden, scheduled)
            if not self.num_prompt_logprobs:
                del asked[request]
        self.num_prompt_logprobs = asked
        return known

    GPUModelRunner._get_prompt_logprobs_dict = one_by_one
