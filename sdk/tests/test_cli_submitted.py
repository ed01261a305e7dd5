"""A run that is handed over to an orchestrator of another release, which does not know all of its keys."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from forked_command import quartet
from kept_runs import Orchestrator, serving
from quartet.cli import submitted
from quartet.config import ConfigError
from quartet.run.config import parse_run
from quartet.v1 import orchestrator_service_pb2 as pb

RUN_TOML = 'model = "m"\nmax_steps = 3\n[[env]]\nid = "reverse-text"\n[[env]]\nid = "gsm8k"\nname = "g"\n'


class Earlier(Orchestrator):
    """An orchestrator of a release that has no such keys."""

    def __init__(self, *unknown: str) -> None:
        super().__init__()
        self.unknown = unknown
        self.asked = 0

    async def SubmitRun(self, request: pb.SubmitRunRequest, context: object) -> pb.SubmitRunResponse:
        self.asked += 1
        table = tomllib.loads(request.config_toml)
        for key in self.unknown:
            if _has(table, key.split(".")):
                said = f"unknown key {key!r}; known keys here: model\n  also: unknown key 'another'"
                raise ConfigError(said, key=key)
        return await super().SubmitRun(request, context)


def _has(table: Any, key: list[str]) -> bool:
    for part in key:
        if part not in (table if isinstance(table, dict) else map(str, range(len(table)))):
            return False
        table = table[part if isinstance(table, dict) else int(part)]
    return True


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(RUN_TOML)
    return file


async def test_what_an_earlier_release_does_not_know_and_nobody_changed_is_left_out(run_file: Path) -> None:
    """submitted.py 1 and 2: a table, a key of a table, and one of an environment in a list."""
    earlier = Earlier("min_lr", "difficulty_filter", "env.1.weight", "eval.before")
    async with serving(earlier) as address:
        at = ["--orchestrator", address, "--run-id", "r"]
        code, printed = await quartet("submit", "@", str(run_file), *at)
    told, line = printed.splitlines()
    assert (code, line, earlier.asked) == (0, "r  pending  step 0/3", 5)
    assert told.startswith("left out, as the orchestrator is of another release and does not know it: ")
    for said in ("min_lr = 0.0", "difficulty_filter = {", "env.1.weight = 1.0", "eval.before = true"):
        assert said in told
    sent = tomllib.loads(earlier.runs["r"].config_toml)
    assert "min_lr" not in sent and "weight" not in sent["env"][1] and sent["env"][0]["weight"] == 1.0
    assert parse_run(earlier.runs["r"].config_toml) == parse_run(RUN_TOML), "nothing else is missing"
    assert sent["warmup_steps"] == 0, "a default that is known stays written down"


async def test_what_an_earlier_release_does_not_know_and_somebody_asks_for_is_refused(run_file: Path) -> None:
    """submitted.py 2."""
    earlier = Earlier("min_lr")
    async with serving(earlier) as address:
        at = ["--orchestrator", address, "--run-id", "r"]
        more = ["--min-lr", "1e-7", "--lr-scheduler", "cosine"]
        code, printed = await quartet("submit", "@", str(run_file), *at, *more)
    assert code in (1, 2) and earlier.runs == {} and earlier.asked == 1
    assert "unknown key 'min_lr'" in printed
    assert "that is the orchestrator's word, whose release is another than this" in printed


async def test_what_never_was_sent_is_not_left_out_again_and_again(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An orchestrator that goes on refusing what it does not get any more."""

    class Stubborn(Orchestrator):
        asked = 0

        async def SubmitRun(self, request: pb.SubmitRunRequest, context: object) -> pb.SubmitRunResponse:
            self.asked += 1
            raise ConfigError("unknown key 'min_lr'; known keys here: model", key="min_lr")

    assert submitted.MAX_LEFT_OUT < 100
    stubborn = Stubborn()
    async with serving(stubborn) as address:
        code, printed = await quartet("submit", "@", str(run_file), "--orchestrator", address)
    assert code in (1, 2) and "unknown key 'min_lr'" in printed and stubborn.asked == 2
