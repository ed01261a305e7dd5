"""What the tests of the dialect of prime-rl share: a file that says little, and what it becomes."""

from __future__ import annotations

import tomllib
from typing import Any

from quartet.config.load import validate
from quartet.run.config import RunConfig
from quartet.run.prime_rl import translate
from vf_rl_tables import value_at

#: A file that says as little as a run may.
LEAST = """
max_steps = 20
[model]
name = "m"
[orchestrator]
group_size = 8
[[orchestrator.train.source]]
env.taskset.id = "reverse-text"
env.agent.harness.id = "null"
"""


SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def tables(more: str = "", least: str = LEAST) -> dict[str, Any]:
    """A file's, with more beside it: lines of `key = value` by dotted keys."""
    given = tomllib.loads(least)
    for line in filter(None, map(str.strip, more.splitlines())):
        path, value = dotted(tomllib.loads(line))
        table = given
        for part in path[:-1]:
            table = table.setdefault(part, {})
        table[path[-1]] = value
    return given


def dotted(table: dict[str, Any], prefix: tuple[str, ...] = ()) -> tuple[tuple[str, ...], Any]:
    """Of tables with one key each."""
    ((key, value),) = table.items()
    deeper = isinstance(value, dict) and len(value) == 1
    return dotted(value, (*prefix, key)) if deeper else ((*prefix, key), value)


def run_of(given: dict[str, Any], **how: Any) -> RunConfig:
    return validate(RunConfig, translate(given, **how).tables)


def values(config: RunConfig, expected: dict[str, Any]) -> dict[str, Any]:
    return {path: value_at(config, path) for path in expected}
