"""The names that a run may have: they are names of folders, too."""

from __future__ import annotations

import re

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
RULE = "use 1 to 64 of A-Z a-z 0-9 _ . -, not dots alone"


def is_run_id(text: str) -> bool:
    """Whether a run may be called so. "." and ".." would be other folders than the run's."""
    return _NAME.fullmatch(text) is not None and set(text) != {"."}
