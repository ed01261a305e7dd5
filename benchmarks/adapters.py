"""What adapters cost in the embedded engine: tokens per second of the base model, of one adapter, and of four
adapters and the base in one batch, in interleaved rounds; and the pause of replacing an adapter in flight.

  python benchmarks/adapters.py
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from figures import Figure, arguments, report

RANK, ROWS, TOKENS, ROUNDS = 16, 64, 96, 5
MIXES = {"base": ("",), "one adapter": ("a",), "four adapters and base": ("a", "b", "c", "d", "")}


def adapter(network: Any, seed: int) -> tuple[str, dict[str, Any]]:
    """A random adapter of every linear module but the head."""
    import torch
    from quartet.weights.tensor import Tensor

    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in network.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            for side, shape in (("A", (RANK, module.in_features)), ("B", (module.out_features, RANK))):
                matrix = 0.02 * torch.randn(shape, generator=generator)
                key = f"base_model.model.{name}.lora_{side}.weight"
                tensors[key] = Tensor("F32", shape, matrix.numpy().tobytes())
    return json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}), tensors


async def rate(engine: Any, runs: tuple[str, ...]) -> float:
    """Tokens per second of a full batch."""
    from quartet_inference.engine import Request, Sampling

    async def one(number: int) -> None:
        sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
        prompt, run_id = (3 + number, 5, 7, 9), runs[number % len(runs)]
        async for _ in engine.generate(Request(prompt, sampling, seeds=(number,), run_id=run_id)):
            pass

    began = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(ROWS)))
    return ROWS * TOKENS / (time.perf_counter() - began)


async def measure(folder: Path) -> list[Figure]:
    """All figures."""
    import torch
    from quartet_inference.embedded import model
    from quartet_inference.embedded.engine import EmbeddedEngine, Limits
    from quartet_inference.engine import ServedWeights

    torch.set_num_threads(1)
    network = model.load(folder, "float32", weights_follow=False)
    limits = Limits(max_model_len=128, max_num_seqs=ROWS, kv_cache_bytes=1 << 28)
    made = {run: adapter(network, seed) for seed, run in enumerate("abcd")}
    engine = EmbeddedEngine(network, limits, frozenset(), lambda tokens: "", None)
    await engine.swap(None, ServedWeights("", 0, engine.base_digest()))

    async def load(run: str, version: int) -> float:
        staged = await engine.stage_adapter(*made[run])
        await engine.swap_adapter(staged, ServedWeights(run, version, b""))
        return engine.info().last_update_pause_ms

    for run in made:
        await load(run, 0)
    rates: dict[str, list[float]] = {name: [] for name in MIXES}
    for _ in range(ROUNDS):
        for name, runs in MIXES.items():
            rates[name].append(await rate(engine, runs))
    busy = asyncio.create_task(rate(engine, MIXES["four adapters and base"]))
    pauses = []
    for version in range(1, 6):
        await asyncio.sleep(0.05)
        pauses.append(await load("a", version))
    await busy
    await engine.close()
    figures = [Figure(f"{name}", statistics.median(values), "tokens/s") for name, values in rates.items()]
    for name in list(MIXES)[1:]:
        share = statistics.median(a / b for a, b in zip(rates[name], rates["base"], strict=True))
        figures.append(Figure(f"{name}, of the base model's", share, ""))
    return [*figures, Figure("pause of a replacement under load, median", statistics.median(pauses), "ms")]


if __name__ == "__main__":
    parser = arguments(__doc__ or "")
    parser.add_argument("--model", type=Path, default=Path("models/tiny"), help="a model folder")
    given = parser.parse_args()
    report(asyncio.run(measure(given.model)), given.json, rank=RANK, rows=ROWS, tokens=TOKENS)
