"""docs/figures.md, written from benchmarks/results: every recorded figure, with its bar and its command.

1. The page says what the results say: `tests/contract/test_figures_page.py` holds it.
2. A benchmark that misses a bar says here what limits it (LIMITS); without that there is no page.

    python benchmarks/figures_page.py
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from figures import Figure

BENCHMARKS: Final = Path(__file__).resolve().parent
PAGE: Final = BENCHMARKS.parent / "docs/figures.md"

#: In the order of the page: of each part, the files of results in it.
PARTS: Final = {
    "The whole job": ("demo", "agreement", "environments", "overlap", "vs_trl", "trl_script"),
    "Between the services": (
        "wire", "recovery", "rollouts", "envhost", "rollout_faults", "generate", "replicas", "trainer_call",
    ),
    "Weights": ("weights", "delta", "relay", "pause"),
    "Computing on a CPU": (
        "generate_cpu", "adapters", "packing", "loss_memory", "checkpointing", "context_parallel",
    ),
    "On one GPU": ("gpu_train", "gpu_train_keep_attention", "gpu_generate", "gpu_generate_vllm"),
}  # fmt: skip
#: Of results from before a result told its own command: those that were made with options.
COMMANDS: Final = {
    "gpu_generate_vllm": "gpu_generate.py --engine vllm",
    "gpu_train": "gpu_train.py --steps 2",
    "gpu_train_keep_attention": "gpu_train.py --keep-attention --steps 2",
    "vs_trl": "vs_trl.py --rounds 5",
}
#: What keeps a figure from its bar.
LIMITS: Final = {
    "wire": "The numbers and names of a rollout weigh as much as 20 tokens: a rollout that is shorter than a "
    "hundred or two costs more than the 6 bytes that a token takes in longer ones.",
    "overlap": "One step at a time already keeps 1.5 of the two cores busy: little is left to overlap.",
    "vs_trl": "The products of matrices, which both have to do, and the services around them are most of "
    "what 0.7 would leave ([trainer.md](trainer.md#time)). The job's ratio was 1.34 to 1.65 at four hours, "
    "and on a processor of Intel's 1.27, with 1.39 of TRL's CPU time.",
    "trl_script": "As TRL does, it samples by what it has learned last, so only one of its processes "
    "computes at a time, and it starts four of them; overlapped it is faster ([trl.md](trl.md)).",
    "recovery": "With the fork server die both services that are forks of it: torch is imported anew, for 5 "
    "to 7 s of one core, before either can start, then both load the model. It counts until tokens of later "
    "weights are trained on.",
    "generate": "The bar that was asked for is against the `openai` client. A bare client that checks "
    "nothing is the limit of HTTP: with few requests in flight grpc.aio costs as much.",
    "trainer_call": "Bare gRPC takes 0.7 ms of it, and what is checked of a batch 0.3. This is a processor "
    "of Intel's, where it takes 1.7 to 1.9 by the minute; on one of AMD's an earlier release took 1.4 to "
    "1.8.",
    "weights": "The road over HTTP verifies nothing. Bare gRPC, whose messages are dropped as they come, has "
    "0.81 of its speed, and on two cores no road over gRPC in Python is faster than that. On a processor of "
    "AMD's (Zen 4) the verified road had 0.42 to 0.44 of raw TCP's speed, which misses that bar, too.",
    "delta": "A file in the page cache, read by its own machine, is a copy of memory; it is there to show "
    "what the road between machines costs. The disk road, on the disk, is beaten at every size.",
    "gpu_train": "With deterministic kernels FlashAttention's backward pass adds up in one order, which "
    "grows with the square of the length; prime-rl's are not so ([trainer.md](trainer.md#on-a-gpu)).",
    "gpu_train_keep_attention": "The bars are those of the trainer as it is; this setting takes more "
    "memory, and saves time in long sequences alone.",
}

HEAD: Final = """# Figures

<!-- Written by benchmarks/figures_page.py from benchmarks/results. -->

Every figure that is on record, by the command that made it; with `--json FILE` it writes what stands here.
`make bench` runs all benchmarks once: those of vLLM only where it is installed (`make install-vllm`), those
of a GPU where there is one. Beside a command stand the day, the commit (`+`: and what was not committed yet)
and the processor; records without them are of 22 to 30 November 2026. Those of CPUs are of two shared cores,
where one commit takes 12 to 22 s for a job by the hour: so they are ratios to a rival, or to the physical
limit, in the same minute wherever there is one. Those of a GPU are with torch 2.11.
"""


def page() -> str:
    """The whole of it. Raises KeyError for a miss without a reason."""
    parts = {part: [_benchmark(name) for name in names] for part, names in PARTS.items()}
    every = [figure for name in _names() for figure in _figures(name)]
    judged = [figure for figure in every if figure.bar]
    missed = [figure for figure in judged if not figure.ok]
    count = f"{len(judged) - len(missed)} of {len(judged)} bars are met; not these {len(missed)}:\n"
    lines = [HEAD, count, *(_missed(name) for name in _names() if _misses(name))]
    for part, texts in parts.items():
        lines += ["", f"## {part}", *texts]
    return "\n".join(lines) + "\n"


def _names() -> list[str]:
    return [name for names in PARTS.values() for name in names]


def _figures(name: str) -> list[Figure]:
    rows = json.loads((BENCHMARKS / f"results/{name}.json").read_text())["figures"]
    return [Figure(row["name"], row["value"], row["unit"], row["bar"]) for row in rows]


def _misses(name: str) -> list[Figure]:
    return [figure for figure in _figures(name) if figure.ok is False]


def _missed(name: str) -> str:
    said = "; ".join(f"{one.name} {_number(one.value)} (bar {one.bar})" for one in _misses(name))
    return f"- [`{name}`](#{name}): {said}. {LIMITS[name]}"


def _made_by(name: str) -> tuple[str, str]:
    """A result's command, and of what it is."""
    context = json.loads((BENCHMARKS / f"results/{name}.json").read_text())["context"]
    told = [context[key] for key in ("recorded", "commit", "device", "processor") if context.get(key)]
    return context.get("command", COMMANDS.get(name, f"{name}.py")), ", ".join(told)


def _benchmark(name: str) -> str:
    command, told = _made_by(name)
    record = f" ({told})" if told else ""
    script = BENCHMARKS / command.split()[0]
    about = (ast.get_docstring(ast.parse(script.read_text())) or "").partition("\n\n")[0]
    judged = [figure for figure in _figures(name) if figure.bar]
    others = [figure for figure in _figures(name) if not figure.bar]
    text = f"\n### {name}\n\n{' '.join(about.split())} `python benchmarks/{command}`{record}\n"
    if judged:
        text += "\n" + _table(judged, with_bars=True)
    if others:
        fold = f"\n<details><summary>{len(others)} figures without a bar</summary>\n\n{{}}\n</details>\n"
        text += fold.format(_table(others, with_bars=False))
    return text.rstrip("\n")


def _table(figures: Sequence[Figure], *, with_bars: bool) -> str:
    lines = (
        ["| figure | value | bar | |", "|---|---|---|---|"]
        if with_bars
        else ["| figure | value |", "|---|---|"]
    )
    for figure in figures:
        cells = [figure.name.replace("|", "\\|"), f"{_number(figure.value)} {figure.unit}".strip()]
        if with_bars:
            cells += [figure.bar, "met" if figure.ok else "**missed**"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """Four digits, and never an exponent for what a person would write out."""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


if __name__ == "__main__":
    PAGE.write_text(page())
