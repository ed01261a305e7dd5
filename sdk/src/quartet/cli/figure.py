"""reward.png: the reward of each step with the evaluations, of one run or of several."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quartet.cli.progress import Progress

#: Evaluations whose reward is written beside its dot: more would lie over each other, and the place of each
#: takes three milliseconds to find.
MAX_LABELS = 32


def import_drawing() -> None:
    """What drawing imports, half a second of CPU time, ahead of it."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401


def write_reward_png(progress: Progress, title: str, file: Path) -> None:
    """Draw the curve. Needs no display."""
    figure, axes = _empty()
    if progress.rewards:
        steps, rewards = zip(*progress.rewards, strict=True)
        axes.plot(steps, rewards, color="#1f77b4", linewidth=1.6, label="training batch")
    if progress.evals:
        steps, rewards = zip(*progress.evals, strict=True)
        axes.plot(steps, rewards, "o", color="#d62728", markersize=8, label="evaluation")
        every = -(-len(progress.evals) // MAX_LABELS)
        for step, value in progress.evals[::-every]:  # the last one always
            axes.annotate(
                f"{value:.2f}", (step, value), textcoords="offset points", xytext=(0, 9), ha="center"
            )
    if progress.rewards or progress.evals:
        axes.legend(loc="lower right")
    _finish(axes, [progress], title)
    figure.savefig(file, dpi=120)


def write_rewards_png(runs: Mapping[str, Progress], file: Path) -> None:
    """Draw the curves of runs over each other, evaluations as dots of the run's colour."""
    figure, axes = _empty()
    for number, (name, progress) in enumerate(runs.items()):
        colour, label = f"C{number % 10}", name
        for points, style in ((progress.rewards, "-"), (progress.evals, "o")):
            if points:
                steps, rewards = zip(*points, strict=True)
                axes.plot(steps, rewards, style, color=colour, linewidth=1.4, markersize=7, label=label)
                label = ""  # once in the legend
    if any(one.rewards or one.evals for one in runs.values()):
        axes.legend(loc="lower right", fontsize="small")
    _finish(axes, list(runs.values()), "lines: training batches, dots: evaluations")
    figure.savefig(file, dpi=120)


def _empty() -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _finish(axes: Any, runs: list[Progress], title: str) -> None:
    drawn = [value for one in runs for _, value in (*one.rewards, *one.evals)]
    axes.set_ylim(min(0.0, *drawn, 0.0), max(1.05, *drawn, 0.0))
    axes.set(xlabel="steps", ylabel="mean reward", title=title)
    axes.grid(alpha=0.3)
