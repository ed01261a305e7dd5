"""Full fine-tuning of a Qwen3-0.6B-shaped model on one GPU: tokens per second and peak memory of a step.

The trainer's own `Run`, without the service around it: bfloat16 with float32 masters, AdamW, the clipped
policy-gradient loss, layers recomputed in the backward pass, Liger's kernels where they are installed. A step
is forward, backward and optimizer step on one batch:

1. One sequence of 16,384 tokens, nearly all of them covered; and one of 65,536.
2. Groups of 8: ragged samples behind prompts that they share, about 16,384 tokens; a shared prompt counts
   once, however often it is computed (`--row-tokens`).

Each with deterministic kernels, as the service has them unless it is told otherwise, and with others; one
sequence of 16,384 tokens with the optimizer's moments in the host's memory, too.

prime-rl states 11,900 tokens per second and 12.5 GiB for 16,384 tokens on one H100, 10,150 and 19.6 for
65,536 (Qwen3-0.6B, RL, full; its kernels are not deterministic, its moments are in the host's memory).

    python benchmarks/gpu_train.py [--steps 8] [--row-tokens N] [--keep-attention] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import gpu_shape
import numpy as np
from figures import Figure, arguments, report
from peak_memory import GIB, Watch
from quartet_trainer import libraries
from quartet_trainer.sample import Sample, make_sample

if TYPE_CHECKING:
    from quartet_trainer.machine import Machine

#: Kernels are chosen, and memory of the sizes is taken, in these.
WARM_UP = 2
GROUPS, MEMBERS, PROMPT_TOKENS = 4, 8, 256
LEARNING_RATE, CLIP = 1e-6, 0.2
TOKENS, LONG_TOKENS = 16_384, 65_536
#: Of a trial.
SHORTER = 32
#: What prime-rl states: tokens per second, GiB.
PRIME_RL = {TOKENS: (11_900, 12.5), LONG_TOKENS: (10_150, 19.6)}


@dataclass(frozen=True)
class Case:
    """What is measured."""

    make: Callable[[int, int, int], list[Sample]]
    tokens: int = TOKENS
    deterministic: bool = True
    optimizer_offload: bool = False

    @property
    def name(self) -> str:
        what = "groups of 8" if self.make is in_groups else f"a sequence of {self.tokens}"
        kernels = "" if self.deterministic else ", other kernels"
        return f"{what}{kernels}{', moments in host memory' if self.optimizer_offload else ''}"

    @property
    def bars(self) -> tuple[str, str]:
        """Of the rate and of the memory."""
        if self.make is in_groups:
            return "", ""
        rate, memory = PRIME_RL[self.tokens]
        return f">= {rate}", f"<= {memory}"


def main() -> None:
    parser = arguments(__doc__ or "")
    gpu_shape.add_arguments(parser)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--row-tokens", type=int, help="as the trainer's row_tokens")
    parser.add_argument("--keep-attention", action="store_true", help="as the trainer's keep_attention")
    options = parser.parse_args()
    libraries.configure(threads=1)
    gpu_shape.require(options.device)
    from quartet_trainer.worker import prepare

    prepare(threads=1, deterministic=True)
    figures = []
    with tempfile.TemporaryDirectory(prefix="quartet-gpu-") as folder:
        model = gpu_shape.model(0, trial=options.trial, device=options.device)
        vocabulary = model.config.vocab_size
        model.save_pretrained(folder)
        del model
        for case in cases():
            tokens = case.tokens // (SHORTER if options.trial else 1)
            batches = [case.make(tokens, vocabulary, seed) for seed in range(WARM_UP + options.steps)]
            figures += measure(case, batches, Path(folder), machine_of(case, tokens, options))
    asked = {name: getattr(options, name) for name in ("steps", "row_tokens", "keep_attention")}
    report(figures, options.json, device=gpu_shape.named(options.device), **asked)


def cases() -> list[Case]:
    return [
        Case(one_sequence),
        Case(one_sequence, optimizer_offload=True),
        Case(one_sequence, deterministic=False),
        Case(in_groups),
        Case(in_groups, deterministic=False),
        Case(one_sequence, LONG_TOKENS),
        Case(one_sequence, LONG_TOKENS, deterministic=False),
    ]


def one_sequence(tokens: int, vocabulary: int, seed: int) -> list[Sample]:
    """One sample."""
    return [sample(0, 64, tokens - 64, np.random.default_rng(seed), vocabulary)]


def in_groups(tokens: int, vocabulary: int, seed: int) -> list[Sample]:
    """Ragged completions behind prompts that are shared."""
    chance = np.random.default_rng(seed)
    prompt = min(PROMPT_TOKENS, tokens // (4 * GROUPS))
    mean = (tokens - GROUPS * prompt) / (GROUPS * MEMBERS)
    made: list[Sample] = []
    for _ in range(GROUPS):
        begin = chance.integers(0, vocabulary, prompt).tolist()
        for _ in range(MEMBERS):
            length = int(chance.uniform(0.5, 1.5) * mean)
            made.append(sample(len(made), prompt, length, chance, vocabulary, begin))
    return made


def sample(
    index: int,
    prompt: int,
    tail: int,
    chance: np.random.Generator,
    vocabulary: int,
    begin: list[int] | None = None,
) -> Sample:
    """Random tokens, the tail covered."""
    head = chance.integers(0, vocabulary, prompt).tolist() if begin is None else begin
    return make_sample(
        index,
        head + chance.integers(0, vocabulary, tail).tolist(),
        [(prompt, tail, 0)],
        chance.uniform(-13, -11, tail).tolist(),
        [float(chance.normal())],
    )


def computed(batch: list[Sample]) -> int:
    """Tokens of a batch, those of each prompt once."""
    prompts = {tuple(one.tokens_T[: one.prompt_length].tolist()) for one in batch}
    return sum(map(len, prompts)) + sum(len(one.covered_K) for one in batch)


def machine_of(case: Case, tokens: int, options: argparse.Namespace) -> Machine:
    """A micro-batch has all tokens of a batch."""
    import torch
    from quartet_trainer import kernels
    from quartet_trainer.machine import Machine

    return Machine(
        torch.device(options.device),
        tokens,
        options.row_tokens,
        False,
        gradient_checkpointing=True,
        liger=kernels.chosen("auto", options.device),
        optimizer_offload=case.optimizer_offload,
        keep_attention=options.keep_attention,
    )


def measure(case: Case, batches: list[list[Sample]], folder: Path, machine: Machine) -> list[Figure]:
    """Steps of a run on these batches."""
    import torch
    from quartet.weights.store import WeightStore
    from quartet_trainer.bases import Bases
    from quartet_trainer.run import Run
    from quartet_trainer.spec import LossKind, LossSpec, OptimizerSpec, Ratio, RunSpec
    from quartet_trainer.worker import release_memory

    torch.use_deterministic_algorithms(case.deterministic)
    # A model refers to itself: that of the case before would be given back while this one is measured.
    release_memory()
    watch = Watch(machine.device)
    spec = RunSpec(base_model=str(folder), optimizer=OptimizerSpec(learning_rate=LEARNING_RATE))
    loss = LossSpec(kind=LossKind.POLICY_GRADIENT, ratio=Ratio.PPO, clip_low=CLIP, clip_high=CLIP)
    run = Run("r", spec, machine, WeightStore(1), lambda: None, Bases())
    rates = []
    for batch in batches:
        began = time.perf_counter()
        run.forward_backward(batch, loss, 1000.0, False)
        done = run.optim_step(None)
        if machine.device.type == "cuda":
            torch.cuda.synchronize()
        rates.append(computed(batch) / (time.perf_counter() - began))
        assert np.isfinite(done.grad_norm) and not done.skipped_nonfinite
    peak = watch.stop()
    rate_bar, memory_bar = case.bars if machine.device.type == "cuda" else ("", "")
    return [
        Figure(f"{case.name}: a step", statistics.median(rates[WARM_UP:]), "tokens/s", rate_bar),
        Figure(f"{case.name}: peak memory", peak / GIB, "GiB", memory_bar),
    ]


if __name__ == "__main__":
    main()
