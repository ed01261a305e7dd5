"""What end-to-end and fault tests share: one tiny model, made once per session by the real command, and the
launcher.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
