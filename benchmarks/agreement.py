"""How far apart trainer and engine are on sampled tokens, and what the agreement costs.

For each model the engine samples BATCHES batches of the main job (16 prompts x 8), the trainer computes the
same tokens packed as for a step, and both are compared token by token; the trainer is also compared with a
forward pass in float64. Each time:

- as shipped;
- with float32 attention on both sides, which is what float64 attention replaces;
- as shipped, but with the engine's matrix products summed in another order (float64, rounded), as a matrix
  library might do that is not deterministic in the number of rows.

The costs are ratios of CPU time, float64 attention over float32 attention, best of ROUNDS, taken by turns.

    python benchmarks/agreement.py [--models DIR,DIR] [--batches 50] [--json FILE]

Without --models, `quartet model tiny` makes one.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from figures import Figure, arguments, report
from quartet.cli.tiny.demos import MAX_TOKENS, Reversals
from quartet.kit.memory import tune_allocator
from quartet.seeds import completion_seeds
from quartet_inference.embedded import forward
from quartet_inference.embedded.engine import EmbeddedEngine
from quartet_inference.embedded.limits import Limits
from quartet_inference.embedded.model import load
from quartet_inference.engine import Delta, Request, Sampling, ServedWeights
from quartet_trainer.logprobs import PolicyForward
from quartet_trainer.model import load_model
from quartet_trainer.packing import MicroBatch, pack
from quartet_trainer.sample import Sample, make_sample
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

PROMPTS, GROUP, ROUNDS = 16, 8, 5
BUDGET_TOKENS = 8192
GATE, CPU = "<= 2e-05", torch.device("cpu")


def float32_attention(q_BTKGD: torch.Tensor, kv_B2KCD: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The engine's attention without its float64."""
    rows, tokens, kv_heads, group, dim = q_BTKGD.shape
    q = q_BTKGD.permute(0, 2, 3, 1, 4).reshape(rows, kv_heads * group, tokens, dim)
    keys, values = kv_B2KCD.to(q.dtype).unbind(1)  # which may be kept as float64
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask.float(), enable_gqa=group > 1)
    return out.transpose(1, 2).reshape(rows * tokens, kv_heads * group * dim)


