"""Programs that stand for SLURM's, and tell the file $CALLED how they were called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def programs_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs before all others on PATH; `called` is beside it."""
    programs = folder / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLED", str(folder / "called"))
    return programs


def program(programs: Path, name: str, body: str) -> None:
    """One of them, in bash."""
    file = programs / name
    file.write_text(f'#!/bin/bash\nprintf "%s\\n" "{name} $*" >>"$CALLED"\n{body}\n')
    file.chmod(0o755)
