"""The state of another run that a run begins with (initial_state): found once, before it begins.

1. The trainer is told one folder: what is the newest now is another after the other run's next steps.
2. A run that goes on began with it, and it need not be there any more: what names it, or a folder around it,
   is the same state.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from quartet.cli.export import MARK, states_of
from quartet.cli.job import RECORD
from quartet.config import ConfigError
from quartet.run.config import parse_run

#: A state's folder, by the number of the call that saved it.
_STATE = re.compile(r"[A-Za-z0-9_.-]+@(\d+)")


def state_path(named: str, goes_on_in: Path | None = None) -> str:
    """The absolute path of a state: that one, or the newest of a run's output folder or of its folder of
    states. `goes_on_in`: the folder of the run that began with it. Raises ConfigError."""
    folder = Path(named).expanduser().absolute()
    begun = None if goes_on_in is None else _begun_with(goes_on_in)
    if begun is not None and folder in (begun, *begun.parents):
        return str(begun)
    if (folder / MARK).is_file():
        return str(folder)
    states = states_of(folder)
    found = {int(match[1]): one for one in _states(states) if (match := _STATE.fullmatch(one.name))}
    if not found:
        raise ConfigError(
            f"initial_state = {named!r} has no saved state (in {states}); a run saves one after every "
            "ckpt.interval steps, and where it is stopped"
        )
    return str(found[max(found)])


def _begun_with(folder: Path) -> Path | None:
    """What the run of a folder began with; None where that cannot be read, which `job.resumed` refuses."""
    try:
        begun = parse_run(json.loads((folder / RECORD).read_text())["config_toml"]).initial_state
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        return None
    return None if begun is None else Path(begun)


def _states(folder: Path) -> list[Path]:
    return [mark.parent for mark in folder.glob(f"*/{MARK}")]
