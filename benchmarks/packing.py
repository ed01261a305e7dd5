"""The training part alone, against a plain transformers loop with the same loss: tokens per CPU second.

Both train the same random Qwen3 by PPO's clipped loss with AdamW on the same ragged batches, one thread each,
in turns, in one process. The plain loop is what one writes first: rows padded to the longest of their
micro-batch (as many tokens as the trainer's budget), logits of the completions only, log_softmax, gather,
loss, backward, step. The trainer is its `Run`, without the service around it.

Two kinds of batch: groups of completions that share a prompt, and samples that share nothing. Tokens are
those of the samples, padding not counted. Loss and gradient norm of the first batch must agree.

    python benchmarks/packing.py [--rounds 4] [--json FILE]
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import transformers
from figures import Figure, arguments, report
from quartet.weights.store import WeightStore
from quartet_trainer.bases import Bases
from quartet_trainer.machine import Machine
from quartet_trainer.run import Run
from quartet_trainer.sample import Sample, make_sample
from quartet_trainer.spec import LossKind, LossSpec, OptimizerSpec, Ratio, RunSpec

VOCABULARY, BUDGET_TOKENS, ROW_TOKENS = 4096, 8192, 256
LEARNING_RATE, CLIP, MAX_GRAD_NORM = 1e-4, 0.2, 1.0
#: Groups and members of the two kinds of batch.
KINDS = {"groups of 8": (8, 8), "single samples": (48, 1)}
LOSS = LossSpec(kind=LossKind.POLICY_GRADIENT, ratio=Ratio.PPO, clip_low=CLIP, clip_high=CLIP)


def ragged(groups: int, members: int, seed: int) -> list[Sample]:
    """Prompts of 20 to 200 tokens; completions of 4 to 256, most of them short."""
    chance = np.random.default_rng(seed)
    made: list[Sample] = []
    for _ in range(groups):
        prompt = chance.integers(0, VOCABULARY, chance.integers(20, 200)).tolist()
        for _ in range(members):
            length = int(np.clip(chance.lognormal(3.7, 0.9), 4, 256))
            tail = chance.integers(0, VOCABULARY, length).tolist()
            logprobs = chance.uniform(-9.0, -8.0, length).tolist()
            spans = [(len(prompt), length, 0)]
            made.append(make_sample(len(made), prompt + tail, spans, logprobs, [float(chance.normal())]))
    return made


class Trainer:
    """The trainer's own way."""

    def __init__(self, folder: Path) -> None:
        machine = Machine(torch.device("cpu"), BUDGET_TOKENS, ROW_TOKENS, False)
        optimizer = OptimizerSpec(learning_rate=LEARNING_RATE, max_grad_norm=MAX_GRAD_NORM)
        spec = RunSpec(base_model=str(folder), optimizer=optimizer)
        self._run = Run("r", spec, machine, WeightStore(1), lambda: None, Bases())

    def step(self, samples: Sequence[Sample]) -> tuple[float, float]:
        """(loss, gradient norm) of a batch."""
        count = sum(len(sample.covered_K) for sample in samples)
        done = self._run.forward_backward(samples, LOSS, float(count), False)
        return done.loss, self._run.optim_step(None).grad_norm


class Plain:
    """A loop around a transformers model."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.999), weight_decay=0.0, fused=True
        )

    def step(self, samples: Sequence[Sample]) -> tuple[float, float]:
        """(loss, gradient norm) of a batch."""
        count = sum(len(sample.covered_K) for sample in samples)
        total = 0.0
        for part in self._micro_batches(samples):
            loss = self._loss(part) / count
            torch.autograd.backward(loss)
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total, float(norm)

    def _micro_batches(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        parts: list[list[Sample]] = [[]]
        for sample in samples:
            width = max(len(one.tokens_T) for one in [*parts[-1], sample])
            if parts[-1] and width * (len(parts[-1]) + 1) > BUDGET_TOKENS:
                parts.append([])
            parts[-1].append(sample)
        return parts

    def _loss(self, samples: Sequence[Sample]) -> torch.Tensor:
        prompt = max(sample.prompt_length for sample in samples)
        tail = max(len(sample.covered_K) for sample in samples)
        tokens = torch.zeros(len(samples), prompt + tail, dtype=torch.long)
        present = torch.zeros_like(tokens)
        sampled, advantages = torch.zeros(len(samples), tail), torch.zeros(len(samples), tail)
        # As everywhere: prompts padded on the left, completions on the right.
        for row, one in enumerate(samples):
            where = slice(prompt - one.prompt_length, prompt + len(one.covered_K))
            tokens[row, where] = torch.from_numpy(one.tokens_T)
            present[row, where] = 1
            assert one.logprobs_K is not None and one.advantages_K is not None
            sampled[row, : len(one.covered_K)] = torch.from_numpy(one.logprobs_K)
            advantages[row, : len(one.covered_K)] = torch.from_numpy(one.advantages_K)
        positions = (present.cumsum(1) - 1).clamp(min=0)
        logits = self._model(
            input_ids=tokens, attention_mask=present, position_ids=positions, logits_to_keep=tail + 1
        ).logits[:, :-1]
        logp = torch.log_softmax(logits, -1).gather(2, tokens[:, prompt:, None])[..., 0]
        ratio = (logp - sampled).exp()
        losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        return (losses * present[:, prompt:]).sum()


def compare(kind: str, rounds: int, folder: Path) -> list[Figure]:
    """Both ways in turns."""
    groups, members = KINDS[kind]
    ways: dict[str, Any] = {"trainer": Trainer(folder), "plain loop": Plain(folder)}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    first: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        samples = ragged(groups, members, seed=number)
        tokens = sum(len(sample.tokens_T) for sample in samples)
        for name, way in ways.items():
            began = time.process_time()
            found = way.step(samples)
            rates[name].append(tokens / (time.process_time() - began))
            if number == 0:
                first.append(found)
    # The first round warms up.
    ours, theirs = (statistics.median(found[1:]) for found in rates.values())
    ratios = [one / other for one, other in zip(*rates.values(), strict=True)][1:]
    (loss, norm), (their_loss, their_norm) = first
    return [
        Figure(f"{kind}: trainer", ours, "tokens/CPU s"),
        Figure(f"{kind}: plain loop", theirs, "tokens/CPU s"),
        Figure(f"{kind}: trainer over plain loop", statistics.median(ratios), "ratio", ">= 1.3"),
        Figure(f"{kind}: difference of losses", abs(loss - their_loss), "", "<= 1e-5"),
        Figure(f"{kind}: difference of gradient norms", abs(norm / their_norm - 1), "ratio", "<= 1e-4"),
    ]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, intermediate_size=384, tie_word_embeddings=True,
    )  # fmt: skip
    figures = []
    with tempfile.TemporaryDirectory(prefix="quartet-packing-") as folder:
        transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
        for kind in KINDS:
            figures += compare(kind, options.rounds, Path(folder))
    report(figures, options.json)


if __name__ == "__main__":
    main()
