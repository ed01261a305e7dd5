"""How a service's command begins (quartet.config.main): what runs, what is printed, with which exit code."""

from __future__ import annotations

import asyncio
import json

import pytest
from quartet.config import Config, ConfigError, main


class Inner(Config):
    drain_seconds: float = 5.0


class Outer(Config):
    max_steps: int
    server: Inner = Inner()


def test_main_runs_and_returns_zero() -> None:
    seen: list[int] = []
    assert main(Outer, lambda config: seen.append(config.max_steps), ["--max-steps=4"]) == 0
    assert seen == [4]


def test_main_dry_run_prints_json_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def run(_config: Outer) -> None:
        raise AssertionError("ran")

    assert main(Outer, run, ["--dry-run", "--max-steps=4"]) == 0
    assert json.loads(capsys.readouterr().out)["max_steps"] == 4


def test_main_refuses_with_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(Outer, lambda _config: None, ["--max-steps=x", "--dry-run"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: max_steps = 'x'") and captured.err.count("\n") == 1


def test_main_finds_a_refusal_inside_a_task_group(capsys: pytest.CaptureFixture[str]) -> None:
    async def refuse() -> None:
        raise ConfigError("the port is in use")

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(refuse())

    assert main(Outer, lambda _config: asyncio.run(work()), ["--max-steps=1"]) == 2
    assert capsys.readouterr().err == "error: the port is in use\n"


def test_main_does_not_hide_other_errors() -> None:
    def run(_config: Outer) -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        main(Outer, run, ["--max-steps=1"])


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(Outer, lambda _config: None, ["--help"]) == 0
    out = capsys.readouterr().out
    assert "--max_steps" in out and "--server.drain_seconds = 5.0" in out
