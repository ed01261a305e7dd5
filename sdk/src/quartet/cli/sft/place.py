"""Where a fine-tuning stands, and what its output folder says of it.

1. The calls of a run follow from its steps and the interval of its states alone: ForwardBackward and
   OptimStep for each step, SaveState after every `interval` steps but the last, and one at the end that also
   exports. So the number of the call that was applied last says which step comes next.
2. A folder is gone on with under the configuration and the data that it was begun with, or not at all; and by
   one process at a time, because two would write over each other's trainer.
3. Lines of steps that will be done again are cut off metrics.jsonl: every step has one line in the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from quartet.cli.held import LOCK, held
from quartet.cli.outputs import recover_lines, write_json, write_lines
from quartet.config import ConfigError
from quartet.run.sft import SftConfig

RECORD, METRICS, CHECKPOINT = "run.json", "metrics.jsonl", "checkpoint"


@dataclass(frozen=True)
class Calls:
    """The calls of a run of so many steps."""

    steps: int
    interval: int

    def first_of(self, step: int) -> int:
        """The number of the first call of a step; steps count from 0."""
        return 1 + 2 * step + step // self.interval

    def saves_after(self, step: int) -> bool:
        """Whether a plain state is saved after this step."""
        return (step + 1) % self.interval == 0 and step + 1 < self.steps

    @property
    def last(self) -> int:
        """The number of the call that exports the model."""
        return 1 + 2 * self.steps + (self.steps - 1) // self.interval

    def step_after(self, applied: int) -> int:
        """The step that comes next in a run that was restored at this call: 0 in a new one."""
        return self.steps if applied >= self.last else applied // (2 * self.interval + 1) * self.interval


@contextmanager
def taken(folder: Path, config: SftConfig, *, resume: bool) -> Iterator[None]:
    """The folder, new or gone on with, and locked. Raises ConfigError."""
    look = _check_begun if resume else _check_new
    look(folder, config)  # before a lock is left in what is somebody else's
    refusal = f"--output-dir {folder} belongs to a fine-tuning that is going on; wait for its end"
    with held(folder, f"{refusal}, or name another"):
        look(folder, config)  # another may have taken it since
        if not resume:
            write_json(folder / RECORD, _record(config))
        yield


def _check_new(folder: Path, config: SftConfig) -> None:
    """Whether a new fine-tuning may have the folder. Raises ConfigError."""
    if folder.exists() and any(entry.name != LOCK for entry in folder.iterdir()):
        raise ConfigError(
            f"--output-dir {folder} is not empty; add --resume to go on with what it holds, or name another"
        )


def _check_begun(folder: Path, config: SftConfig) -> None:
    """Whether what the folder holds is this fine-tuning, and unfinished. Raises ConfigError."""
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--resume: {folder} holds no fine-tuning that was begun; leave it out") from error
    wanted = _record(config)
    differs = [key for key in sorted(found.keys() | wanted.keys()) if found.get(key) != wanted.get(key)]
    if differs:
        raise ConfigError(
            f"--resume: {folder} was begun with another {differs[0]}; give what it was begun with "
            f"({folder / RECORD}), or name another --output-dir"
        )
    if (folder / CHECKPOINT).exists():
        raise ConfigError(f"--resume: {folder} is complete; name another --output-dir")


def cut_metrics(folder: Path, steps: int) -> None:
    """Keep the lines of so many steps."""
    file = folder / METRICS
    if file.exists():
        write_lines(file, [row for row in recover_lines(file) if row["step"] <= steps])


def _record(config: SftConfig) -> dict[str, object]:
    # How the trainer is deployed may change; what it computes may not.
    values = config.model_dump(mode="json", exclude={"trainer"})
    return values | {"contents of data": xxhash.xxh3_128_hexdigest(config.data.read_bytes())}
