"""Environments trained on a CPU: time, reward, agreement of trainer and engine.

For each environment: `quartet model tiny --task` and `quartet rl @ configs/TASK.toml`, from nothing. Bars:
the run, with the start of its services and the evaluations, at most 300 s (making the model stands beside
it); evaluation reward to >= 0.85, in wordle, where a good player earns 1.7, only upwards; and as in demo.py,
which has reverse-text: the largest |log-probability by trainer - by engine| <= 2e-5, every trained token
compared, the ledger balanced.

    python benchmarks/environments.py [--tasks alphabet-sort,gsm8k,math-python,wiki-search,wordle] [--seed 0]
                                      [--json FILE]
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from demo import run_seed, unaccounted
from figures import Figure, arguments, report

TASKS = ("alphabet-sort", "gsm8k", "math-python", "wiki-search", "wordle")
SOLVED = TASKS[:-1]


def figures_of(task: str, seed: int, folder: Path) -> list[Figure]:
    """The figures of one environment."""
    model_s, run_s, summary, skipped = run_seed(seed, folder, task)
    before, after = summary["reward_before"], summary["reward_after"]
    name = f"{task}: "
    return [
        Figure(name + "the run", run_s, "s", "<= 300"),
        Figure(name + "making the model", model_s, "s"),
        Figure(name + "reward before", before, ""),
        Figure(name + "reward after", after, "", ">= 0.85" if task in SOLVED else f">= {before:.3f}"),
        Figure(name + "max |dlogp|", summary["max_logprob_difference"], "nats", "<= 2e-05"),
        Figure(name + "trained tokens not compared", skipped, "tokens", "== 0"),
        Figure(name + "unaccounted rollouts", unaccounted(summary["ledger"]), "rollouts", "== 0"),
    ]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    figures: list[Figure] = []
    for task in options.tasks.split(","):
        with tempfile.TemporaryDirectory(prefix="quartet-environments-") as folder:
            figures += figures_of(task, options.seed, Path(folder))
        report(figures, options.json, seed=options.seed)


if __name__ == "__main__":
    main()
