"""Where a run is shown besides its output folder: Weights & Biases, TensorBoard.

Whoever follows a run keeps one Reporters, and says nothing of either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from quartet.cli.tensorboard.reporter import TensorBoard
from quartet.cli.wandb import reporter as wandb
from quartet.cli.wandb.child import Ending
from quartet.config import ConfigError
from quartet.run import tensorboard
from quartet.run.tensorboard import TensorboardConfig
from quartet.run.wandb import WandbConfig
from quartet.v1.orchestrator_service_pb2 import Run


class Shown(Protocol):
    """A configuration that says where."""

    @property
    def wandb(self) -> WandbConfig:
        """In Weights & Biases."""
        ...

    @property
    def tensorboard(self) -> TensorboardConfig:
        """In TensorBoard."""
        ...


def is_shown(config: Shown) -> bool:
    """Whether anywhere."""
    return config.wandb.project is not None or config.tensorboard.enabled


def check(config: Shown) -> None:
    """Whether the run can be shown from here; nothing is sent. Raises ConfigError."""
    if config.tensorboard.enabled and not tensorboard.is_installed():
        raise ConfigError(
            f"tensorboard.enabled = true is set, and {tensorboard.NOT_INSTALLED}, or remove [tensorboard]"
        )
    wandb.check(config.wandb)


class Reporters:
    """All that show one folder."""

    def __init__(self, weights_and_biases: wandb.Reporter, tensorboard: TensorBoard) -> None:
        self._wandb = weights_and_biases
        self._tensorboard = tensorboard

    def begin(self, run: Run) -> None:
        """The run is there, and the folder has what came of it before."""
        self._tensorboard.begin()
        self._wandb.begin(run)

    def tick(self) -> None:
        """Tell what is new, and look whether it can be told."""
        self._tensorboard.tick()
        self._wandb.tick()

    def finish(self, ending: Ending) -> str:
        """The run ended: wait until that is told, bounded. What a person should know of it, in lines."""
        return _lines(self._tensorboard.finish(), self._wandb.finish(ending))

    def catch_up(self, run_id: str, config_toml: str, ending: Ending) -> str:
        """Show a folder whose run is over. What a person should know of it, in lines."""
        return _lines(self._tensorboard.catch_up(), self._wandb.catch_up(run_id, config_toml, ending))


@contextmanager
def reporting(
    config: Shown, folder: Path, say: Callable[[str], None], *, here: bool = True
) -> Iterator[Reporters]:
    """Reporters that leave nothing running, and say what there was also of a run that ended in a fault.
    `here`: whether the run's processes are on this machine."""
    files = TensorBoard(config.tensorboard, folder, say)
    with wandb.reporting(config.wandb, folder, say, here=here) as weights_and_biases:
        try:
            yield Reporters(weights_and_biases, files)
        finally:
            files.finish()


def _lines(*said: str) -> str:
    return "\n".join(one for one in said if one)
