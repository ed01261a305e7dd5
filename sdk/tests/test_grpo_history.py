"""What a script reads and prints of its run: log_history, and lines with conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quartet.cli.progress import Progress
from quartet.grpo.history import OF_VERIFIERS
from quartet.grpo.lines import Lines
from quartet.grpo.translate import Logging
from quartet.scripts.outcome import metrics_rows
from quartet.v1.orchestrator_service_pb2 import WatchRunResponse


def step(number: int, reward: float, **more: float) -> dict[str, Any]:
    return {
        "step": number,
        "train/reward": reward,
        "train/loss": -reward,
        "train/learning_rate": number / 10,
        **{key.replace("__", "/"): value for key, value in more.items()},
    }


ROWS = [
    {"step": 0, "eval/reward": 0.25, "eval/reward_std": 0.1, "policy_version": 0},
    step(1, 1.0, train__reference_kl=0.0, rewards__exact=1.0),
    step(2, 2.0, train__reference_kl=1.0),
    step(3, 4.0, train__reference_kl=3.0),
    step(4, 6.0, train__reference_kl=5.0),
    step(5, 9.0),
]


def test_a_row_is_the_mean_since_the_one_before() -> None:
    history = OF_VERIFIERS.of(ROWS, 3, Logging(2))
    assert history == [
        {"step": 0, "eval_reward": 0.25, "eval_reward_std": 0.1},
        {"step": 6, "reward": 1.5, "loss": -1.5, "kl": 0.5, "learning_rate": 0.2, "rewards/exact": 1.0},
        {"step": 12, "reward": 5.0, "loss": -5.0, "kl": 4.0, "learning_rate": 0.4},
    ]
    first = [row["step"] for row in OF_VERIFIERS.of(ROWS, 1, Logging(2, first=True))]
    assert first == [0, 1, 2, 4]
    assert [row["step"] for row in OF_VERIFIERS.of(ROWS, 1, Logging(0))] == [0]


def test_a_line_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert metrics_rows(tmp_path) == []
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + '{"step": 6, "train/rew')
    assert metrics_rows(tmp_path) == ROWS
    # As who reports the run reads them: a line that a disk has damaged is passed over.
    file.write_bytes(b"\0\0\0\xff\n" + file.read_bytes())
    assert metrics_rows(tmp_path) == ROWS


def event(number: int, step: int, reward: float | None = None, prompt: str = "") -> WatchRunResponse:
    """A rollout of a step, or the step."""
    made = WatchRunResponse(event=number, at_ms=number)
    if reward is None:
        made.step.step = step
        made.step.metrics["train/reward"] = 0.5
        return made
    made.rollout.step = step
    made.rollout.rollout.reward = reward
    made.rollout.rollout.messages.add(role="user", content=prompt)
    made.rollout.rollout.messages.add(role="assistant", content=f"to {prompt}")
    return made


def test_conversations_are_printed_with_the_line_of_their_own_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines, progress = Lines(Logging(2, completions=1)), Progress()
    events = [
        event(1, 1, 0.1, "one"),
        event(2, 2, 0.2, "two"),  # the next step is sampled before this one is trained
        event(3, 1),
        event(4, 2, 0.3, "more"),
        event(5, 3, 0.4, "three"),
        event(6, 2),
    ]
    for one in events:
        assert progress.apply(one)
        lines.event(one, progress)
    shown = [line[line.index("s  ") + 3 :] for line in capsys.readouterr().out.splitlines()]
    assert [line.split("  ")[0] for line in shown if line.startswith("step")] == ["step 2/0"]
    assert shown[1:] == ["  reward 0.200  'two' -> 'to two'"]


@pytest.mark.parametrize("asked", [0, 2])
def test_no_more_conversations_are_printed_than_are_asked_for(
    asked: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the first step, too, after which `quartet rl` prints one by itself."""
    lines, progress = Lines(Logging(1, completions=asked)), Progress()
    for one in [*(event(number, 1, 0.1, "a") for number in (1, 2, 3)), event(4, 1)]:
        assert progress.apply(one)
        lines.event(one, progress)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 1 + asked and sum("to a" in line for line in shown) == asked


def test_a_line_stands_for_the_steps_since_the_one_before(capsys: pytest.CaptureFixture[str]) -> None:
    lines, progress = Lines(Logging(2)), Progress()
    for number in (1, 2, 3, 4):
        one = event(number, number)
        of_step = {"train/reward": number / 10, "staleness/max": number % 2, "train/learning_rate": number}
        one.step.metrics.update(of_step)
        assert progress.apply(one)
        lines.event(one, progress)
    shown = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    assert [line[-6:-2] for line in shown] == [
        ["step 2/0", "reward 0.150", "lr 2.0e+00", "staleness 1"],
        ["step 4/0", "reward 0.350", "lr 4.0e+00", "staleness 1"],
    ]
