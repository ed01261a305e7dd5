"""What end-to-end and fault tests share: one tiny model, made once per session by the real command, the
launcher, and what it leaves.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
QUARTET = [sys.executable, "-m", "quartet.cli"]
MODEL_SECONDS = 600  # a loaded machine takes up to ten times the usual 40 s


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model, trained through the trainer service by `quartet model tiny`."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    command = [*QUARTET, "model", "tiny", str(folder), "--seed", "0"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=MODEL_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def summary_of(output: Path) -> dict[str, Any]:
    """What a run that has ended left in its folder."""
    loaded: dict[str, Any] = json.loads((output / "summary.json").read_text())
    return loaded
