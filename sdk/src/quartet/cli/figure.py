"""reward.png: the reward of each step with the evaluations."""

from __future__ import annotations

from pathlib import Path

from quartet.cli.progress import Progress


def import_drawing() -> None:
    """What drawing imports, half a second of CPU time, ahead of it."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401


def write_reward_png(progress: Progress, title: str, file: Path) -> None:
    """Draw the curve. Needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if progress.rewards:
        steps, rewards = zip(*progress.rewards, strict=True)
        axes.plot(steps, rewards, color="#1f77b4", linewidth=1.6, label="training batch")
    if progress.evals:
        steps, rewards = zip(*progress.evals, strict=True)
        axes.plot(steps, rewards, "o", color="#d62728", markersize=8, label="evaluation")
        for step, value in progress.evals:
            axes.annotate(
                f"{value:.2f}", (step, value), textcoords="offset points", xytext=(0, 9), ha="center"
            )
    if progress.rewards or progress.evals:
        axes.legend(loc="lower right")
    drawn = [value for _, value in (*progress.rewards, *progress.evals)]
    axes.set_ylim(min(0.0, *drawn, 0.0), max(1.05, *drawn, 0.0))
    axes.set(xlabel="optimizer steps", ylabel="mean reward", title=title)
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
