"""`quartet env check`: what whoever waits is told, on a terminal and elsewhere."""

from __future__ import annotations

import io
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from quartet.cli.env import checking, under_way
from quartet.cli.env.checking import play_by_model
from quartet.cli.env.under_way import UnderWay, telling
from quartet.cli.eval.config import EvalFileConfig, OneEvalConfig
from quartet.config import validate
from quartet.v1.rollout_pb2 import FAILURE_KIND_SCORER, Rollout, RolloutFailure, Task


def test_a_line_says_what_is_done_and_how_far(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    one = UnderWay("loading my-env")
    now = 112.0
    assert one.line == "  12.0 s  loading my-env"
    one.doing("playing the oracle", rollouts=5)
    assert one.line == "  12.0 s  playing the oracle: 0 of 5 rollouts"
    for failed in (False, True, False):
        one.ended(failed=failed)
    assert one.line == "  12.0 s  playing the oracle: 3 of 5 rollouts, 1 failed"
    one.doing("playing a wrong answer", rollouts=5)
    assert one.line.endswith("a wrong answer: 0 of 5 rollouts")


def test_elsewhere_than_on_a_terminal_nothing_is_said_of_what_goes_fast(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with telling(UnderWay("loading my-env")):
        pass
    assert capsys.readouterr() == ("", "")


def test_elsewhere_lines_become_rarer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited, three = list[float](), threading.Event()

    class Over:
        """Each wait but the last is over at once, as where nothing ends."""

        set = three.set

        def wait(self, seconds: float) -> bool:
            waited.append(seconds)
            return len(waited) > 3 and three.wait(60)

    monkeypatch.setattr(under_way, "threading", SimpleNamespace(Event=Over, Thread=threading.Thread))
    with telling(UnderWay("loading my-env")):
        while len(waited) <= 3:
            time.sleep(0.01)
    first = under_way.FIRST_SECONDS
    assert waited == [first, 2 * first, 4 * first, 8 * first]
    out, err = capsys.readouterr()
    assert out == "" and [line.split(" s  ")[1] for line in err.splitlines()] == ["loading my-env"] * 3


def test_on_a_terminal_it_is_one_line_that_goes_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    for name in ("NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    one = UnderWay("loading \x1b]0;my-env\x07")
    with telling(one):
        time.sleep(0.1)
        print("a result")
    said = terminal.getvalue()
    assert "loading" in said and "\x1b]0;" not in said and said.endswith("\x1b[2K")
    assert capsys.readouterr().out == "a result\n", "what is on stdout stays there"


async def test_every_rollout_that_ends_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tasks = [Task(index=index) for index in range(3)]

    async def tasks_of(host: object, trial: object) -> list[Task]:
        return tasks

    async def play(
        host: object, trial: object, wanted: object, given: list[Task], note, policy: object
    ) -> None:
        for task in given:
            failure = RolloutFailure(kind=FAILURE_KIND_SCORER) if task.index else None
            note(task, Rollout(failure=failure))
            lines.append(one.line.split(" s  ")[1])

    monkeypatch.setattr(checking, "tasks_of", tasks_of)
    monkeypatch.setattr(checking, "play", play)
    file = EvalFileConfig(
        model="m", rollouts_per_example=1, eval=(validate(OneEvalConfig, {"id": "my-env"}),)
    )
    one, lines = UnderWay("loading my-env"), list[str]()
    (played,) = await play_by_model(None, file.trials[0], None, "m", one)
    assert len(played.rollouts) == 3
    assert lines == [
        "playing m: 1 of 3 rollouts",
        "playing m: 2 of 3 rollouts, 1 failed",
        "playing m: 3 of 3 rollouts, 2 failed",
    ]
