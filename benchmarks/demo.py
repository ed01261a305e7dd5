"""The main job, seed by seed: time, reward, agreement of trainer and engine.

For each seed: `quartet model tiny` and `quartet rl @ configs/reverse-text.toml`, from nothing, as `make
demo` runs them. Bars: at most 180 s for both together; evaluation reward from <= 0.5 to >= 0.9; the largest
|log-probability by trainer - by engine| over every sampled token of every batch <= 2e-5, and no trained token
left out of that comparison; the ledger balanced. Why the log-probabilities agree so closely is in
docs/numerics.md; benchmarks/agreement.py measures that alone.

    python benchmarks/demo.py [--seeds 0,1,2,3,4] [--json FILE]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import Figure, arguments, report

REPOSITORY = Path(__file__).resolve().parent.parent
QUARTET = [sys.executable, "-m", "quartet.cli"]


def run_seed(seed: int, folder: Path, task: str = "reverse-text") -> tuple[float, float, dict[str, Any], int]:
    """Seconds for the model and for the run, its summary, its trained tokens that were not compared."""
    model, output = folder / "model", folder / "run"
    started = time.monotonic()
    command = [*QUARTET, "model", "tiny", str(model), "--task", task, "--seed", str(seed)]
    subprocess.run(command, check=True, cwd=REPOSITORY)
    modelled = time.monotonic()
    command = [*QUARTET, "rl", "@", f"configs/{task}.toml", "--model", str(model), "--seed", str(seed)]
    subprocess.run([*command, "--output-dir", str(output)], check=True, cwd=REPOSITORY)
    ended = time.monotonic()
    summary = json.loads((output / "summary.json").read_text())
    return modelled - started, ended - modelled, summary, uncompared(output / "metrics.jsonl")


def uncompared(metrics: Path) -> int:
    """Trained tokens whose log-probability the trainer did not compare with the engine's."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row for row in rows if "train/loss_tokens" in row]
    return round(sum(row["train/loss_tokens"] - row.get("train/logprob_tokens_compared", 0) for row in steps))


def figures_of(
    seed: int, model_s: float, run_s: float, summary: dict[str, Any], skipped: int
) -> list[Figure]:
    """The figures of one seed."""
    name = f"seed {seed}: "
    return [
        Figure(name + "start to finish", model_s + run_s, "s", "<= 180"),
        Figure(name + "making the model", model_s, "s"),
        Figure(name + "reward before", summary["reward_before"], "", "<= 0.5"),
        Figure(name + "reward after", summary["reward_after"], "", ">= 0.9"),
        Figure(name + "max |dlogp|", summary["max_logprob_difference"], "nats", "<= 2e-05"),
        Figure(name + "trained tokens not compared", skipped, "tokens", "== 0"),
        Figure(name + "max staleness", summary["max_off_policy_steps_seen"], "versions", "<= 1"),
        Figure(name + "steps", summary["steps"], "steps"),
        Figure(name + "unaccounted rollouts", unaccounted(summary["ledger"]), "rollouts", "== 0"),
    ]


def unaccounted(ledger: dict[str, Any]) -> int:
    """Rollouts that the ledger does not say the whereabouts of."""
    discarded = sum(ledger["discarded"].values())
    return int(ledger["dispatched"] - ledger["trained"] - discarded - ledger["in_flight"])


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    options = parser.parse_args()
    figures: list[Figure] = []
    for seed in map(int, options.seeds.split(",")):
        with tempfile.TemporaryDirectory(prefix="quartet-demo-") as folder:
            figures += figures_of(seed, *run_seed(seed, Path(folder)))
        report(figures, options.json)


if __name__ == "__main__":
    main()
