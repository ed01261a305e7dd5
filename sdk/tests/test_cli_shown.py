"""What screens and the figure show of a run."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from quartet.cli import figure
from quartet.cli import progress as progressing
from quartet.cli.display import Plain, step_line
from quartet.cli.figure import write_reward_png, write_rewards_png
from quartet.cli.live import LiveScreen, reward_curve
from quartet.cli.progress import Progress
from quartet.local.supervisor import State, Status
from quartet.v1.orchestrator_service_pb2 import (
    WatchRunResponse,
)
from rich.console import Console
from run_history import STEPS, history


def test_figure_and_screens_show_the_run(tmp_path: Path) -> None:
    progress, text = Progress(), io.StringIO()
    plain = Plain(text)
    console = Console(file=io.StringIO(), force_terminal=True, width=120, height=60)
    screen = LiveScreen(console)
    services = [Status("trainer", "[fd00::1]:5", State.UP, restarts=1)]
    services += [Status("envhost", "127.0.0.1:6", State.BACKOFF, restarts=2, why="its port is in use")]
    for event in history():
        progress.apply(event)
        plain.event(event, progress)
        screen.event(event, progress)
    plain.tick(progress, services)
    for restarts in (0, 1):  # of another machine, whose services count anew once it came back
        plain.tick(progress, [Status("envhost", "127.0.0.1:6", State.UP, restarts=restarts)])
    console.print(screen.render(progress, services))
    screen.close()
    write_reward_png(progress, "r", tmp_path / "reward.png")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    lines = [line.partition(" s  ")[2] for line in text.getvalue().splitlines()]
    assert sum(line.startswith("step ") for line in lines) == STEPS
    assert "evaluation after 4 steps: reward 0.900" in lines
    assert "trainer died and is started again (restart 1)" in lines
    assert "envhost died and is started again (restart 2): its port is in use" in lines
    assert lines[-1] == "envhost died and is started again (restart 1)"
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[fd00::1]:5" in shown and "4 of 4" in shown and "1 restarts" in shown and "cba" in shown


def test_the_figure_of_many_evaluations_has_few_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: list[str] = []
    monkeypatch.setattr(Axes, "annotate", lambda axes, text, *_, **__: labels.append(text))
    progress = Progress(evals=[(step, step / 1000) for step in range(1000)])
    write_reward_png(progress, "r", tmp_path / "reward.png")
    assert len(labels) <= figure.MAX_LABELS and labels[0] == "1.00"
    labels.clear()
    write_reward_png(Progress(evals=progress.evals[:32]), "r", tmp_path / "reward.png")
    assert len(labels) == 32


def test_the_figures_axis_counts_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step may be several of the optimizer's."""
    axes: list[str] = []
    monkeypatch.setattr(Axes, "set_xlabel", lambda _, label, **__: axes.append(label))
    progress = Progress(rewards=[(1, 0.5)])
    write_reward_png(progress, "r", tmp_path / "reward.png")
    write_rewards_png({"r": progress}, tmp_path / "rewards.png")
    assert axes == ["steps", "steps"]


def test_of_a_mixture_a_step_has_the_reward_of_each_environment() -> None:
    progress = Progress()
    progress.add_step(3, {"train/reward": 0.6, "train/loss": 0.1, "env/a/reward": 0.3, "env/a/share": 0.5})
    assert "reward 0.600  loss" in step_line(progress), "of one it is the same"
    progress.metrics |= {"env/b/reward": 0.9}
    assert "reward 0.600  a 0.300  b 0.900  loss" in step_line(progress)


def test_the_completion_below_a_step_is_of_that_step() -> None:
    progress, text = Progress(), io.StringIO()
    plain = Plain(text)
    seen: set[str] = set()
    for event in history():
        progress.apply(event)
        plain.event(event, progress)
        if event.WhichOneof("kind") == "rollout" and event.rollout.step == 1:
            seen |= {m.content for m in event.rollout.rollout.messages if m.role == "user"}
    # Those of the next steps come before a step has ended.
    ahead = WatchRunResponse(event=progress.last_event + 1, at_ms=1)
    ahead.rollout.step = progress.step + 2
    for role, content in (("user", "early"), ("assistant", "ylrae"), ("assistant", "once more")):
        ahead.rollout.rollout.messages.add(role=role, content=content)
    progress.apply(ahead)
    shown = [line for line in text.getvalue().splitlines() if "completion: " in line]
    assert len(shown) == 1 and any(repr(prompt) in shown[0] for prompt in seen)
    one = progress.of_steps[progress.step + 2]
    assert (one.prompt, one.answer, one.whose) == ("early", "once more", " for all 2 turns")
    assert set(progress.of_steps) <= {progress.step, progress.step + 2}, "of steps that are over, one"


