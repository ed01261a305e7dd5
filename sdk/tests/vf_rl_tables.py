"""Files of vf-rl for tests, as tables, and what a run has of them."""

from __future__ import annotations

from typing import Any

from quartet.config.load import validate
from quartet.run.config import RunConfig
from quartet.run.vf_rl import translate


def tables(**args: Any) -> dict[str, Any]:
    """A file that says as little as it may."""
    return {
        "model": "m",
        "env": {"id": "reverse-text"},
        "inference": {"gpus": 1},
        "trainer": {"gpus": 1, "args": args},
    }


def run_of(given: dict[str, Any], **how: Any) -> RunConfig:
    return validate(RunConfig, translate(given, **how).tables)


def value_at(config: RunConfig, path: str) -> Any:
    node: Any = config
    for part in path.split("."):
        if isinstance(node, tuple):
            node = node[int(part)]
        else:
            node = node.get(part) if isinstance(node, dict) else getattr(node, part)
    return node
