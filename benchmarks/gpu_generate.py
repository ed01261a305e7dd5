"""An engine on one GPU, a Qwen3-0.6B-shaped model: tokens per second, and the pause of an update.

1. Tokens per second of completions of 128 tokens behind prompts of 128, at temperature 1, with 1, 32 and 128
   of them in flight; with vLLM also 256.
2. The pause of generation while a whole version in bfloat16 is taken, and the gaps between tokens, as
   benchmarks/pause.py measures them, with keys kept and recomputed; with vLLM also where every version is
   reloaded layer by layer.

    python benchmarks/gpu_generate.py [--engine vllm] [--json FILE]
"""

from __future__ import annotations

import asyncio
import statistics
import time
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gpu_shape
from figures import Figure, arguments, report
from pause import BARS_MS, STREAMS, measure
from quartet_inference.vllm import environment

IN_FLIGHT = (1, 32, 128)
MORE_IN_FLIGHT: dict[str, tuple[int, ...]] = {"embedded": (), "vllm": (256,)}
PROMPT_TOKENS, NEW_TOKENS, CONTEXT = 128, 128, 1024
KV_CACHE_BYTES = {"cuda": 32 << 30, "cpu": 1 << 28}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--engine", choices=["embedded", "vllm"], default="embedded")
    gpu_shape.add_arguments(parser)
    options = parser.parse_args()
    if options.engine == "vllm":
        environment.prepare(threads=1)
    gpu_shape.require(options.device)
    figures: list[Figure] = []

    async def measured(kv_on_update: str, with_rates: bool, by_copies: bool) -> None:
        running = await started(options.engine, options.device, options.trial, kv_on_update, by_copies)
        parts = [rates(running, options.engine)] if with_rates else []
        name = f"{options.engine}, keys {'kept' if kv_on_update == 'keep' else 'recomputed'}"
        name += "" if by_copies else ", reloaded"
        for part in [*parts, pauses(running, options.device, options.trial, name, options.engine)]:
            figures.extend(await part)
            # After each: time on a GPU may end before the benchmark does.
            report(figures, options.json, device=gpu_shape.named(options.device), streams=STREAMS)

    asyncio.run(measured("recompute", with_rates=True, by_copies=True))
    if options.engine == "vllm":
        asyncio.run(measured("recompute", with_rates=False, by_copies=False))
    asyncio.run(measured("keep", with_rates=False, by_copies=True))


async def started(engine: str, device: str, trial: bool, kv_on_update: str, by_copies: bool = True) -> Any:
    rows = max(in_flight(engine))
    if engine == "vllm":
        return await asyncio.to_thread(start_vllm, device, trial, rows, kv_on_update, by_copies)
    return start_embedded(device, trial, rows, kv_on_update)


def in_flight(engine: str) -> tuple[int, ...]:
    return (*IN_FLIGHT, *MORE_IN_FLIGHT[engine])


def start_embedded(device: str, trial: bool, rows: int, kv_on_update: str) -> Any:
    from quartet_inference.embedded import attention
    from quartet_inference.embedded import device as place
    from quartet_inference.embedded.engine import EmbeddedEngine
    from quartet_inference.embedded.limits import Limits
    from quartet_inference.embedded.model import DTYPES
    from quartet_inference.engine import ServedWeights

    where = place.chosen(device)
    network = gpu_shape.model(0, trial=trial, device=device).requires_grad_(False)
    attention.use(network)
    network = network.to(where, DTYPES[place.dtype_on(where, "auto")])
    limits = Limits(
        CONTEXT, rows, kv_cache_bytes=KV_CACHE_BYTES[device], recompute_on_update=kv_on_update == "recompute"
    )
    return EmbeddedEngine(network, limits, frozenset(), lambda tokens: "", ServedWeights("", 0, b""))


