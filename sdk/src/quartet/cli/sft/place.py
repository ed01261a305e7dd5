"""Where a fine-tuning stands, and what its output folder says of it.

1. The calls of a run follow from its steps, and from those after which a state is saved, alone:
   ForwardBackward and OptimStep for each step, SaveState behind some, and one at the end that also exports.
   So the number of the call that was applied last says which step comes next, wherever it was closed.
2. A folder is gone on with under the configuration and the data that it was begun with, or not at all; and by
   one process at a time, because two would write over each other's trainer. What does not move what is
   computed may differ (MAY_DIFFER): how the trainer is deployed, when the loss is measured, where that is
   shown. So may the names of the data, whose contents are compared.
3. Lines of steps that will be done again are cut off metrics.jsonl: every step has one line in the end.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quartet.cli.begun_by import RELEASE, is_of_a_fine_tuning, own_release
from quartet.cli.held import LOCK, held
from quartet.cli.outputs import recover_lines, write_json, write_lines
from quartet.cli.reporting import is_shown
from quartet.cli.sft.requests import RUN_ID
from quartet.cli.sft.sources import digest_of
from quartet.config import ConfigError
from quartet.run.lora import LoraConfig
from quartet.run.sft import SftConfig

#: Keys that may be others when a folder is gone on with.
MAY_DIFFER = frozenset({"trainer", "eval", "wandb", "mlflow", "tensorboard"})
#: Of values in a refusal.
MAX_SHOWN = 60
#: Keys of files, whose contents must be the same.
CONTENTS = ("data", "validation")
RECORD, METRICS, CHECKPOINT = "run.json", "metrics.jsonl", "checkpoint"
#: Of the record, what its data came to.
STEPS = "steps"
#: The fine-tuning, by which it goes on where no other file is named.
TUNING_FILE = "sft.toml"

Record = dict[str, Any]


@dataclass(frozen=True)
class Calls:
    """The calls of a run of so many steps."""

    steps: int
    #: After which plain states are saved: in their order, and never after the last.
    saves: Sequence[int]

    def first_of(self, step: int) -> int:
        """The number of the first call of a step; steps count from 0."""
        return 1 + 2 * step + bisect_right(self.saves, step)

    def saves_after(self, step: int) -> bool:
        """Whether a plain state is saved after this step."""
        return bisect_right(self.saves, step) < bisect_right(self.saves, step + 1)

    @property
    def last(self) -> int:
        """The number of the call that exports the model."""
        return self.first_of(self.steps)

    def step_after(self, applied: int) -> int:
        """The step that comes next in a run whose steps are whole, and that was restored at this call: 0 in a
        new one."""
        return (
            self.steps if applied >= self.last else bisect_right(range(self.steps), applied, key=self._behind)
        )

    def _behind(self, step: int) -> int:
        """The number of the last call of this step, but for the state behind it."""
        return self.first_of(step) + 1


def check_place(folder: Path, config: SftConfig, *, resume: bool) -> None:
    """Whether the folder may be taken. Raises ConfigError."""
    look = _check_begun if resume else _check_new
    look(folder, config)


@contextmanager
def taken(folder: Path, config: SftConfig, *, resume: bool, steps: int | None = None) -> Iterator[None]:
    """The folder, new or gone on with, and locked; a new one says how many steps it is. Raises
    ConfigError."""
    check_place(folder, config, resume=resume)  # before a lock is left in what is somebody else's
    refusal = f"--output-dir {folder} belongs to a fine-tuning that is going on; wait for its end"
    with held(folder, f"{refusal}, or name another"):
        check_place(folder, config, resume=resume)  # another may have taken it since
        if not resume:
            begun = {"run_id": RUN_ID, "begun_ms": int(1000 * time.time()), STEPS: steps}
            write_json(folder / RECORD, begun | {RELEASE: own_release()} | _record(config))
        yield


def _is_free(folder: Path) -> bool:
    return not folder.exists() or (folder.is_dir() and {one.name for one in folder.iterdir()} <= {LOCK})


def _check_new(folder: Path, config: SftConfig) -> None:
    """Whether a new fine-tuning may have the folder. Raises ConfigError."""
    if _is_free(folder):
        return
    if not is_of_a_fine_tuning(folder / RECORD):
        raise ConfigError(
            f"output folder {folder} is not empty, and was not written by quartet sft; name another "
            "--output-dir"
        )
    raise ConfigError(
        f"output folder {folder} is not empty; add --resume to go on with its fine-tuning, or name another "
        "--output-dir"
    )


def _check_begun(folder: Path, config: SftConfig) -> None:
    """Whether what the folder holds is this fine-tuning, and unfinished. Raises ConfigError."""
    try:
        begun = _begun(folder)
    except (OSError, ValueError, TypeError) as error:
        instead = "leave it out" if _is_free(folder) else "name the folder of one with --output-dir"
        raise ConfigError(f"--resume: {folder} holds no fine-tuning that was begun; {instead}") from error
    wanted = _record(config)
    compared = sorted(wanted.keys() - set(CONTENTS))
    if differs := [key for key in compared if begun.get(key) != wanted[key]]:
        raise ConfigError(
            f"--resume: {folder} was begun with another {_differing(differs[0], begun, wanted)}; give what "
            f"it was begun with (--resume alone takes it from {folder / TUNING_FILE}), or name another "
            "--output-dir"
        )
    _check_metrics(folder / METRICS)
    if (folder / CHECKPOINT).exists() and not is_shown(config):
        raise ConfigError(
            f"--resume: {folder} is complete; name another --output-dir, with model = "
            f"{str(folder / CHECKPOINT)!r} to train on from its model"
        )


def _check_metrics(file: Path) -> None:
    """Whether the lines can be gone on from. Raises ConfigError."""
    for number, row in enumerate(recover_lines(file), start=1):
        if not isinstance(row.get("step"), int):
            raise ConfigError(f"--resume: {file}:{number} has no step; restore it, or remove the line")


def _begun(folder: Path) -> Record:
    """What a folder was begun with. Raises OSError, ValueError, TypeError."""
    found = dict(json.loads((folder / RECORD).read_text(encoding="utf-8")))
    # Parsed: a newer release has keys that an older one did not write down.
    known = {key: value for key, value in found.items() if key in SftConfig.model_fields}
    return _values(SftConfig.model_validate(known)) | {
        f"contents of {key}": found.get(f"contents of {key}") for key in CONTENTS
    }


def _differing(key: str, begun: Record, wanted: Record) -> str:
    """A key with both of its values; of a table, the first of its keys that differs, and of contents their
    names."""
    name = key.removeprefix("contents of ")
    was, now = begun.get(name), wanted[name]
    if was == now:
        return key
    if isinstance(was, dict) and isinstance(now, dict):
        inner = next(name for name in now if was.get(name) != now[name])
        key, was, now = f"{key}.{inner}", was.get(inner), now[inner]
    return f"{key} ({_shown(was)}, and not {_shown(now)})"


def _shown(value: Any) -> str:
    """Of a long one its end, where paths differ."""
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN else f"...{text[-MAX_SHOWN:]}"


def begun_lora(folder: Path) -> LoraConfig | None:
    """The [lora] that the fine-tuning of a folder was begun with; None where that cannot be read, which
    `taken` refuses."""
    try:
        return LoraConfig.model_validate(_begun(folder)["lora"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def begun_keep_last(folder: Path) -> int | None:
    """Likewise its ckpt.keep_last."""
    try:
        return int(_begun(folder)["ckpt"]["keep_last"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def begun_ms(folder: Path) -> int:
    """When the fine-tuning of a folder was begun; 0 where an earlier release did not say."""
    return int(json.loads((folder / RECORD).read_text(encoding="utf-8")).get("begun_ms", 0))


def begun_steps(folder: Path) -> int | None:
    """How many steps the fine-tuning of a folder is; None where none was begun, or by an earlier release."""
    try:
        steps = json.loads((folder / RECORD).read_text(encoding="utf-8")).get(STEPS)
    except OSError:
        return None
    return None if steps is None else int(steps)


def cut_metrics(folder: Path, steps: int) -> None:
    """Keep the lines of so many steps; before the first there are none, and what was measured then is
    measured again."""
    file = folder / METRICS
    if file.exists():
        write_lines(file, [row for row in recover_lines(file) if row["step"] <= steps and steps])


def _record(config: SftConfig) -> Record:
    return _values(config) | contents_of(config)


def contents_of(config: SftConfig) -> Record:
    """What is in its files. Raises ConfigError, OSError."""
    files = {key: getattr(config, key) for key in CONTENTS}
    return {
        f"contents of {key}": None if named is None else digest_of(named, key) for key, named in files.items()
    }


def digest_in(contents: Record, key: str) -> str | None:
    """Of these contents, that of the files of a key; None where it has none."""
    return contents.get(f"contents of {key}")


def _values(config: SftConfig) -> Record:
    return in_full(config).model_dump(mode="json", exclude=set(MAY_DIFFER))


def in_full(config: SftConfig) -> SftConfig:
    """With paths that mean the same wherever it goes on."""
    files = {key: named.absolute() for key in CONTENTS if (named := getattr(config, key)) is not None}
    return config.model_copy(update=files)
