"""`quartet sft`: which steps are shown, on a terminal and elsewhere."""

from __future__ import annotations

import io
import sys
import time

import pytest
from quartet.cli.sft.metrics import step_line
from quartet.cli.sft.shown import LINES, Lines, LiveLine, Remaining, display, duration
from quartet.v1.trainer_service_pb2 import ForwardBackwardResponse, OptimStepResponse
from rich.console import Console


class Clock:
    """A clock that stands still unless it is put on."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.split(" s  ", 1)[1] for line in capsys.readouterr().out.splitlines()]


def taken(lines: Lines, clock: Clock, steps: int, seconds: float, first: int = 1) -> None:
    """All steps from the first one on, each of so many seconds."""
    for number in range(first, steps + 1):
        clock.now += seconds
        lines.step(number, f"step {number}", is_news=False)


def test_of_a_short_one_the_ends_are_told(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    taken(Lines(30), clock, 30, seconds=0.1)
    assert told(capsys) == ["step 1", "step 30"]


def test_slow_steps_are_told_each(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    taken(Lines(5), clock, 5, seconds=60)
    assert told(capsys) == [f"step {number}" for number in range(1, 6)]


@pytest.mark.parametrize("seconds", [0.01, 1.0, 3600.0])
def test_the_longest_is_told_in_a_hundred_lines(
    clock: Clock, capsys: pytest.CaptureFixture[str], seconds: float
) -> None:
    taken(Lines(20_000), clock, 20_000, seconds)
    lines = told(capsys)
    assert lines[0] == "step 1" and lines[-1] == "step 20000"
    assert (LINES if seconds >= 1 else 20) - 2 <= len(lines) <= LINES + 2


def test_what_is_gone_on_with_begins_with_a_line_and_news_are_never_left_out(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = Lines(1000)
    lines.waiting("the trainer loads the model")
    taken(lines, clock, 503, seconds=0.1, first=501)
    lines.step(504, "step 504  skipped", is_news=True)
    lines.say("validation")
    assert told(capsys) == ["the trainer loads the model", "step 501", "step 504  skipped", "validation"]


def test_the_live_line_is_one_and_news_stay_above_it(clock: Clock) -> None:
    out = io.StringIO()
    line = LiveLine(3, Console(file=out, force_terminal=True, width=60))
    line.waiting("the trainer loads the model")
    clock.now = 7.0
    line._live.refresh()
    line.step(1, "step 1/3  " + "x" * 80, is_news=False)
    line._live.refresh()
    line.say("validation after step 1/3 \x1b]0;title\x07")
    line.step(2, "step 2/3", is_news=False)
    line.step(3, "step 3/3", is_news=False)
    line.close()
    shown = out.getvalue()
    assert "   7.0 s  the trainer loads the model" in shown
    assert "x" * 39 + "…" in shown and "x" * 41 not in shown, "cut to the terminal"
    assert "\x1b]0;" not in shown, "no command to the terminal"
    *_, last = shown.split("\x1b[2K")
    assert "step 3/3" in shown and "step" not in last, "the live line is gone, the last step stays above"


def test_elsewhere_than_on_a_terminal_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(display(3, plain=False), Lines)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert isinstance(display(3, plain=True), Lines)
    live = display(3, plain=False)
    assert isinstance(live, LiveLine)
    live.close()


def test_what_is_left_is_foretold_by_the_steps_of_this_process(clock: Clock) -> None:
    remaining = Remaining(1000)
    clock.now = 500.0  # the model is loaded
    remaining.begun()
    for number in (401, 402):
        clock.now += 2.0
        said = remaining.after(number)
    assert said == "20 min"
    assert remaining.after(1000) == ""
    assert [duration(seconds) for seconds in (0.4, 99, 100, 5900, 6000, 90_000)] == [
        "0 s", "99 s", "2 min", "98 min", "1 h 40 min", "25 h 0 min",
    ]  # fmt: skip


def test_a_step_in_one_line() -> None:
    done = ForwardBackwardResponse(loss=0.51234, tokens=800)
    stepped = OptimStepResponse(learning_rate=1e-5, grad_norm=0.8123)
    line = "step 2/30  loss 0.5123  lr 1.0e-05  grad norm 0.812  400 tok/s"
    assert step_line(2, 30, done, stepped, 2.0) == line
    assert step_line(2, 30, done, stepped, 2.0, "20 min") == line.replace("2/30", "2/30, 20 min left")