def test_a_run_that_others_began_is_shown_by_its_own_clock() -> None:
    progress, text = Progress(), io.StringIO()
    plain = Plain(text, submitted_at_ms=500)
    for event in history():
        progress.apply(event)
        plain.event(event, progress)
    seconds = [line.partition(" s  ")[0].strip() for line in text.getvalue().splitlines() if "step" in line]
    steps = [event for event in history() if event.WhichOneof("kind") in ("step", "eval")]
    assert seconds == [f"{event.event - 0.5:.1f}" for event in steps]
    plain.say("what is no event is not stamped by another clock")
    assert text.getvalue().splitlines()[-1] == " " * 10 + "what is no event is not stamped by another clock"


def test_tokens_per_second_over_a_window() -> None:
    progress = Progress()
    for event in history():
        progress.apply(event)
    assert progress.tokens_per_second == pytest.approx(
        5.0, rel=0.4
    )  # 5 tokens a second, one event in four is a step


def test_rollouts_that_end_together_took_their_time() -> None:
    progress = Progress()
    for member in range(8):
        event = WatchRunResponse(event=member + 1, at_ms=60_000 + member)
        event.rollout.rollout.usage.completion_tokens = 100
        event.rollout.rollout.timing.total_ms = 20_000
        progress.apply(event)
    assert progress.tokens_per_second == pytest.approx(40, rel=0.01)


@pytest.mark.parametrize("took_ms", [2_000, 60_000, 600_000])
def test_tokens_per_second_of_rollouts_side_by_side(took_ms: int) -> None:
    """One after the other, 16 at once: what is shown is what is sampled, however long one takes."""
    progress, at_once = Progress(), 16
    for number in range(10 * at_once):
        event = WatchRunResponse(event=number + 1, at_ms=10**9 + number * took_ms // at_once)
        event.rollout.rollout.usage.completion_tokens = 100
        event.rollout.rollout.timing.total_ms = took_ms
        progress.apply(event)
    assert progress.tokens_per_second == pytest.approx(at_once * 100 * 1000 / took_ms, rel=0.01)


@pytest.mark.parametrize("last_took_ms", [1_000, 7_200_000])
def test_one_rollout_of_hours_has_no_more_of_the_short_ones_counted_than_the_rate_takes(
    monkeypatch: pytest.MonkeyPatch, last_took_ms: int
) -> None:
    monkeypatch.setattr(progressing, "RATED_ROLLOUTS", 1_000)
    progress = Progress()
    for number in range(3_000):
        event = WatchRunResponse(event=number + 1, at_ms=10**9 + 20 * number)
        event.rollout.rollout.usage.completion_tokens = 100
        event.rollout.rollout.timing.total_ms = {0: 7_200_000, 2_999: last_took_ms}.get(number, 1_000)
        progress.apply(event)
    assert progress.tokens_per_second == pytest.approx(5_000, rel=0.01)
    assert len(progress._sampled) == 1_000


@pytest.mark.parametrize("width", [20, 50, 120])
def test_the_curve_fits_into_its_terminal(width: int) -> None:
    """A line too wide would be broken, and half of it be the next line of the curve."""
    progress, console = Progress(), Console(file=io.StringIO(), width=width, height=60)
    for step in range(64):
        progress.add_step(step + 1, {"train/reward": step})
    screen = LiveScreen(console)
    rendered = screen.render(progress, [])
    screen.close()
    with console.capture() as shown:
        console.print(rendered)
    drawn = [line for line in shown.get().splitlines() if set(line) & set("▁▂▃▄▅▆▇█")]
    assert len(drawn) == 8 and all(re.match(r"│ +\d+\.\d\d ", line) for line in drawn)


def test_curve_has_the_given_size_and_scale() -> None:
    lines = reward_curve([i / 199 for i in range(200)], rows=4, columns=50)
    assert len(lines) == 4
    assert all(len(line) == 6 + 50 for line in lines)
    assert lines[0].startswith(" 1.00") and lines[0].endswith("█")
    assert lines[-1][6] == " "
    assert reward_curve([]) == []


def test_what_drawing_imports_can_be_imported_ahead(tmp_path: Path) -> None:
    code = """
import sys, quartet.cli.figure as figure
from pathlib import Path
from quartet.cli.progress import Progress
figure.import_drawing()
before = set(sys.modules)
figure.write_reward_png(Progress(), "r", Path(sys.argv[1]))
print(*{name.partition(".")[0] for name in set(sys.modules) - before})
"""
    command = [sys.executable, "-c", code, str(tmp_path / "reward.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"PIL"}, "formats of pictures"
