"""The [tensorboard] table: a run's metrics as event files of TensorBoard, in its output folder.

It belongs to whoever follows the run (`quartet rl`, `quartet watch`), as [wandb] does: with it or without, it
is the same run.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from quartet.run.switched import SwitchedConfig

#: Why there can be no event files, and what to do.
NOT_INSTALLED: Final = "tensorboard is not installed; in the repository: pip install './sdk[tensorboard]'"


def is_installed() -> bool:
    """Whether event files can be written here."""
    return find_spec("tensorboard") is not None


class TensorboardConfig(SwitchedConfig):
    """Whether there are event files."""