def other_order(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A product whose sums are taken in another order than float32 products take them."""
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double()).float()


@contextmanager
def engine_with(**replaced: Any) -> Iterator[None]:
    """The engine's forward pass with some of its functions replaced."""
    held = {name: getattr(forward, name) for name in replaced}
    for name, function in replaced.items():
        setattr(forward, name, function)
    try:
        yield
    finally:
        for name, function in held.items():
            setattr(forward, name, function)


async def sampled(folder: Path, batches: int, seed: int) -> list[list[Sample]]:
    """What the engine samples, batch by batch."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    texts = Reversals(seed)
    model: Any = load(folder, "float32", weights_follow=False)
    limits = Limits(max_model_len=256, max_num_seqs=PROMPTS * GROUP)
    served = ServedWeights("", 0, b"")
    engine = EmbeddedEngine(model, limits, frozenset({model.config.eos_token_id}), lambda ids: "", served)

    async def ask(prompt: list[int], number: int) -> list[Sample]:
        tokens: list[list[int]] = [[] for _ in range(GROUP)]
        logprobs: list[list[float]] = [[] for _ in range(GROUP)]
        seeds = tuple(completion_seeds(number + 1, GROUP))
        async for event in engine.generate(Request(tuple(prompt), Sampling(MAX_TOKENS), GROUP, seeds)):
            if isinstance(event, Delta):
                tokens[event.index] += event.token_ids
                logprobs[event.index] += event.logprobs
        return [
            make_sample(number, [*prompt, *ids], [(len(prompt), len(ids), 0)], logps, [])
            for ids, logps in zip(tokens, logprobs, strict=True)
        ]

    found = []
    try:
        for batch in range(batches):
            asked = [
                tokenizer.apply_chat_template(texts.example().messages, add_generation_prompt=True)[
                    "input_ids"
                ]
                for _ in range(PROMPTS)
            ]
            groups = await asyncio.gather(
                *[ask(prompt, PROMPTS * batch + place) for place, prompt in enumerate(asked)]
            )
            found.append([sample for group in groups for sample in group])
    finally:
        await engine.close()
    return found


def packed(policy: PolicyForward, samples: Sequence[Sample]) -> list[MicroBatch]:
    """As the trainer packs a step for a model with this attention."""
    return pack(samples, range(len(samples)), BUDGET_TOKENS, policy.shared_tokens(None))


def trainer_of(folder: Path, attention: str | None = None) -> PolicyForward:
    model = load_model(folder, str(folder), device=CPU)
    if attention:
        model.set_attn_implementation(attention)
    return PolicyForward(model, CPU, None)


def differences(policy: PolicyForward, batches: list[list[Sample]]) -> np.ndarray[Any, Any]:
    """|log-probability by trainer - by engine| of every sampled token."""
    found = []
    with torch.no_grad():
        for samples in batches:
            for batch in packed(policy, samples):
                ours = policy(batch, 1.0, full_precision=True)[0].numpy()
                theirs = np.concatenate([samples[member].logprobs_K for member in batch.members])
                found.append(np.abs(ours - theirs))
    return np.concatenate(found)


def to_float64(folder: Path, policy: PolicyForward, batches: list[list[Sample]]) -> float:
    """The trainer's largest distance from a forward pass in float64."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):  # transformers' own computes in float32
            module.forward = lambda x, norm=module: F.rms_norm(
                x, norm.weight.shape, norm.weight, norm.variance_epsilon
            )
    exact = PolicyForward(model.eval(), CPU, None)
    largest = 0.0
    with torch.no_grad():
        for samples in batches:
            for batch in packed(exact, samples):
                here, there = (which(batch, 1.0, full_precision=True)[0] for which in (policy, exact))
                largest = max(largest, float((here - there).abs().max()))
    return largest


def agreement_of(name: str, folder: Path, batches: int, seed: int) -> list[Figure]:
    def figures(what: str, policy: PolicyForward, bar: str = "") -> list[Figure]:
        samples = asyncio.run(sampled(folder, batches, seed))
        apart = differences(policy, samples)
        head = f"{name}: {what}, "
        found = [
            Figure(head + "max |dlogp|", float(apart.max()), "nats", bar),
            Figure(head + "mean |dlogp|", float(apart.mean()), "nats"),
            Figure(head + "tokens above 2e-5", int((apart > 2e-5).sum()), f"of {len(apart)}"),
            Figure(head + "trainer to float64", to_float64(folder, policy, samples), "nats"),
        ]
        return found

    shipped = trainer_of(folder)
    found = figures("as shipped", shipped, GATE)
    with engine_with(attend=float32_attention):
        found += figures("float32 attention", trainer_of(folder, "sdpa"))
    with engine_with(linear=other_order):
        return found + figures("other sums in the engine", shipped)


def best_ratio(costly: Callable[[], None], plain: Callable[[], None]) -> float:
    best = {costly: float("inf"), plain: float("inf")}
    for _ in range(ROUNDS):
        for work in best:
            started = time.process_time()
            work()
            best[work] = min(best[work], time.process_time() - started)
    return best[costly] / best[plain]


def costs_of(folder: Path) -> list[Figure]:
    """CPU time with float64 attention over that with float32 attention."""
    found = asyncio.run(sampled(folder, 4, 0))

    def training(policy: PolicyForward) -> Callable[[], None]:
        work = [batch for samples in found for batch in packed(policy, samples)]

        def once() -> None:
            policy.zero_grad()
            for batch in work:
                torch.autograd.backward(policy(batch, 1.0)[0].sum())

        return once

    def sampling() -> None:
        asyncio.run(sampled(folder, 4, 0))

    def sampling_in_float32() -> None:
        with engine_with(attend=float32_attention):
            sampling()

    trained = best_ratio(training(trainer_of(folder)), training(trainer_of(folder, "sdpa")))
    return [
        Figure("trainer, forward and backward: float64 / float32 attention", trained, ""),
        Figure(
            "engine, sampling: float64 / float32 attention", best_ratio(sampling, sampling_in_float32), ""
        ),
    ]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--models", default="")
    parser.add_argument("--batches", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tune_allocator()
    disable_progress_bar()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory(prefix="quartet-agreement-") as made:
        folders = [Path(folder) for folder in options.models.split(",") if folder]
        if not folders:
            folders = [Path(made) / "tiny"]
            subprocess.run(
                [sys.executable, "-m", "quartet.cli", "model", "tiny", str(folders[0])], check=True
            )
        figures: list[Figure] = []
        for seed, folder in enumerate(folders):
            name = f"model {seed}" if len(folders) > 1 else "model"
            figures += agreement_of(name, folder, options.batches, seed)
        figures += costs_of(folders[0])
        models = [str(folder) for folder in folders] if options.models else ["quartet model tiny"]
        report(figures, options.json, torch=torch.__version__, models=models, batches=options.batches)


if __name__ == "__main__":
    main()
