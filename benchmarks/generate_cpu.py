"""CPU time per sampled token.

The embedded engine against transformers' `generate`, and against vLLM where it is installed (make
install-vllm).

The same model (Qwen3 with 0.64 M parameters, float32, one thread), the same prompts (32 random tokens), 128
new tokens each, at temperature 1. The engine also computes log-probabilities and answers every request as a
stream of its own; `generate` gets one static batch of equal lengths, its best case. CPU time of the whole
process, the best of ROUNDS, the two taken by turns.

    python benchmarks/generate_cpu.py [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

THREADS = "1"
VLLM_PYTHON = Path(__file__).resolve().parent.parent / ".venv-vllm/bin/python"
os.environ.update(
    OMP_NUM_THREADS=THREADS,
    HF_HUB_OFFLINE="1",
    TORCHDYNAMO_DISABLE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
)

import torch  # noqa: E402
from figures import Figure, arguments, report  # noqa: E402
from quartet.kit.memory import tune_allocator  # noqa: E402
from quartet_inference.embedded.engine import EmbeddedEngine  # noqa: E402
from quartet_inference.embedded.limits import Limits  # noqa: E402
from quartet_inference.engine import Delta, Request, Sampling, ServedWeights  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

IN_FLIGHT = (1, 16, 64)
PROMPT_TOKENS, NEW_TOKENS, VOCABULARY = 32, 128, 387
ROUNDS = 5
#: The bar is 1.5 times vLLM's CPU time per token at 64 requests in flight. Where vLLM is not installed it is
#: carried over by what both cost on one machine: vLLM 0.32 0.103 ms, `generate` 0.122 ms, the same workload.
BAR = 1.5
VLLM_OVER_GENERATE = 0.103 / 0.122


def build_model() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32, intermediate_size=256, max_position_embeddings=1024, tie_word_embeddings=True,
        initializer_range=0.15, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval().requires_grad_(False)


@asynccontextmanager
async def embedded() -> AsyncIterator[EmbeddedEngine]:
    limits = Limits(max_model_len=512, max_num_seqs=max(IN_FLIGHT))
    served = ServedWeights("", 0, b"")
    engine = EmbeddedEngine(build_model(), limits, frozenset(), lambda tokens: "", served)
    try:
        yield engine
    finally:
        await engine.close()


def prompts(count: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    drawn: list[list[int]] = torch.randint(
        0, VOCABULARY, (count, PROMPT_TOKENS), generator=generator
    ).tolist()
    return drawn


def cpu_ms_per_token(work: Callable[[], int]) -> float:
    before = time.process_time()
    tokens = work()
    return (time.process_time() - before) * 1000 / tokens


async def run_engine(engine: EmbeddedEngine, batch: list[list[int]]) -> int:
    async def one(prompt: list[int]) -> int:
        request = Request(tuple(prompt), Sampling(NEW_TOKENS, ignore_eos=True))
        return sum(
            [len(event.token_ids) async for event in engine.generate(request) if isinstance(event, Delta)]
        )

    return sum(await asyncio.gather(*[one(prompt) for prompt in batch]))


def run_generate(model: Any, batch: list[list[int]]) -> int:
    with torch.inference_mode():
        ids = torch.tensor(batch)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=True,
            temperature=1.0, top_k=0, top_p=1.0,
        )  # fmt: skip
    return int(out.shape[0] * (out.shape[1] - PROMPT_TOKENS))


async def measure() -> dict[str, dict[int, float]]:
    """Best CPU milliseconds per token by engine and number in flight."""
    best: dict[str, dict[int, float]] = {"embedded": {}, "generate": {}}
    model = build_model()
    async with embedded() as engine:
        for count in IN_FLIGHT:
            for round_ in range(ROUNDS + 1):
                batch = prompts(count, 100 * count + round_)
                before = time.process_time()
                tokens = await run_engine(engine, batch)
                mine = (time.process_time() - before) * 1000 / tokens
                theirs = cpu_ms_per_token(lambda batch=batch: run_generate(model, batch))  # type: ignore[misc]
                if round_ == 0:  # warm-up
                    continue
                for name, value in (("embedded", mine), ("generate", theirs)):
                    best[name][count] = min(value, best[name].get(count, float("inf")))
    return best


def measure_elsewhere() -> dict[int, float]:
    """The same with vLLM, in the interpreter that has it."""
    with TemporaryDirectory() as folder:
        answer = Path(folder) / "vllm.json"
        subprocess.run([VLLM_PYTHON, __file__, "--measure-vllm", answer], check=True)
        return {int(count): value for count, value in json.loads(answer.read_text()).items()}


def measure_vllm() -> dict[int, float]:
    """The same with vLLM in this process."""
    from vllm import LLM, SamplingParams

    with TemporaryDirectory() as folder:
        build_model().save_pretrained(Path(folder))
        llm = LLM(
            folder, dtype="float32", max_model_len=512, max_num_seqs=max(IN_FLIGHT), enforce_eager=True,
            skip_tokenizer_init=True, kv_cache_memory_bytes=64 << 20, enable_prefix_caching=False, seed=0,
            distributed_executor_backend="uni",
        )  # fmt: skip
        params = SamplingParams(
            max_tokens=NEW_TOKENS, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False
        )

        def run(batch: list[list[int]]) -> int:
            answers = llm.generate([{"prompt_token_ids": ids} for ids in batch], params, use_tqdm=False)
            return sum(len(answer.outputs[0].token_ids) for answer in answers)

        best: dict[int, float] = {}
        for count in IN_FLIGHT:
            for round_ in range(ROUNDS + 1):
                batch = prompts(count, 100 * count + round_)
                value = cpu_ms_per_token(lambda batch=batch: run(batch))  # type: ignore[misc]
                best[count] = min(value, best.get(count, float("inf"))) if round_ else float("inf")
    return best


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(int(THREADS))
    tune_allocator()
    if options.measure_vllm:
        options.measure_vllm.write_text(json.dumps(measure_vllm()))
        return
    best = asyncio.run(measure())
    figures = [
        Figure(f"CPU per token, {name}, {count} in flight", best[name][count], "ms")
        for count in IN_FLIGHT
        for name in ("embedded", "generate")
    ]
    most = max(IN_FLIGHT)
    ratio = best["embedded"][most] / best["generate"][most]
    limit = round(BAR * VLLM_OVER_GENERATE, 3)
    figures.append(Figure(f"embedded / generate, {most} in flight", ratio, "", f"<= {limit}"))
    if not VLLM_PYTHON.exists():
        print("vLLM is not installed (make install-vllm) and skipped; its bar is carried over from generate")
    else:
        vllm = measure_elsewhere()
        figures += [
            Figure(f"CPU per token, vllm, {count} in flight", vllm[count], "ms") for count in IN_FLIGHT
        ]
        figures.append(
            Figure(f"embedded / vllm, {most} in flight", best["embedded"][most] / vllm[most], "", f"<= {BAR}")
        )
    report(figures, options.json, torch=torch.__version__, rounds=ROUNDS, threads=THREADS)


if __name__ == "__main__":
    parser = arguments(__doc__ or "")
    parser.add_argument("--measure-vllm", type=Path, help=argparse.SUPPRESS)
    main(parser.parse_args())
