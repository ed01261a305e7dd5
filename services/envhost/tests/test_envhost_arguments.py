"""What is said of an argument that an environment does not take."""

from __future__ import annotations

import pytest
from quartet_envhost.arguments import not_taken


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        # Of an orchestrator's file of prime-rl, which has these among the environment's arguments.
        ("max_concurrent", "it is a key of the run, at the top of its file"),
        ("rollouts_per_example", "it is a key of the run, at the top of its file"),
        ("temperature", "it is a key of [sampling]"),
        ("weight", "it is a key of [[env]], beside 'args'"),
        ("max_turn", "did you mean 'max_turns'?"),
        ("colour", "it takes max_concurrent_agents, max_turns"),
    ],
)
def test_a_key_of_the_run_is_said_to_be_one(name: str, remedy: str) -> None:
    error = not_taken("toy", name, {"max_turns", "max_concurrent_agents"})
    assert error.reason == "INVALID_CONFIG" and error.metadata["key"] == f"args.{name}"
    assert error.message == f"environment 'toy' takes no argument {name!r}; {remedy}"