def start_vllm(device: str, trial: bool, rows: int, kv_on_update: str, by_copies: bool) -> Any:
    from quartet_inference.config import InferenceConfig
    from quartet_inference.vllm.asked import COPY_PLAN
    from quartet_inference.vllm.start import start

    settings = {
        "max_num_seqs": rows, "kv_cache_bytes": KV_CACHE_BYTES[device], "kv_on_update": kv_on_update,
        "args": {"additional_config": {COPY_PLAN: by_copies}},
    }  # fmt: skip
    folder = Path(saved(device, trial).name)
    config = InferenceConfig(model=folder, engine="vllm", max_model_len=CONTEXT, vllm=settings)  # type: ignore[arg-type]
    return start(config, frozenset(), lambda tokens: "", lambda: None)


@cache
def saved(device: str, trial: bool) -> TemporaryDirectory[str]:
    """The model's folder; it goes with the process."""
    from quartet_inference.embedded import device as place
    from quartet_inference.embedded.model import DTYPES

    folder = TemporaryDirectory()
    dtype = DTYPES[place.dtype_on(place.chosen(device), "auto")]
    gpu_shape.model(0, trial=trial, device=device).to(dtype).save_pretrained(folder.name)
    return folder


async def rates(running: Any, engine: str) -> list[Figure]:
    """Tokens per second."""
    from quartet_inference.engine import Delta, Request, Sampling

    numbers = count()

    async def one() -> int:
        # No prompt comes twice: what is known of it would not be computed again.
        seed = next(numbers)
        prompt = tuple((seed * 37 + place * (11 + seed // 500)) % 500 for place in range(PROMPT_TOKENS))
        request = Request(prompt, Sampling(NEW_TOKENS, ignore_eos=True))
        return sum([len(e.token_ids) async for e in running.generate(request) if isinstance(e, Delta)])

    figures = []
    for rows in in_flight(engine):
        await asyncio.gather(*(one() for _ in range(rows)))  # warm
        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*(one() for _ in range(rows))))
        rate = tokens / (time.perf_counter() - began)
        figures.append(Figure(f"{engine}, {rows} in flight", rate, "tokens/s"))
    return figures


async def pauses(running: Any, device: str, trial: bool, name: str, engine: str) -> list[Figure]:
    """Updates under way; every token is told by itself. Ends the engine."""
    tell_every_token()
    dtype = running.info().dtype
    versions = [await asyncio.to_thread(weights, seed, device, trial, dtype) for seed in range(2)]
    if engine == "vllm":
        await running.load_again(versions[0])  # as a replica does before it serves (vllm/probe.py)
    found = await measure(running, versions)
    bar = f"<= {BARS_MS[engine]}"  # on a GPU nothing slower is wanted than on a CPU

    def p99(gaps: list[float]) -> float:
        return statistics.quantiles(gaps, n=100)[98]

    return [
        Figure(f"{name}: weights of one update", found.model_bytes / 1e6, "MB"),
        Figure(f"{name}: pause, median", statistics.median(found.pauses_ms), "ms", bar),
        Figure(f"{name}: pause, longest", max(found.pauses_ms), "ms", bar),
        Figure(f"{name}: staging before it, median", statistics.median(found.staging_ms), "ms"),
        Figure(f"{name}: gap, p99, no updates", p99(found.quiet_gaps_ms), "ms"),
        Figure(f"{name}: gap, p99, with updates", p99(found.update_gaps_ms), "ms"),
        Figure(f"{name}: requests failed", found.failed, "", "== 0"),
    ]


def tell_every_token() -> None:
    from quartet_inference import completion

    completion.FLUSH_TOKENS = 1


@cache
def weights(seed: int, device: str, trial: bool, dtype: str) -> dict[str, Any]:
    """A version, in the host's memory."""
    from quartet_inference.embedded.model import DTYPES, ModelWeights

    network = gpu_shape.model(seed, trial=trial, device=device).requires_grad_(False)
    return ModelWeights(network.to("cpu", DTYPES[dtype])).tensors()


if __name__ == "__main__":
    main()
