"""What a service takes where its table of a run's file leaves a key out, by what the service says itself.

1. Of this installation: of a service that is not installed here nothing is known.
2. Nothing is started but `python -m quartet_SERVICE --help`, which reads no file and imports no torch.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from typing import Any, Final

#: An idle machine takes a third of a second.
SECONDS: Final = 20.0
#: "  --embedded.kv_on_update = "recompute"    ("keep" | "recompute")"
_DEFAULT: Final = re.compile(r'^  --(\S+) = (".*?"|\S+)(?:    .*)?$', re.MULTILINE)


@cache
def service_defaults(service: str) -> dict[str, Any]:
    """Its keys that have one, dotted and without its name."""
    command = (sys.executable, "-m", f"quartet_{service}", "--help")
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {}
    return defaults_in(told.stdout) if told.returncode == 0 else {}


def defaults_in(usage: str) -> dict[str, Any]:
    """Those that a service's --help tells."""
    return {key: json.loads(value) for key, value in _DEFAULT.findall(usage) if _is_json(value)}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
