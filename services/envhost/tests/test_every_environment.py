"""Runs every_environment.py in the interpreter that has verifiers and the environments."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_every_environment_is_won_by_its_oracle_alone(envs_python: str) -> None:
    tests = Path(__file__).with_name("every_environment.py")
    command = [envs_python, "-m", "pytest", "-v", "--color=no", str(tests)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-4000:]
    environments = len(list(ROOT.glob("environments/*/pyproject.toml")))
    assert f"{environments + 1} passed" in done.stdout and "skipped" not in done.stdout
