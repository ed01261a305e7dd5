"""What the orchestrator says of a script's prompts and functions that are other ones, as the script's own
process says it (quartet.trl.changed, quartet_orchestrator.sameness)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from quartet.run.config import RunConfig
from quartet.trl.changed import in_a_script
from quartet.v1 import envhost_service_pb2 as epb
from quartet_orchestrator.envhosts import Loaded
from quartet_orchestrator.outage import RunInterrupted
from quartet_orchestrator.requests import environment_ref
from quartet_orchestrator.sameness import Sameness

BEGAN: dict[str, Any] = {
    "api": "rewards",
    "version": "1",
    "digest": "aaaa",
    "examples_digest": "e1",
    "train_size": 20,
    "eval_size": 20,
    "rewards": ["length"],
}


async def said(change: dict[str, Any], on_change: str = "warn") -> str:
    """By the orchestrator, of an environment that it meets in the middle of a run."""
    config = RunConfig(
        model="m",
        env=[{"id": "reward-service", "args": {"address": "unix:/a"}}],
        max_steps=2,
        on_environment_change=on_change,
    )
    notes: list[str] = []
    book = SimpleNamespace(
        state=SimpleNamespace(described=[epb.EnvironmentInfo(**BEGAN)], met={}),
        meet=lambda places, found, host, note: notes.append(note.message),
    )
    now = epb.EnvironmentInfo(**{**BEGAN, "digest": "bbbb", **change})

    async def describe(*_: Any) -> epb.EnvironmentInfo:
        return now

    sameness = Sameness(book, config, describe)  # type: ignore[arg-type]
    await sameness.met(environment_ref(config.env[0]), Loaded("127.0.0.1:50054", "bbbb"))
    (note,) = notes
    return note


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"examples_digest": "e2"}, "train_dataset or eval_dataset"),
        (
            {"examples_digest": "e2", "train_size": 21, "eval_size": 5},
            "train_dataset or eval_dataset (20 rows -> 21)",
        ),
        ({"rewards": ["other"]}, "reward_funcs (length -> other)"),
        (
            {"version": "2", "examples_digest": "e2", "rewards": ["other"]},
            "version 1 -> 2, train_dataset or eval_dataset, reward_funcs (length -> other)",
        ),
        ({}, "train_dataset or eval_dataset or reward_funcs or tools"),
    ],
)
async def test_what_changed_is_what_the_script_gave(change: dict[str, Any], what: str) -> None:
    told = in_a_script(await said(change), ["train_dataset", "eval_dataset"], ["reward_funcs", "tools"])
    assert told == (
        f"changed since the run began: {what}; rewards from here on may mean something else than those "
        "before; the run goes on"
    )


async def test_what_stops_a_run_is_in_these_words_too() -> None:
    with pytest.raises(RunInterrupted) as stopped:
        await said({"examples_digest": "e2"}, "stop")
    told = in_a_script(f"the run is stopped: {stopped.value}", ["train_dataset"], ["reward_funcs"])
    assert told.startswith(
        "the run is stopped: changed since the run began: train_dataset; nothing of it was trained on (on_env"
    )


def test_other_lines_are_as_they_are() -> None:
    for line in ("environment 'gsm8k' at the host a is not what the run began with: digest a -> b", "step 3"):
        assert in_a_script(line, ["train_dataset"], []) == line
