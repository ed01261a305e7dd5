"""`quartet rollouts`: which conversations of a folder it shows, and how."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from quartet.cli.__main__ import main
from quartet.cli.outputs import Outputs, append_line
from quartet.v1.common_pb2 import Message
from quartet.v1.orchestrator_service_pb2 import (
    EvalEvent,
    GroupFate,
    RolloutEvent,
    StepEvent,
    WatchRunResponse,
)
from quartet.v1.rollout_pb2 import FAILURE_KIND_SCORER, Rollout


def rollout(step: int | None, group: int, reward: float, env: str = "one", **more: Any) -> RolloutEvent:
    said = [Message(role="user", content=f"q{group}"), Message(role="assistant", content=f"a{group}")]
    event = RolloutEvent(group=group, env_id=env, task_index=group, step=step)
    event.rollout.CopyFrom(Rollout(**{"reward": reward, "messages": said, "num_turns": 1, **more}))
    return event


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An evaluation, an applied step, and one that is under way."""
    monkeypatch.chdir(tmp_path)
    outputs = Outputs(tmp_path / "outputs" / "first")
    failed = rollout(2, 9, 0.0, messages=[])
    failed.rollout.failure.kind = FAILURE_KIND_SCORER
    failed.rollout.failure.message = "it raised"
    kinds: list[dict[str, Any]] = [
        {"rollout": rollout(None, 0, 0.5)},
        {"eval": EvalEvent(step=0)},
        {"rollout": rollout(1, 1, 0.25)},
        {"rollout": rollout(1, 2, 1.0, "two")},
        {"rollout": rollout(1, 3, 0.75)},
        {"rollout": rollout(1, 3, 0.5, member=1, messages=[])},
        {"rollout": failed},
        {
            "step": StepEvent(
                step=1,
                groups=[
                    GroupFate(group=1, members=[0], advantages=[0.5]),
                    GroupFate(group=2, members=[0], advantages=[-0.5]),
                    GroupFate(group=3, discarded="stale"),
                ],
            )
        },
        {"rollout": rollout(2, 8, 0.0)},
    ]
    for number, kind in enumerate(kinds, start=1):
        outputs.record(WatchRunResponse(event=number, **kind))
    return outputs.folder


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The answers, in their order."""
    assert main(["rollouts", *arguments]) == 0
    return [line.rpartition(" ")[2] for line in capsys.readouterr().out.splitlines() if "assistant:" in line]


@pytest.mark.parametrize(
    ("arguments", "answers"),
    [
        ([], ["a1", "a2", "a3"]),
        (["--step", "2"], ["a8"]),
        (["--eval"], ["a0"]),
        (["--sort", "reward"], ["a2", "a3", "a1"]),
        (["--sort", "reward", "--lowest", "-n", "2"], ["a1", "a3"]),
        (["--sort", "advantage"], ["a1", "a2", "a3"]),
        (["--sort", "advantage", "--lowest"], ["a2", "a1", "a3"]),
        (["--env", "two"], ["a2"]),
    ],
)
def test_what_is_asked_for_is_shown(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], answers: list[str]
) -> None:
    """rollouts.py 2 and 3: the newest step is the one that was applied, though a later one has rollouts."""
    assert shown(capsys, str(folder), *arguments) == answers
    assert shown(capsys, "first", *arguments) == answers, "by its name in outputs/"


def test_a_group_is_shown_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollouts", str(folder), "--step", "1", "--group", "3"]) == 0
    told = capsys.readouterr()
    numbers = [line.partition("  advantage")[0] for line in told.out.splitlines() if line.startswith("==")]
    assert [("group 3  member 0" in numbers[0], "group 3  member 1" in numbers[1]), len(numbers)] == [
        (True, True),
        2,
    ]
    assert "2 shown of step 1, which has 2 rollouts, 1 of them with their conversation" in told.err
    assert main(["rollouts", str(folder), "--step", "1", "--group", "7"]) == 2
    assert "--group 7 is refused: there are groups 1, 2, 3; name one of them" in capsys.readouterr().err


def test_a_rollout_is_told_in_numbers_and_the_rest_on_stderr(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollouts", "first"]) == 0
    told = capsys.readouterr()
    heads = [line for line in told.out.splitlines() if line.startswith("==")]
    assert heads[0].startswith(
        "== env one  task 1  group 1  member 0  reward 0.250  advantage +0.500  tokens 0"
    )
    assert heads[2].endswith("not trained on: stale")
    assert told.err == (
        "3 shown of step 1, which has 4 rollouts, 3 of them with their conversation (messages_of_members)\n"
    )
    assert main(["rollouts", "first", "--json", "-n", "1", "--sort", "reward"]) == 0
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    lines = (folder / "rollouts" / "step_0001.jsonl").read_text().splitlines()
    assert row == json.loads(lines[1]) and row["advantage"] == -0.5


def test_where_nothing_has_its_conversation_the_numbers_are_shown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "rollouts" / "step_0002.jsonl"
    file.write_text("".join(line for line in file.read_text().splitlines(keepends=True) if "a8" not in line))
    with file.open("a") as torn:
        torn.write('{"event": 10')  # being written
    assert main(["rollouts", "first", "--step", "2"]) == 0
    told = capsys.readouterr()
    assert "not trained on: failed:SCORER\nfailed: it raised\n" in told.out
    assert "1 shown of step 2, which has 1 rollout, 0 of them" in told.err
    assert file.read_text().endswith('{"event": 10'), "nothing in the folder is touched"


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["nothing"], "nothing has no rollouts/, nor is there outputs/nothing/rollouts"),
        (["first", "--step", "3"], "has steps of 1, 2; name one of them"),
        (["first", "--env", "three"], "it has no rollouts there, which are of one, two"),
        (["first", "-n", "0"], "-n 0 is refused"),
        (["first", "--lowest"], "add that, of advantage, length, reward"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], refusal: str
) -> None:
    assert main(["rollouts", *arguments]) == 2
    assert refusal in capsys.readouterr().err


def test_messages_are_told_by_role_with_thoughts_and_calls_cut_and_harmless(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """rollouts.py 4"""
    call = json.dumps({"id": "c", "name": "search", "arguments": '{"query": "abc"}'})
    said = [
        {"role": "user", "content": "x" * 2_500},
        {"role": "assistant", "content": "", "reasoning_content": "a tool knows", "tool_calls": [call]},
        {"role": "tool", "name": "search", "tool_call_id": "c", "content": "\x1b[2Jgone"},
        {"role": "assistant", "content": "", "tool_calls": []},
    ]
    file = folder / "rollouts" / "step_0007.jsonl"
    append_line(file, {"env": "one", "step": 7, "reward": 1.0, "truncated": True, "messages": said})
    assert main(["rollouts", "first", "--step", "7"]) == 0
    cut = capsys.readouterr().out
    assert f"user: {'x' * 2_000}… (500 more letters: --full)\n" in cut
    assert 'assistant (thinks): a tool knows\nassistant calls: search({"query": "abc"})\n' in cut
    assert "tool search: \\x1b[2Jgone\nassistant: \n" in cut and "\x1b" not in cut
    assert cut.startswith("== env one  reward 1.000  cut by a limit\n")
    assert main(["rollouts", "first", "--step", "7", "--full"]) == 0
    assert f"user: {'x' * 2_500}\n" in capsys.readouterr().out


def test_a_terminal_gets_bold_and_what_is_none_gets_none(folder: Path) -> None:
    """rollouts.py 4: by a terminal as the system has it."""
    command = [sys.executable, "-m", "quartet.cli", "rollouts", str(folder), "-n", "1"]
    plain = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "\x1b" not in plain.stdout and "user: q1" in plain.stdout
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environment) as process:
        os.close(theirs)
        told = b""
        while chunk := _read(ours):
            told += chunk
    os.close(ours)
    assert process.returncode == 0 and b"\x1b[1muser\x1b[0m: q1" in told


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the other side was closed
        return b""
