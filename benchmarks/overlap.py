"""Overlap of generation and training: the same run with and without one step of asynchrony.

Runs the main job for a fixed number of steps with max_off_policy_steps = 1 and = 0, in turn (A B A B ...),
on one tiny model, and compares the wall time of the whole run, the start of its services included. Bar: the
alternating run takes >= 1.2 times as long. Beside it, the time of one step and its parts, and how many cores
were busy: what generation and training take from each other where there are only two.

    python benchmarks/overlap.py [--steps 50] [--pairs 2] [--model DIR] [--json FILE]
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from figures import Figure, arguments, report

REPOSITORY = Path(__file__).resolve().parent.parent
WHOLE = "whole run"
STEP = "time/step_s"
BUSY = "cores busy"
QUARTET = [sys.executable, "-m", "quartet.cli"]


def cpu_seconds() -> float:
    """Of all that this process started and that has ended: the launcher and its services."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_seconds(model: Path, output: Path, steps: int, off_policy: int) -> dict[str, float]:
    """Seconds of the run and of a step (the first, which always waits for its rollouts, left out) with its
    parts.
    """
    command = [*QUARTET, "rl", "@", "configs/reverse-text.toml", "--model", str(model)]
    command += ["--output-dir", str(output), "--max-steps", str(steps)]
    command += ["--max-off-policy-steps", str(off_policy), "--eval.num-examples", "0"]
    before = cpu_seconds()
    subprocess.run(command, check=True, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    used = cpu_seconds() - before
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "time/step_s" in row][1:]
    seconds = {key: statistics.fmean(row[key] for row in rows) for key in rows[0] if key.startswith("time/")}
    wall = json.loads((output / "summary.json").read_text())["wall_seconds"]
    return {WHOLE: wall, BUSY: used / wall, **seconds}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    ratios, steps, overlapped, alternating = [], [], [], []
    with tempfile.TemporaryDirectory(prefix="quartet-overlap-") as folder:
        root = Path(folder)
        model = options.model or root / "model"
        if options.model is None:
            subprocess.run([*QUARTET, "model", "tiny", str(model)], check=True, cwd=REPOSITORY)
        for pair in range(options.pairs):
            overlapped.append(run_seconds(model, root / f"async{pair}", options.steps, 1))
            alternating.append(run_seconds(model, root / f"sync{pair}", options.steps, 0))
            ratios.append(alternating[-1][WHOLE] / overlapped[-1][WHOLE])
            steps.append(alternating[-1][STEP] / overlapped[-1][STEP])
    figures = [
        Figure("alternating / overlapped, the whole run (median)", statistics.median(ratios), "x", ">= 1.2"),
        Figure("alternating / overlapped, a step (median)", statistics.median(steps), "x"),
    ]
    for name, runs in (("overlapped", overlapped), ("alternating", alternating)):
        for key in sorted(runs[0]):
            unit = "cores" if key == BUSY else "s"
            figures.append(Figure(f"{name}: {key}", statistics.median(run[key] for run in runs), unit))
    report(figures, options.json, steps=options.steps, pairs=options.pairs, ratios=ratios)


if __name__ == "__main__":
    main()
