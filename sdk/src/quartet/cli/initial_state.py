"""The state of another run that a run begins with (initial_state): found once, before it begins.

The trainer is told one folder: what is the newest now is another after the other run's next steps.
"""

from __future__ import annotations

import re
from pathlib import Path

from quartet.cli.export import states_of
from quartet.config import ConfigError

#: A state's folder, by the number of the call that saved it.
_STATE = re.compile(r"[A-Za-z0-9_.-]+@(\d+)")
#: Of a whole one.
_MARK = "COMPLETE.json"


def state_path(named: str) -> str:
    """The absolute path of a state: that one, or the newest of a run's output folder or of its folder of
    states. Raises ConfigError."""
    folder = Path(named).expanduser().absolute()
    if (folder / _MARK).is_file():
        return str(folder)
    states = states_of(folder)
    found = {int(match[1]): one for one in _states(states) if (match := _STATE.fullmatch(one.name))}
    if not found:
        raise ConfigError(
            f"initial_state = {named!r} has no saved state (in {states}); a run saves one after every "
            "ckpt.interval steps, and where it is stopped"
        )
    return str(found[max(found)])


def _states(folder: Path) -> list[Path]:
    return [mark.parent for mark in folder.glob(f"*/{_MARK}")]
