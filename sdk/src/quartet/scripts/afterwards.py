"""What scripts of transformers do behind train(): tell and keep what came out.

1. A script is the main process, and the only one: what is left to that one it does, and it waits for nobody.
2. Files have transformers' names, and are in args.output_dir beside those of the training. Before there is
   one they are in evals/ beside that, by its name: nothing is trained in a folder that has files.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from quartet.kit.standard_streams import say
from quartet.scripts.outcome import TrainerState

#: Of transformers; and what all save_metrics together wrote.
STATE, RESULTS, ALL_RESULTS = "trainer_state.json", "{split}_results.json", "all_results.json"


class OneProcess:
    """What accelerate's Accelerator says of the processes of a script: there is one."""

    is_main_process: Final = True
    is_local_main_process: Final = True
    is_last_process: Final = True
    process_index: Final = 0
    local_process_index: Final = 0
    num_processes: Final = 1

    def print(self, *told: Any, **how: Any) -> None:
        """As `print`."""
        print(*told, **how)

    def wait_for_everyone(self) -> None:
        """Nobody else is there."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer.accelerator has no {name!r} here: the model is in another process; leave it out"
        )


class Afterwards(ABC):
    """What a trainer is asked for when it has trained."""

    accelerator: Final = OneProcess()

    @property
    @abstractmethod
    def folder(self) -> Path:
        """Where it is trained."""

    @property
    @abstractmethod
    def state(self) -> TrainerState:
        """Where it stands."""

    def is_world_process_zero(self) -> bool:
        """Whether this is the process that tells and writes: it is."""
        return True

    def is_local_process_zero(self) -> bool:
        """Of this machine's; it is, too."""
        return True

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print figures, a line each."""
        width = max(map(len, metrics), default=0)
        lines = (f"  {name:<{width}} = {value}" for name, value in sorted(metrics.items()))
        say("\n".join((f"***** {split} metrics *****", *lines)), sys.stdout)

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write figures to a file, and with `combined` to that of all splits. Raises OSError."""
        self._write(RESULTS.format(split=split), metrics)
        if combined:
            every = self._place() / ALL_RESULTS
            before = json.loads(every.read_text(encoding="utf-8")) if every.exists() else {}
            self._write(ALL_RESULTS, {**before, **metrics})

    def save_state(self) -> None:
        """Write trainer.state to a file. What a training goes on from is saved without it. Raises OSError."""
        self._write(STATE, asdict(self.state))

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        (place := self._place()).mkdir(parents=True, exist_ok=True)
        text = json.dumps(values, indent=4, sort_keys=True)
        (place / name).write_text(text + "\n", encoding="utf-8")

    def _place(self) -> Path:
        from quartet.cli.job import RECORD

        is_begun = (self.folder / RECORD).is_file()
        return self.folder if is_begun else self.folder.parent / "evals" / self.folder.name
