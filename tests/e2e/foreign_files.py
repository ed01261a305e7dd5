"""What the tests of other trainers' files share: such a file trains, and what its run wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.e2e.conftest import quartet

STEPS = 3


def trained(folder: Path, text: str, model: Path) -> tuple[Path, str]:
    """Output folder of a short run of the file, and what was said of it."""
    file, output = folder / "theirs.toml", folder / "run"
    file.write_text(text.format(model=model, output=output))
    # The engine by name: one that is installed beside would take its minutes to start.
    done = quartet("rl", "@", file, "--max-steps", str(STEPS), "--inference.engine", "embedded")
    assert done.returncode == 0, done.stdout + done.stderr
    return output, done.stderr


def steps_of(output: Path) -> list[dict[str, Any]]:
    """The rows of its steps."""
    return _rows(output, "train/loss")


def evaluations_of(output: Path) -> list[dict[str, Any]]:
    """The rows of its evaluations."""
    return _rows(output, "eval/coverage")


def _rows(output: Path, name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if name in row]
