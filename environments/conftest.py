"""Makes `episodes_by_hand`, which every package's tests use, importable from wherever pytest is started."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "episodes_by_hand", Path(__file__).with_name("episodes_by_hand.py")
)
assert _spec is not None and _spec.loader is not None
sys.modules["episodes_by_hand"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["episodes_by_hand"])
