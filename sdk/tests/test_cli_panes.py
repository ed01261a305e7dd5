"""A pane for each service's log, in a tmux server of the test's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from quartet.cli import panes

NAMES = ["envhost", "inference-1", "inference-2", "orchestrator", "trainer"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    logs = tmp_path / "a run.1" / "logs"
    logs.mkdir(parents=True)
    for name in NAMES:
        (logs / f"{name}.log").write_text(f"here is {name}\n")
    return logs.parent


def refused(*arguments: str, path: str = os.environ["PATH"]) -> str:
    command = [sys.executable, "-m", "quartet.cli", "panes", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PATH": path}, timeout=60
    )
    assert done.returncode == 2, done
    return done.stderr


def test_a_folder_without_logs_and_a_machine_without_tmux_are_refused(folder: Path, tmp_path: Path) -> None:
    assert "has no logs/*.log" in refused(str(tmp_path))
    assert "tmux is not installed; install it, or: tail -F" in refused(str(folder), path=str(tmp_path))


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_where_there_is_no_terminal_that_is_said_in_our_words(folder: Path) -> None:
    assert "panes are for a terminal, and there is none; or: tail -F" in refused(str(folder))


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_each_log_has_a_pane_that_follows_it(folder: Path, tmp_path: Path) -> None:
    server = [str(shutil.which("tmux")), "-S", str(tmp_path / "socket")]
    logs = sorted((folder / "logs").glob("*.log"))
    begun = panes.window(folder, logs, inside=False)
    assert begun[0] == "new-session"
    environment = {name: value for name, value in os.environ.items() if name != "TMUX"}

    def tmux(*arguments: str) -> str:
        done = subprocess.run(
            [*server, *arguments], capture_output=True, text=True, env=environment, timeout=30
        )
        assert done.returncode == 0, done
        return done.stdout

    try:
        tmux("new-session", "-d", "-x", "200", "-y", "50", *begun[1:])
        titles = tmux("list-panes", "-F", "#{pane_id} #{pane_title}").splitlines()
        assert sorted(line.partition(" ")[2] for line in titles) == NAMES
        assert tmux("display-message", "-p", "#{session_name}").strip() == "quartet-a-run-1"
        (trainer,) = [line.split()[0] for line in titles if line.endswith("trainer")]
        with (folder / "logs" / "trainer.log").open("a") as log:
            log.write("and goes on\n")
        deadline = time.monotonic() + 20
        while "and goes on" not in tmux("capture-pane", "-p", "-t", trainer):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert "here is trainer" in tmux("capture-pane", "-p", "-t", trainer)
    finally:
        tmux("kill-server")


def test_inside_of_tmux_it_is_a_window(folder: Path) -> None:
    begun = panes.window(folder, [folder / "logs" / "trainer.log"], inside=True)
    assert begun[:3] == ["new-window", "-n", "quartet-a-run-1"]
