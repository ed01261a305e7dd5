"""The command that starts a tool server sooner, with modules that say how they were started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from quartet_envhost.garbage import GC_THRESHOLDS
from quartet_envhost.v1.tool_server import soon

#: A server's package: its module is imported with the package, as Verifiers' users write it, and then run.
DESK = "import desk.server\n"
SERVER = """
import gc, json, os, sys
main = sys.modules["__main__"]
if __name__ == "__main__":
    print(json.dumps({
        "argv": sys.argv, "path": sys.path, "folder": os.getcwd(), "flags": str(sys.flags),
        "main": [main.__spec__.name, main.__package__, main.__file__, main is not sys.modules["desk.server"]],
        "imported": sorted(name for name in sys.modules if name.startswith("desk")),
        "thresholds": gc.get_threshold(), "numpy": "numpy" in sys.modules,
    }))
    raise SystemExit(7)
"""


def told(command: list[str], folder: Path) -> dict[str, Any]:
    """What the server says of itself, by this command."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env={**os.environ, "HOME": "/"}
    )
    assert done.returncode == 7, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_promise_1_a_server_runs_as_by_the_command_of_verifiers(tmp_path: Path) -> None:
    """But for the garbage collector, and nothing large is there before its own imports."""
    (tmp_path / "desk").mkdir()
    (tmp_path / "desk/__init__.py").write_text(DESK)
    (tmp_path / "desk/server.py").write_text(SERVER)
    command = [sys.executable, "-m", "desk.server", "--more", "of it"]
    assert soon(command) != command
    plain, sooner = told(command, tmp_path), told(soon(command), tmp_path)
    assert sooner.pop("thresholds") == list(GC_THRESHOLDS) != plain.pop("thresholds")
    assert sooner == plain and not plain["numpy"]


def test_other_commands_are_left_alone() -> None:
    for command in (
        ["sh", "-c", "python -m desk"],
        [sys.executable, "server.py"],
        ["/other/python", "-m", "desk"],
    ):
        assert soon(command) == command
