"""The embedded engine on one GPU, a Qwen3-0.6B-shaped model: tokens per second, and the pause of an update.

1. Tokens per second of completions of 128 tokens behind prompts of 128, at temperature 1, with 1, 32 and 128
   of them in flight.
2. The pause of generation while a whole version in bfloat16 is taken, and the gaps between tokens, as
   benchmarks/pause.py measures them, with keys kept and recomputed.

    python benchmarks/gpu_generate.py [--json FILE]
"""

from __future__ import annotations

import asyncio
import statistics
import time
from itertools import count
from typing import Any

import gpu_shape
from figures import Figure, arguments, report
from pause import STREAMS, measure

IN_FLIGHT = (1, 32, 128)
PROMPT_TOKENS, NEW_TOKENS, CONTEXT = 128, 128, 1024
KV_CACHE_BYTES = {"cuda": 32 << 30, "cpu": 1 << 28}
#: That of the CPU's embedded engine: on a GPU nothing slower is wanted.
PAUSE_MS = 50


def main() -> None:
    parser = arguments(__doc__ or "")
    gpu_shape.add_arguments(parser)
    options = parser.parse_args()
    gpu_shape.require(options.device)
    figures = asyncio.run(rates(options.device, options.trial))
    for kv_on_update in ("keep", "recompute"):
        figures += asyncio.run(pauses(options.device, options.trial, kv_on_update))
    report(figures, options.json, device=gpu_shape.named(options.device), streams=STREAMS)


def engine(device: str, trial: bool, rows: int, kv_on_update: str = "recompute") -> Any:
    from quartet_inference.embedded import attention
    from quartet_inference.embedded import device as place
    from quartet_inference.embedded.engine import EmbeddedEngine
    from quartet_inference.embedded.limits import Limits
    from quartet_inference.embedded.model import DTYPES
    from quartet_inference.engine import ServedWeights

    where = place.chosen(device)
    network = gpu_shape.model(0, trial=trial).requires_grad_(False)
    attention.use(network)
    network = network.to(where, DTYPES[place.dtype_on(where, "auto")])
    limits = Limits(
        CONTEXT, rows, kv_cache_bytes=KV_CACHE_BYTES[device], recompute_on_update=kv_on_update == "recompute"
    )
    return EmbeddedEngine(network, limits, frozenset(), lambda tokens: "", ServedWeights("", 0, b""))


async def rates(device: str, trial: bool) -> list[Figure]:
    """Tokens per second."""
    from quartet_inference.engine import Delta, Request, Sampling

    running = engine(device, trial, max(IN_FLIGHT))

    numbers = count()

    async def one() -> int:
        # No prompt comes twice: what is known of it would not be computed again.
        seed = next(numbers)
        prompt = tuple((seed * 37 + place * 11) % 500 for place in range(PROMPT_TOKENS))
        request = Request(prompt, Sampling(NEW_TOKENS, ignore_eos=True))
        return sum([len(e.token_ids) async for e in running.generate(request) if isinstance(e, Delta)])

    figures = []
    for rows in IN_FLIGHT:
        await asyncio.gather(*(one() for _ in range(rows)))  # warm
        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*(one() for _ in range(rows))))
        rate = tokens / (time.perf_counter() - began)
        figures.append(Figure(f"embedded, {rows} in flight", rate, "tokens/s"))
    await running.close()
    return figures


async def pauses(device: str, trial: bool, kv_on_update: str) -> list[Figure]:
    """Updates under way; every token is told by itself."""
    from quartet_inference.embedded import decoder

    decoder.FLUSH_TOKENS = 1
    running = engine(device, trial, STREAMS, kv_on_update)
    versions = [await asyncio.to_thread(weights, seed, trial, running.info().dtype) for seed in range(2)]
    found = await measure(running, versions)
    name = f"embedded, keys {'kept' if kv_on_update == 'keep' else 'recomputed'}"

    def p99(gaps: list[float]) -> float:
        return statistics.quantiles(gaps, n=100)[98]

    return [
        Figure(f"{name}: weights of one update", found.model_bytes / 1e6, "MB"),
        Figure(f"{name}: pause, median", statistics.median(found.pauses_ms), "ms", f"<= {PAUSE_MS}"),
        Figure(f"{name}: pause, longest", max(found.pauses_ms), "ms", f"<= {PAUSE_MS}"),
        Figure(f"{name}: staging before it, median", statistics.median(found.staging_ms), "ms"),
        Figure(f"{name}: gap, p99, no updates", p99(found.quiet_gaps_ms), "ms"),
        Figure(f"{name}: gap, p99, with updates", p99(found.update_gaps_ms), "ms"),
        Figure(f"{name}: requests failed", found.failed, "", "== 0"),
    ]


def weights(seed: int, trial: bool, dtype: str) -> dict[str, Any]:
    """A version."""
    from quartet_inference.embedded.model import DTYPES, ModelWeights

    return ModelWeights(gpu_shape.model(seed, trial=trial).requires_grad_(False).to(DTYPES[dtype])).tensors()


if __name__ == "__main__":
    main()
