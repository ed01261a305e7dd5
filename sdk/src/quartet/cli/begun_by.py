"""By what the record of an output folder (run.json) was written: by `quartet rl` or by `quartet sft`, and by
which release. One that cannot be read is told as what it may be.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from quartet.config import ConfigError

#: Of a record, the release that wrote it; earlier ones did not say.
RELEASE: Final = "release"
#: What the record of a run has, and what that of a fine-tuning has in its place.
OF_A_RUN: Final = "config_toml"
OF_A_FINE_TUNING: Final = "data"


def own_release() -> str:
    """That of this command."""
    return version("quartet")


def record_in(file: Path) -> dict[str, Any]:
    """What a record says; nothing where it cannot be read."""
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def is_of_a_fine_tuning(file: Path) -> bool:
    """Whether a record is."""
    said = record_in(file)
    return OF_A_FINE_TUNING in said and OF_A_RUN not in said


def of_another_release(file: Path, why: ConfigError | str) -> str:
    """What somebody is told whose own record, or what was written beside it, is refused."""
    here, before = own_release(), record_in(file).get(RELEASE, "")
    by = f"release {before}" if before and before != here else "another release, or changed since"
    return f"{file.parent} was begun by {by}, and this one ({here}) refuses what it wrote ({why})"
