"""Prompts that are scored in pieces: what vLLM computes of them at once, to the bit, in less memory.

Of an engine, with an adapter or without: test_conformance_adapters.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed in this interpreter (make install-vllm)")

VOCABULARY, WIDTH = 50, 8


class Runner:
    """Of vLLM's runner what its own function looks at; the numbers are small, so that sums are exact."""

    lora_config = None

    def __init__(self, prompts: dict[str, int], computed: dict[str, int], scheduled: dict[str, int]) -> None:
        from vllm.v1.sample.sampler import Sampler

        generator = torch.Generator().manual_seed(0)
        head = torch.randint(-4, 5, (WIDTH, VOCABULARY), generator=generator).float()
        self.most_rows = 0
        self.device = torch.device("cpu")
        self.model = SimpleNamespace(compute_logits=lambda hidden: self._logits(hidden, head))
        self.model_config = SimpleNamespace(logprobs_mode="processed_logprobs")
        self.sampler = Sampler()
        self.num_prompt_logprobs = dict.fromkeys(prompts, 0)
        self.requests = {
            name: SimpleNamespace(
                prompt_token_ids=torch.randint(VOCABULARY, (length,), generator=generator).tolist(),
                num_computed_tokens=computed[name],
                in_progress_prompt_logprobs_cpu=None,
            )
            for name, length in prompts.items()
        }
        self.input_batch = SimpleNamespace(req_id_to_index={name: at for at, name in enumerate(scheduled)})
        starts = np.cumsum([0, *scheduled.values()])
        self.query_start_loc = SimpleNamespace(np=starts)
        self.hidden = torch.randint(-4, 5, (int(starts[-1]), WIDTH), generator=generator).float()

    def _logits(self, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        self.most_rows = max(self.most_rows, len(hidden))
        return hidden @ head

    def _sync_device(self) -> None: ...


@pytest.mark.parametrize("prompt", [2, 255, 256, 257, 513, 1000])
@pytest.mark.parametrize("computed", [0, 100, 700])
@pytest.mark.parametrize("step", [1, 256, 300, 2000])
def test_in_pieces_vllm_computes_what_it_computes_at_once(prompt: int, computed: int, step: int) -> None:
    from quartet_inference.vllm import mends
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    mends.mend()
    mended = GPUModelRunner._get_prompt_logprobs_dict
    original = next(
        cell.cell_contents for cell in mended.__closure__ if callable(cell.cell_contents)
    )  # what the mend calls
    computed = min(computed, prompt - 1)
    scheduled = {"other": 7, "r": min(step, prompt - computed), "s": 3, "decodes": 1}
    prompts, before = {"r": prompt, "s": 40, "away": 5}, {"r": computed, "s": 10, "away": 0}
    told = []
    for function in (original, mended):
        runner = Runner(prompts, before, scheduled)
        partial = {
            name: one for name in ("r", "s") for one in [runner.requests[name]]
        }  # kept: a finished one is taken out
        known = function(runner, runner.hidden, scheduled)
        under_way = {name: one.in_progress_prompt_logprobs_cpu for name, one in partial.items()}
        told.append((known, under_way, runner.num_prompt_logprobs, runner.most_rows))
        assert [one.num_computed_tokens for one in partial.values()] == [computed, 10]
    (plain, plain_way, plain_asked, _), (pieces, pieces_way, pieces_asked, rows) = told
    assert rows <= mends.SCORED_ROWS and list(plain) == list(pieces) and plain_asked == pieces_asked
    for name, one in plain.items():
        done = slice(before[name], None)
        for here, there in zip(one[:3], pieces[name][:3], strict=True):
            assert torch.equal(here[done], there[done])
    for name, one in plain_way.items():
        assert (one is None) == (pieces_way[name] is None)
        if one is not None:
            done = slice(before[name], before[name] + scheduled[name])
            assert all(
                torch.equal(a[done], b[done]) for a, b in zip(one[:3], pieces_way[name][:3], strict=True)
            )
