"""One script for TRL's GRPOTrainer, with its import and with quartet.trl's: time of the job, and the reward.

The job of vs_trl.py (8 prompts x 8 completions of at most 64 tokens for `--steps` steps, a random tiny model,
the share of digits as reward), by reward functions and a data set of the script. It runs in turns, `--rounds`
times: by TRL; by quartet.trl as it is, which samples by what it has learned last, as TRL does; and by
quartet.trl with sampling and training at the same time (docs/trl.md, "Faster"). One thread in each process.

- The whole job: from the start of Python to the model on disk.
- Reward: of 256 completions at temperature 1, sampled by transformers for all.

TRL is in the `dev` group of pyproject.toml, so `make install` has it.

    python benchmarks/trl_script.py [--steps 30] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import Figure, arguments, report
from vs_trl import PROMPTS, digit_share, environment, in_own_process, prompt, settings_of_trl

TRL, SAME, OVERLAPPED = "trl", "same", "overlapped"
#: By name: what the script of quartet.trl says beside what TRL's says.
OVERRIDES: dict[str, dict[str, Any]] = {
    SAME: {},
    OVERLAPPED: {"max_off_policy_steps": 1, "algorithm": {"proximal": False}},
}


@dataclass(frozen=True)
class Job:
    """One finished job."""

    seconds: float
    reward: float


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--script", choices=tuple(OVERRIDES), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.script:
        train(options.script, options.model, options.output, options.steps)
        return
    jobs: dict[str, list[Job]] = {name: [] for name in (TRL, SAME, OVERLAPPED)}
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(prefix="quartet-script-") as folder:
            model = Path(folder) / "model"
            in_own_process("--make", str(model), "--seed", str(number))
            for name, done in jobs.items():
                done.append(job(name, model, Path(folder) / name, options.steps))
            print(f"round {number}: {[done[-1] for done in jobs.values()]}", file=sys.stderr, flush=True)
    report(figures_of(jobs), options.json, steps=options.steps)


def figures_of(jobs: dict[str, list[Job]]) -> list[Figure]:
    """Ratios are of the runs of a round, then their median."""
    figures = [Figure("TRL: whole job", statistics.median(job.seconds for job in jobs[TRL]), "s")]
    for name, called in ((SAME, "quartet.trl"), (OVERLAPPED, "quartet.trl, overlapped")):
        pairs = list(zip(jobs[TRL], jobs[name], strict=True))
        faster = statistics.median(theirs.seconds / ours.seconds for theirs, ours in pairs)
        figures += [
            Figure(f"{called}: whole job", statistics.median(job.seconds for job in jobs[name]), "s"),
            Figure(f"whole job, TRL over {called}", faster, "ratio", ">= 1"),
        ]
    rewards = {name: statistics.mean(job.reward for job in done) for name, done in jobs.items()}
    # Two jobs of one system that differ in the seed differ by about as much.
    return [
        *figures,
        Figure("reward after, TRL", rewards[TRL], ""),
        Figure("reward after, quartet.trl minus TRL", rewards[SAME] - rewards[TRL], "", ">= -0.02"),
        Figure("reward after, overlapped minus TRL", rewards[OVERLAPPED] - rewards[TRL], "", ">= -0.02"),
    ]


def job(name: str, model: Path, output: Path, steps: int) -> Job:
    """Run one and score what it wrote."""
    began = time.monotonic()
    if name == TRL:
        in_own_process("--model", str(model), "--trl", str(output), "--steps", str(steps))
    else:
        words = ("--script", name, "--model", model, "--output", output, "--steps", steps)
        command = [sys.executable, __file__, *map(str, words)]
        subprocess.run(command, stdout=sys.stderr, check=True, env=environment())
    seconds = time.monotonic() - began
    return Job(seconds, json.loads(in_own_process("--score", str(output))))


def train(name: str, model: Path, output: Path, steps: int) -> None:
    """The script of vs_trl.train_with_trl with the other import, in a process of its own."""
    from quartet.trl import GRPOConfig, GRPOTrainer

    def rewards(completions: Any, **others: Any) -> list[float]:
        return [digit_share(said[0]["content"]) for said in completions]

    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=rewards,
        args=GRPOConfig(**settings_of_trl(output, steps), overrides=OVERRIDES[name]),
        train_dataset=[{"prompt": prompt(index)} for index in range(PROMPTS * steps)],
    )
    trainer.train()
    trainer.save_model(str(output))


if __name__ == "__main__":
    main()
