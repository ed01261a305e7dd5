"""The Makefile where something came in between: what was left half made is made whole by the next call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def test_an_interpreter_that_was_left_half_made_is_made_whole_and_a_whole_one_left(tmp_path: Path) -> None:
    """`python3 -m venv` that fails to bring pip, or is broken off, leaves a Python without it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "here"], check=True)
    rule = "mend: ; $(call venv,here)"
    made = []
    for _ in range(2):
        subprocess.run(
            ["make", "-f", REPOSITORY / "Makefile", "--eval", rule, "mend"], cwd=tmp_path, check=True
        )
        subprocess.run([tmp_path / "here/bin/python", "-m", "pip", "--version"], check=True)
        made.append((tmp_path / "here/pyvenv.cfg").stat().st_mtime_ns)
    assert made[0] == made[1]
