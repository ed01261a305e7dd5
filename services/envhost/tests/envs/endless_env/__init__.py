"""An environment for tests whose tasks never end, and of which one cannot be read."""

import itertools

import verifiers.v1 as vf

BROKEN = 7


class EndlessTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def any(self, trace: vf.Trace) -> float:
        return 1.0


class EndlessConfig(vf.TasksetConfig):
    breaks: bool = False


class EndlessTaskset(vf.Taskset[EndlessTask, EndlessConfig]):
    INFINITE = True

    def load(self):
        for index in itertools.count():
            if self.config.breaks and index == BROKEN:
                raise OSError(f"row {index} is damaged")
            yield EndlessTask(vf.TaskData(prompt=f"say {index}"), self.config.task)


__all__ = ["EndlessTaskset"]
