"""Where a run is shown besides its output folder: Weights & Biases, MLflow, TensorBoard.

Whoever follows a run keeps one Reporters, and says nothing of any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from quartet.cli.elsewhere.child import Ending
from quartet.cli.elsewhere.process import Place
from quartet.cli.elsewhere.reporter import Reporter
from quartet.cli.elsewhere.reporter import reporting as reporting_to
from quartet.cli.mlflow import place as mlflow
from quartet.cli.mlflow.place import Mlflow
from quartet.cli.tensorboard.reporter import TensorBoard
from quartet.cli.wandb import place as wandb
from quartet.cli.wandb.place import WeightsAndBiases
from quartet.config import ConfigError
from quartet.run import tensorboard
from quartet.run.mlflow import MlflowConfig
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
    def mlflow(self) -> MlflowConfig:
        """In MLflow."""
        ...

    @property
    def tensorboard(self) -> TensorboardConfig:
        """In TensorBoard."""
        ...


def is_shown(config: Shown) -> bool:
    """Whether anywhere."""
    named = (config.wandb.project, config.mlflow.experiment)
    return config.tensorboard.enabled or any(name is not None for name in named)


def check(config: Shown) -> None:
    """Whether the run can be shown from here; nothing is sent. Raises ConfigError."""
    if config.tensorboard.enabled and not tensorboard.is_installed():
        raise ConfigError(
            f"tensorboard.enabled = true is set, and {tensorboard.NOT_INSTALLED}, or remove [tensorboard]"
        )
    wandb.check(config.wandb)
    mlflow.check(config.mlflow)


class Reporters:
    """All that show one folder."""

    def __init__(self, files: TensorBoard, places: Sequence[Reporter]) -> None:
        self._files = files
        self._places = places

    def begin(self, run: Run) -> None:
        """The run is there, and the folder has what came of it before."""
        self._files.begin()
        for place in self._places:
            place.begin(run)

    def tick(self) -> None:
        """Tell what is new, and look whether it can be told."""
        self._files.tick()
        for place in self._places:
            place.tick()

    def finish(self, ending: Ending) -> str:
        """The run ended: wait until that is told, bounded. What a person should know of it, in lines."""
        for place in self._places:  # so that they end beside each other
            place.end(ending)
        return _lines(self._files.finish(), *(place.finish(ending) for place in self._places))

    def catch_up(self, run_id: str, config_toml: str, ending: Ending) -> str:
        """Show a folder whose run is over. What a person should know of it, in lines."""
        caught_up = (place.catch_up(run_id, config_toml, ending) for place in self._places)
        return _lines(self._files.catch_up(), *caught_up)


@contextmanager
def reporting(
    config: Shown, folder: Path, say: Callable[[str], None], *, here: bool = True
) -> Iterator[Reporters]:
    """Reporters that leave nothing running, and say what there was also of a run that ended in a fault.
    `here`: whether the run's processes are on this machine."""
    files = TensorBoard(config.tensorboard, folder, say, here=here)
    with ExitStack() as stack:
        stack.callback(files.finish)
        places: list[Place] = [WeightsAndBiases(config.wandb), Mlflow(config.mlflow)]
        yield Reporters(
            files, [stack.enter_context(reporting_to(place, folder, say, here=here)) for place in places]
        )


def _lines(*said: str) -> str:
    return "\n".join(one for one in said if one)
