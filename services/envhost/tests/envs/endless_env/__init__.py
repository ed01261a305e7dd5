"""An environment for tests whose tasks never end, and of which one cannot be read."""

import itertools
from pathlib import Path

import verifiers.v1 as vf

BROKEN = 7


class EndlessTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def any(self, trace: vf.Trace) -> float:
        return 1.0


class EndlessConfig(vf.TasksetConfig):
    breaks: bool = False
    #: Breaks once, and makes this file.
    broken_file: str = ""


class EndlessTaskset(vf.Taskset[EndlessTask, EndlessConfig]):
    INFINITE = True

    def load(self):
        for index in itertools.count():
            if self.config.breaks and index == BROKEN:
                raise OSError(f"row {index} is damaged")
            if self.config.broken_file and index == BROKEN and not Path(self.config.broken_file).exists():
                Path(self.config.broken_file).touch()
                raise ConnectionError("the data's server is away")
            yield EndlessTask(vf.TaskData(prompt=f"say {index}"), self.config.task)


__all__ = ["EndlessTaskset"]
