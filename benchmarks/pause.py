"""The pause of generation while new weights are taken, and the gaps between tokens that it makes.

A model of 64 MB (Qwen3-shaped, float32, random) serves STREAMS completions, told token by token. Half of the
time nothing else happens; then UPDATES versions are staged and swapped in, one every INTERVAL seconds. Both
engines do the same, vLLM in its own interpreter where that is installed (make install-vllm), once keeping the
keys of running requests and once recomputing them.

The pause is what the engine reports: nothing is sampled between its two ends. Keys are recomputed after it,
in passes between which those that have theirs go on; it shows in the gaps. A gap is the time between two
tokens of one completion as its reader sees them.

    python benchmarks/pause.py [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from quartet_inference.vllm import environment

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")

VLLM_PYTHON = Path(__file__).resolve().parent.parent / ".venv-vllm/bin/python"
STREAMS, PROMPT_TOKENS, NEW_TOKENS, VOCABULARY = 8, 64, 256, 4096
QUIET_SECONDS, UPDATES, INTERVAL = 6.0, 8, 1.5
BARS_MS = {"embedded": 50, "vllm": 100}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1024, "max_position_embeddings": 1024,
    "tie_word_embeddings": True, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


@dataclass
class Measured:
    """What one engine did."""

    model_bytes: int = 0
    pauses_ms: list[float] = field(default_factory=list)
    staging_ms: list[float] = field(default_factory=list)
    quiet_gaps_ms: list[float] = field(default_factory=list)
    update_gaps_ms: list[float] = field(default_factory=list)
    completions: int = 0
    failed: int = 0
    versions: int = 0


def build(seed: int) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES)).eval().requires_grad_(False)


def start(engine: str, folder: Path, kv_on_update: str) -> Any:
    """A started engine that tells every token by itself."""
    from quartet_inference import completion
    from quartet_inference.config import InferenceConfig

    completion.FLUSH_TOKENS = 1
    settings = {"max_num_seqs": STREAMS, "kv_cache_bytes": 1 << 28, "kv_on_update": kv_on_update}
    config = InferenceConfig(model=folder, engine=engine, max_model_len=1024, **{engine: settings})  # type: ignore[arg-type]
    if engine == "vllm":
        from quartet_inference.vllm.start import start as start_vllm

        return start_vllm(config, frozenset(), lambda tokens: "", lambda: None)
    from quartet_inference.embedded import model
    from quartet_inference.embedded.engine import EmbeddedEngine
    from quartet_inference.embedded.limits import Limits
    from quartet_inference.engine import ServedWeights

    network = model.load(folder, "float32", weights_follow=False)
    limits = Limits(1024, STREAMS, kv_cache_bytes=1 << 28, recompute_on_update=kv_on_update == "recompute")
    return EmbeddedEngine(network, limits, frozenset(), lambda tokens: "", ServedWeights("", 0, b""))


async def measure(engine: Any, versions: list[dict[str, Any]]) -> Measured:
    from quartet_inference.engine import Delta, Request, Sampling, ServedWeights

    measured = Measured(sum(tensor.nbytes for tensor in versions[0].values()))
    gaps = measured.quiet_gaps_ms
    seen: set[int] = set()
    going = True

    async def stream(number: int) -> None:
        while going:
            prompt = tuple((number * 37 + i) % VOCABULARY for i in range(PROMPT_TOKENS))
            last = 0.0
            try:
                async for event in engine.generate(Request(prompt, Sampling(NEW_TOKENS, ignore_eos=True))):
                    now = time.perf_counter()
                    if isinstance(event, Delta):
                        seen.update(span.version for span in event.spans)
                        if last:
                            gaps.append((now - last) * 1000)
                        last = now
                measured.completions += 1
            except Exception as error:  # noqa: BLE001 - counted: the figure is that there is none
                print(f"a request failed: {error}", file=sys.stderr)
                measured.failed += 1

    streams = [asyncio.create_task(stream(number)) for number in range(STREAMS)]
    await asyncio.sleep(1.0)  # warm
    gaps.clear()
    await asyncio.sleep(QUIET_SECONDS)
    gaps = measured.update_gaps_ms
    for number in range(1, UPDATES + 1):
        began = time.perf_counter()
        staged = await engine.stage(versions[number % 2])
        measured.staging_ms.append((time.perf_counter() - began) * 1000)
        await engine.swap(staged, ServedWeights("run", number, b""))
        measured.pauses_ms.append(engine.info().last_update_pause_ms)
        await asyncio.sleep(INTERVAL)
    going = False
    await asyncio.gather(*streams)
    measured.versions = len(seen)
    await engine.close()
    return measured


def run(engine: str, kv_on_update: str) -> Measured:
    from quartet.weights.tensor import Tensor

    def weights_of(model: Any) -> dict[str, Any]:
        return {
            name: Tensor("F32", tuple(p.shape), p.detach().numpy().tobytes())
            for name, p in model.named_parameters()
        }

    with TemporaryDirectory() as folder:
        first = build(0)
        first.save_pretrained(folder)
        versions = [weights_of(first), weights_of(build(1))]
        started = start(engine, Path(folder), kv_on_update)
        return asyncio.run(measure(started, versions))


def measured_by(python: Path, engine: str, kv_on_update: str) -> Measured:
    """In a process of its own, with the interpreter that has the engine."""
    with TemporaryDirectory() as folder:
        answer = Path(folder) / "measured.json"
        command = [python, __file__, "--measure", engine, kv_on_update, answer]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"{engine} failed:\n{done.stdout[-4000:]}")
        return Measured(**json.loads(answer.read_text()))


def percentile(values: list[float], per_cent: int) -> float:
    return statistics.quantiles(values, n=100)[per_cent - 1]


def figures_of(engine: str, kv_on_update: str, measured: Measured) -> list[Any]:
    from figures import Figure

    name = f"{engine}, keys {'kept' if kv_on_update == 'keep' else 'recomputed'}"
    bar = f"<= {BARS_MS[engine]}"
    quiet, updating = measured.quiet_gaps_ms, measured.update_gaps_ms
    return [
        Figure(f"{name}: weights of one update", measured.model_bytes / 1e6, "MB"),
        Figure(f"{name}: pause, median of {UPDATES}", statistics.median(measured.pauses_ms), "ms", bar),
        Figure(f"{name}: pause, longest", max(measured.pauses_ms), "ms", bar),
        Figure(f"{name}: staging before it, median", statistics.median(measured.staging_ms), "ms"),
        Figure(f"{name}: gap, p50, no updates", percentile(quiet, 50), "ms"),
        Figure(f"{name}: gap, p99, no updates", percentile(quiet, 99), "ms"),
        Figure(f"{name}: gap, p50, an update every {INTERVAL} s", percentile(updating, 50), "ms"),
        Figure(f"{name}: gap, p99, an update every {INTERVAL} s", percentile(updating, 99), "ms"),
        Figure(f"{name}: requests failed, of {measured.completions}", measured.failed, "", "== 0"),
        Figure(f"{name}: versions that sampled", measured.versions, "", f">= {UPDATES}"),
    ]


def main(options: argparse.Namespace) -> None:
    from figures import report

    if options.measure:
        engine, kv_on_update, answer = options.measure
        if engine == "vllm":
            environment.prepare(threads=1)
        Path(answer).write_text(json.dumps(asdict(run(engine, kv_on_update))))
        return
    figures = []
    for engine, python in (("embedded", Path(sys.executable)), ("vllm", VLLM_PYTHON)):
        if not python.exists():
            print(f"{engine} is skipped: it is not installed (make install-vllm)")
            continue
        for kv_on_update in ("keep", "recompute"):
            figures += figures_of(engine, kv_on_update, measured_by(python, engine, kv_on_update))
    report(figures, options.json, streams=STREAMS)


if __name__ == "__main__":
    from figures import arguments

    parser = arguments(__doc__ or "")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    main(parser.parse_args())
