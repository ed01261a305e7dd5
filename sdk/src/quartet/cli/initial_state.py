"""What a run begins with: the state of another run (initial_state), or an adapter (initial_adapter.py). It is
found once, before the run begins.

1. The trainer is told one folder: what is the newest now is another after the other run's next steps.
2. A run that goes on began with it, and it need not be there any more: what names it, or a folder around it,
   is the same state.
3. What does not fit is refused here, all of it at once, as far as files say (adapter_fit.py, state_fit.py).
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from quartet.cli.adapter_fit import misfits
from quartet.cli.export import STATES, states_of
from quartet.cli.initial_adapter import with_adapter
from quartet.cli.job import MARK, RECORD
from quartet.cli.state_fit import fitting, left_out_of
from quartet.config import ConfigError
from quartet.config.refusals import together
from quartet.run.config import RunConfig, parse_run

#: A state's folder, by the number of the call that saved it.
_STATE = re.compile(r"[A-Za-z0-9_.-]+@(\d+)")


def with_beginning(config: RunConfig, model: Path | None = None, goes_on_in: Path | None = None) -> RunConfig:
    """The run, with what it begins with named for good, and what that decides. `model`: the folder of its
    model, where that is there; `goes_on_in`: its own, where it goes on. Raises ConfigError."""
    begun = None if goes_on_in is None else _begun(goes_on_in)
    lora = with_adapter(config.lora, None if begun is None else begun.lora)
    if begun is None and (refused := misfits(lora, model)):
        raise together(refused)
    if config.initial_state is None:
        return config.model_copy(update={"lora": lora})
    state = state_path(config.initial_state, goes_on_in)
    if begun is not None and begun.initial_state == state:
        lora = left_out_of(lora, begun.lora)
    else:
        lora = fitting(config, Path(state), config.initial_state)
    return config.model_copy(update={"lora": lora, "initial_state": state})


def state_path(named: str, goes_on_in: Path | None = None) -> str:
    """The absolute path of a state: that one, or the newest of a run's output folder or of its folder of
    states. `goes_on_in`: the folder of the run that began with it. Raises ConfigError."""
    folder = Path(os.path.expanduser(named)).absolute()
    before = None if goes_on_in is None else _begun(goes_on_in)
    begun = None if before is None or before.initial_state is None else Path(before.initial_state)
    if begun is not None and folder in (begun, *begun.parents):
        return str(begun)
    if (folder / MARK).is_file():
        return str(folder)
    try:
        states = states_of(folder, STATES)
    except ConfigError as error:
        raise ConfigError(f"initial_state = {named!r} is refused: {error}") from None
    found = {int(match[1]): one for one in _states(states) if (match := _STATE.fullmatch(one.name))}
    if not found:
        raise ConfigError(
            f"initial_state = {named!r} has no saved state (in {states}); a run saves one after every "
            "ckpt.interval steps, and where it is stopped"
        )
    return str(found[max(found)])


def _begun(folder: Path) -> RunConfig | None:
    """The run of a folder as it began; None where that cannot be read, which `job.resumed` refuses."""
    try:
        return parse_run(str(json.loads((folder / RECORD).read_text())["config_toml"]))
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        return None


def _states(folder: Path) -> list[Path]:
    return [mark.parent for mark in folder.glob(f"*/{MARK}")]
