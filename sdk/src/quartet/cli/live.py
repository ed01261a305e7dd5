"""The live screen of a run: reward curve, figures, services and a few completions."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from quartet.cli.display import event_line
from quartet.cli.progress import Progress, phase_name
from quartet.cli.told_apart import agents, environments
from quartet.kit.standard_streams import only_shown, shown
from quartet.local.supervisor import State, Status
from quartet.v1.orchestrator_service_pb2 import RUN_PHASE_UNSPECIFIED, WatchRunResponse

CURVE_ROWS = 8
CURVE_COLUMNS = 64
#: What stands beside them: the scale, and the panel's borders.
BESIDE_CURVE = 10
EIGHTHS = " ▁▂▃▄▅▆▇█"
REFRESH_PER_SECOND = 4
STATE_STYLE = {State.UP: "green", State.STARTING: "yellow", State.BACKOFF: "yellow", State.FAILED: "red bold"}


def reward_curve(values: Sequence[float], rows: int = CURVE_ROWS, columns: int = CURVE_COLUMNS) -> list[str]:
    """The values as columns of block letters on a scale from 0 to the larger of 1 and the largest value."""
    if not values:
        return []
    top = max(1.0, *values)
    shown = list(values)
    if len(shown) > columns:  # average neighbours rather than cut the beginning off
        edges = [round(i * len(values) / columns) for i in range(columns + 1)]
        shown = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    heights = [round(max(0.0, value) / top * rows * 8) for value in shown]
    lines = []
    for row in range(rows - 1, -1, -1):
        label = f"{top * (row + 1) / rows:5.2f} "
        lines.append(label + "".join(EIGHTHS[min(8, max(0, height - row * 8))] for height in heights))
    return lines


def services_table(services: Sequence[Status]) -> Table:
    """State, address and restarts of each service."""
    table = Table(box=None, padding=(0, 1), show_header=False)
    for status in services:
        style = STATE_STYLE.get(status.state, "dim")
        restarts = f"{status.restarts} restarts" if status.restarts else ""
        # As a text: what stands in brackets is markup elsewhere, and an address may.
        address = Text(status.address)
        table.add_row(status.name, Text(status.state.value, style), address, Text(restarts, "yellow"))
    return table


def figures_table(progress: Progress) -> Table:
    """The figures of the last step."""
    metrics, ledger = progress.metrics, progress.ledger
    table = Table(box=None, padding=(0, 1), show_header=False)
    if progress.run.phase == RUN_PHASE_UNSPECIFIED:
        table.add_row("phase", "starting")  # of its services: there is no run yet
        return table
    table.add_row("phase", phase_name(progress.run.phase))
    table.add_row("step", f"{progress.step} of {progress.run.max_steps}")
    for name, label, form in (
        ("train/reward", "reward", ".3f"),
        ("train/loss", "loss", "+.5g"),
        ("train/learning_rate", "learning rate", ".1e"),
        ("train/mismatch_kl", "mismatch (KL)", ".1e"),
        ("train/reference_kl", "KL to the reference", ".1e"),
        ("train/entropy", "entropy", ".3f"),
        ("staleness/max", "staleness, steps", ".0f"),
        ("rollout/mean_length", "tokens per rollout", ".1f"),
        ("rollout/generation_time", "seconds per rollout", ".2f"),
        ("train/logprob_difference_max", "max |Δ log-prob|", ".1e"),
        ("time/step_s", "seconds per step", ".2f"),
    ):
        if name in metrics:
            table.add_row(label, f"{metrics[name]:{form}}")
        if name == "train/reward":
            for environment in sorted(environments("env", metrics)):
                for role, reward in agents("env", environment, metrics).items():
                    table.add_row(Text(f"  of {role} in {environment}"), f"{reward:{form}}")
    table.add_row("tokens per second", f"{progress.tokens_per_second:,.0f}")
    table.add_row(
        "ledger",
        f"{ledger.dispatched} = {ledger.trained} trained + {sum(ledger.discarded.values())} discarded"
        f" + {ledger.in_flight} in flight",
    )
    return table


class LiveScreen:
    """The screen, with the latest news below."""

    def __init__(self, console: Console | None = None) -> None:
        self._live = Live(
            console=console, refresh_per_second=REFRESH_PER_SECOND, transient=False, redirect_stderr=True
        )
        self._news: deque[str] = deque(maxlen=4)
        self._live.start()

    def event(self, event: WatchRunResponse, progress: Progress) -> None:
        """Keep what it says as news; steps are seen in the figures."""
        if event.WhichOneof("kind") in ("eval", "phase", "note") and (line := event_line(event, progress)):
            self.say(line)

    def tick(self, progress: Progress, services: Sequence[Status]) -> None:
        """Show how things stand now."""
        self._live.update(self.render(progress, services))

    def render(self, progress: Progress, services: Sequence[Status]) -> Group:
        """Everything on the screen."""
        # A line that is wider than the terminal is broken, and a curve with it.
        columns = max(1, min(CURVE_COLUMNS, self._live.console.width - BESIDE_CURVE))
        curve = reward_curve([value for _, value in progress.rewards], columns=columns)
        top = Table.grid(padding=(0, 2))
        top.add_row(figures_table(progress), services_table(services))
        samples = [
            Text.assemble((f"{one.reward:5.2f} ", "bold"), shown(prompt), (" → ", "dim"), shown(answer))
            for one in progress.completions
            for prompt, answer in [(one.prompt[-40:], one.answer[:80])]
        ]
        return Group(
            Panel(top, title=f"quartet · {progress.run.run_id}", title_align="left"),
            Panel(Text("\n".join(curve) or "no step yet", no_wrap=True), title="reward", title_align="left"),
            Panel(Group(*samples), title="completions", title_align="left"),
            Text("\n".join(self._news), "dim"),
        )

    def say(self, line: str) -> None:
        """Keep a line of news, of which the last four are on the screen."""
        self._news.append(shown(line))

    def close(self) -> None:
        """Leave the screen as it was last."""
        with only_shown(sys.stdout):
            self._live.stop()
