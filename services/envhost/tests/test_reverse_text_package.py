"""Runs the tests of environments/reverse_text in the interpreter that has verifiers."""

from __future__ import annotations

import subprocess
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[3] / "environments/reverse_text"


def test_reverse_text_package(envs_python: str) -> None:
    command = [envs_python, "-m", "unittest", "discover", "-s", str(PACKAGE / "tests"), "-v"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Ran 0 tests" not in done.stderr and "skipped" not in done.stderr
